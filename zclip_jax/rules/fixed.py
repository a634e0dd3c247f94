"""A constant threshold: what `optax.clip_by_global_norm` does."""

from typing import Any

from zclip_jax._checks import check_number
from zclip_jax._numerics import as_float
from zclip_jax._rule import Decision, Rule
from zclip_jax.rules._schedules import takes_schedules


@takes_schedules
def fixed(max_norm: Any) -> Rule:
    r"""Allows norms up to a constant.

    .. math:: t = \text{max\_norm}, \qquad \text{fired} \iff n > t

    Absorbs nothing and has no warm-up.

    Args:
      max_norm: the norm allowed, at least 0; a number, a traced scalar or a schedule.

    Returns:
      A `Rule` without state.

    Raises:
      ValueError: `max_norm` is negative, NaN or no number.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.fixed(1.0)
      >>> outcome, _ = decide(rule, 5.0, rule.init())
      >>> float(outcome.threshold), bool(outcome.fired), round(float(outcome.clip_scale), 4)
      (1.0, True, 0.2)

    References:
      Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks",
      https://arxiv.org/abs/1211.5063, 2013.
    """
    check_number("max_norm", max_norm, "a number >= 0", lambda x: x >= 0)

    def update(norm, state, /, **extra_args):
        del extra_args
        threshold = as_float(max_norm)
        return Decision(threshold=threshold, fired=norm > threshold, trigger=threshold), state

    return Rule(init=lambda: (), update=update)
