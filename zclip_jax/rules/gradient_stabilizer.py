"""GradientStabilizer: the norm replaced by the ratio of its moving moments."""

from typing import Any

import jax.numpy as jnp

from zclip_jax._checks import check_number
from zclip_jax._numerics import as_float, increment, moving_mean, safe_sqrt, unfused
from zclip_jax._rule import Decision, Rule
from zclip_jax._typing import FloatEach, IntEach, dataclass
from zclip_jax.rules._schedules import takes_schedules


@dataclass(frozen=True)
class GradientStabilizerState:
    """State of `gradient_stabilizer`.

    Args:
      num_norms: int32, norms absorbed so far.
      first: float, moving mean of the norms.
      second: float, moving mean of their squares.
    """

    num_norms: IntEach
    first: FloatEach
    second: FloatEach


@takes_schedules
def gradient_stabilizer(decay1: Any = 0.6, decay2: Any = 0.999) -> Rule:
    r"""Gives every gradient the norm :math:`m / \sqrt v`, larger or smaller than it was.

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1)\,n, \qquad v \leftarrow \beta_2 v + (1-\beta_2)\,n^2, \qquad
        g \leftarrow \frac{g}{n}\cdot\frac{\hat m}{\sqrt{\hat v}}

    with the moments of this step's norm included, and corrected for their start at 0 as Adam's are. The result
    has no unit and lies near 1, so an optimizer that does not care for the gradient's scale belongs behind it.

    Absorbs the raw norm; a spike moves m and v together and is worth at most
    :math:`(1-\beta_1)/\sqrt{1-\beta_2}` of the usual. It sets every norm and calls none a spike: it never fires.
    There is no warm-up.

    Args:
      decay1: of the norms, in [0, 1).
      decay2: of their squares, in [0, 1).

    Returns:
      A `Rule` whose state is a `GradientStabilizerState`.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.gradient_stabilizer()
      >>> outcome, state = decide(rule, 0.25, rule.init())
      >>> round(float(outcome.threshold), 4), round(float(outcome.clip_scale), 4)
      (1.0, 4.0)

    References:
      Huang, Wang, Hu, et al., "GradientStabilizer: Fix the Norm, Not the Gradient",
      https://arxiv.org/abs/2502.17055, 2025.
    """
    check_number("decay1", decay1, "a number in [0, 1)", lambda x: 0 <= x < 1)
    check_number("decay2", decay2, "a number in [0, 1)", lambda x: 0 <= x < 1)

    def init():
        return GradientStabilizerState(
            num_norms=jnp.zeros((), jnp.int32), first=as_float(jnp.zeros(())), second=as_float(jnp.zeros(()))
        )

    def update(norm, state, /, **extra_args):
        del extra_args
        b1, b2 = as_float(decay1), as_float(decay2)
        first = moving_mean(as_float(state.first), norm, b1)
        second = moving_mean(as_float(state.second), unfused(jnp.square(norm)), b2)
        step = as_float(state.num_norms) + 1
        root = safe_sqrt(second / (1 - b2**step))
        threshold = first / (1 - b1**step) / jnp.where(root > 0, root, 1.0)
        decision = Decision(threshold=threshold, fired=False, mean=state.first, raises=True)
        return decision, GradientStabilizerState(
            num_norms=increment(state.num_norms), first=first, second=second
        )

    return Rule(init=init, update=update)
