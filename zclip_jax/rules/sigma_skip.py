"""The rule by which OLMo-core, Levanter and MaxText skip steps."""

from typing import Any

import jax.numpy as jnp

from zclip_jax._rule import Decision, Rule, as_float, check_count, check_number, unfused
from zclip_jax._typing import Floats, IntScalar, dataclass
from zclip_jax.rules._schedules import takes_schedules
from zclip_jax.rules._window import check_window, mean_and_std, push


@dataclass(frozen=True)
class SigmaSkipState:
    """State of `sigma_skip`.

    Args:
      num_norms: int32, steps absorbed so far.
      norms: float `[window]`, the last norms, round and round.
      losses: float `[window]`, the losses of the same steps; zeros where none is passed.
    """

    num_norms: IntScalar
    norms: Floats
    losses: Floats


@takes_schedules
def sigma_skip(num_std: Any = 6.0, window: Any = 128, warmup_steps: Any = 64) -> Rule:
    r"""Calls a step a spike when its norm or its loss is far above those of the last `window` steps.

    With mean :math:`\mu` and standard deviation :math:`\sigma` (unbiased) of the steps before this one:

    .. math:: \text{fired} \iff x > \mu + \text{num\_std}\cdot\sigma
              \quad\text{for } x \text{ the norm or the loss}

    Made for `skip_by_rule`. In `clip_by_rule` a spike of the norm is scaled down to that limit, and a spike of
    the loss alone passes. Absorbs raw norm and loss, so a shift of level is learned within the window. Looks at
    the loss where the training loop passes `value=`.

    Args:
      num_std: standard deviations above the mean, positive.
      window: steps to keep, a Python int, at least 2.
      warmup_steps: steps to collect before the rule may fire, at least 2.

    Returns:
      A `Rule` whose state is a `SigmaSkipState`.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.sigma_skip(warmup_steps=4)
      >>> state = rule.init()
      >>> for norm, loss in [(1.0, 2.0), (1.1, 2.1), (0.9, 1.9), (1.0, 2.0), (1.0, 9.0)]:
      ...     outcome, state = decide(rule, norm, state, value=loss)
      >>> bool(outcome.fired), float(outcome.threshold)
      (True, inf)

    References:
      Levanter, `SkipStepConfig`; OLMo-core, `SkipStepOptimizer`; MaxText, `skip_step_on_spikes`: 128 steps, six
      standard deviations, from 64 steps on.
    """
    check_number("num_std", num_std, "a number > 0", lambda x: x > 0)
    check_window("window", window, least=2)
    check_count("warmup_steps", warmup_steps, least=2)

    def init():
        dtype = jnp.result_type(float)
        return SigmaSkipState(
            num_norms=jnp.zeros((), jnp.int32),
            norms=jnp.zeros(window, dtype),
            losses=jnp.zeros(window, dtype),
        )

    def update(norm, state, *, value=None, **extra_args):
        del extra_args
        count = state.num_norms
        ready = count >= jnp.asarray(warmup_steps, jnp.int32)
        mean, std = mean_and_std(state.norms, count, ddof=1)
        limit = mean + unfused(as_float(num_std) * std)
        spike = norm > limit
        loss_spike, loss = jnp.zeros((), bool), as_float(0.0)
        if value is not None:
            loss = as_float(value)
            loss_mean, loss_std = mean_and_std(state.losses, count, ddof=1)
            # A loss that is no number is a spike, and is not absorbed.
            loss_spike = ~(loss <= loss_mean + unfused(as_float(num_std) * loss_std))
            loss = jnp.where(jnp.isfinite(loss), loss, loss_mean)
        decision = Decision(
            threshold=jnp.where(ready & spike, limit, jnp.inf),
            z_score=jnp.where(ready & (std > 0), (norm - mean) / jnp.where(std > 0, std, 1.0), 0.0),
            fired=ready & (spike | loss_spike),
            mean=mean,
            std=std,
        )
        return decision, SigmaSkipState(
            num_norms=count + 1,
            norms=push(state.norms, count, norm),
            losses=push(state.losses, count, loss),
        )

    return Rule(init=init, update=update)
