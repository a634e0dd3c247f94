"""A threshold that follows the moving mean of past norms."""

from typing import Any

import jax.numpy as jnp

from zclip_jax._checks import check_number
from zclip_jax._numerics import as_float, increment, moving_mean, unfused
from zclip_jax._rule import Decision, Rule
from zclip_jax._typing import FloatEach, IntEach, dataclass
from zclip_jax.rules._schedules import takes_schedules
from zclip_jax.rules.combinators import with_threshold


@dataclass(frozen=True)
class EmaState:
    """State of `ema`.

    Args:
      num_norms: int32, norms absorbed so far.
      mean: float, their moving mean; 0 before the first.
    """

    num_norms: IntEach
    mean: FloatEach


@takes_schedules
def ema(
    base: Any = 1.0,
    a: Any = 1.0,
    b: Any = 0.5,
    decay: Any = 0.99,
    low: Any = 0.1,
    high: Any = 10.0,
) -> Rule:
    r"""Allows a multiple of the mean of past norms, plus a constant, within bounds.

    With the moving mean :math:`m` of the norms before this one:

    .. math:: t = \min(\max(a\,m + b\cdot\text{base},\ \text{low}\cdot\text{base}),\ \text{high}\cdot\text{base})

    Absorbs the raw norm, :math:`m \leftarrow \text{decay}\cdot m + (1-\text{decay})\,n`; the first norm is the
    first mean, and is itself limited by the upper bound alone.

    Args:
      base: the scale of the constant and the bounds, in the norm's unit, positive.
      a: multiple of the moving mean, at least 0.
      b: multiple of `base` added to it, at least 0.
      decay: of the moving mean, in [0, 1).
      low: lower bound of the threshold as a multiple of `base`, at least 0.
      high: upper bound of the threshold as a multiple of `base`, at least `low`; `inf` for none.

    Returns:
      A `Rule` whose state is an `EmaState`.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.ema(base=1.0)
      >>> state = rule.init()
      >>> for norm in [1.0, 1.0, 4.0]:
      ...     outcome, state = decide(rule, norm, state)
      >>> float(outcome.threshold), bool(outcome.fired)
      (1.5, True)
    """
    check_number("base", base, "a number > 0", lambda x: x > 0)
    check_number("a", a, "a number >= 0", lambda x: x >= 0)
    check_number("b", b, "a number >= 0", lambda x: x >= 0)
    check_number("decay", decay, "a number in [0, 1)", lambda x: 0 <= x < 1)
    check_number("low", low, "a number >= 0", lambda x: x >= 0)
    check_number("high", high, "a number >= 0", lambda x: x >= 0)

    def init():
        return EmaState(num_norms=jnp.zeros((), jnp.int32), mean=as_float(jnp.zeros(())))

    def update(norm, state, /, **extra_args):
        del extra_args
        first, mean = state.num_norms == 0, as_float(state.mean)
        threshold = unfused(as_float(a) * mean) + as_float(b) * as_float(base)
        threshold = jnp.where(first, jnp.inf, threshold)
        decision = Decision(threshold=threshold, fired=norm > threshold, trigger=threshold, mean=mean)
        new_mean = moving_mean(mean, norm, as_float(decay))
        return decision, EmaState(num_norms=increment(state.num_norms), mean=jnp.where(first, norm, new_mean))

    def within_bounds(threshold):
        least, most = as_float(low) * as_float(base), as_float(high) * as_float(base)
        return jnp.clip(threshold, least, most)

    return with_threshold(Rule(init=init, update=update), within_bounds)
