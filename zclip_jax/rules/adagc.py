"""AdaGC: each tensor against the moving mean of its own clipped norms."""

from typing import Any

import jax.numpy as jnp

from zclip_jax._checks import check_count, check_number
from zclip_jax._numerics import as_float, increment, moving_mean, safe_sqrt, unfused
from zclip_jax._rule import Decision, Rule
from zclip_jax._typing import FloatEach, IntEach, dataclass
from zclip_jax.rules._schedules import takes_schedules


@dataclass(frozen=True)
class AdaGCState:
    """State of `adagc`.

    Args:
      num_norms: int32, norms absorbed so far.
      ema: float, moving mean of the clipped norms; 0 before the first.
    """

    num_norms: IntEach
    ema: FloatEach


@takes_schedules
def adagc(lam: Any = 1.05, decay: Any = 0.98, warmup_steps: Any = 100, warmup_max_norm: Any = 1.0) -> Rule:
    r"""Allows a norm slightly above the moving mean of the clipped norms.

    With the norm :math:`n` of a tensor and the global norm :math:`N`:

    .. math::
        h = \begin{cases} \min(\text{warmup\_max\_norm} / N, 1) & \text{during the warm-up} \\
                          \min(\text{lam}\cdot\gamma / n, 1) & \text{afterwards} \end{cases}

    Absorbs the clipped norm :math:`h n`: during the warm-up :math:`\gamma \leftarrow \min(\gamma, h n)`,
    afterwards :math:`\gamma \leftarrow \text{decay}\cdot\gamma + (1 - \text{decay})\, h n`.

    Meant for one rule per tensor: `clip_by_rule(rules.adagc(), granularity="leaf")` is AdaGC.

    Args:
      lam: multiple of the mean that is allowed, at least 1.
      decay: of the mean, in [0, 1).
      warmup_steps: norms during which the global norm is capped instead, at least 1.
      warmup_max_norm: that cap, positive.

    Returns:
      A `Rule` whose state is an `AdaGCState`.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.adagc(warmup_steps=2)
      >>> state = rule.init()
      >>> for norm in [0.5, 0.4, 2.0]:
      ...     outcome, state = decide(rule, norm, state)
      >>> round(float(outcome.threshold), 4)
      0.42

    References:
      Wang, Li, Chen, et al., "AdaGC: Enhancing LLM Pretraining Stability via Adaptive Gradient Clipping",
      https://arxiv.org/abs/2502.11034, 2025.
    """
    check_number("lam", lam, "a number >= 1", lambda x: x >= 1)
    check_number("decay", decay, "a number in [0, 1)", lambda x: 0 <= x < 1)
    check_count("warmup_steps", warmup_steps, least=1)
    check_number("warmup_max_norm", warmup_max_norm, "a number > 0", lambda x: x > 0)

    def init():
        return AdaGCState(num_norms=jnp.zeros((), jnp.int32), ema=as_float(jnp.zeros(())))

    def update(norm, state, /, *, global_norm=None, **extra_args):
        del extra_args
        warming = state.num_norms < jnp.asarray(warmup_steps, jnp.int32)
        whole = norm if global_norm is None else as_float(global_norm)
        # During the warm-up every tensor is scaled as the whole is.
        share = norm / jnp.where(whole > 0, whole, 1.0)
        first, mean = state.num_norms == 0, as_float(state.ema)
        cap, limit = as_float(warmup_max_norm), as_float(lam) * mean
        threshold = jnp.where(warming, jnp.where(whole > cap, cap * share, jnp.inf), limit)
        # What the other tensors leave of the cap.
        others = jnp.maximum(unfused(jnp.square(whole)) - unfused(jnp.square(norm)), 0.0)
        left = safe_sqrt(jnp.maximum(unfused(jnp.square(cap)) - others, 0.0))
        fired = norm > threshold
        clipped = jnp.minimum(norm, threshold)
        least = jnp.where(first, clipped, jnp.minimum(mean, clipped))
        moved = moving_mean(mean, clipped, as_float(decay))
        decision = Decision(
            threshold=threshold, fired=fired, trigger=jnp.where(warming, left, limit), mean=mean
        )
        return decision, AdaGCState(
            num_norms=increment(state.num_norms), ema=jnp.where(warming, least, moved)
        )

    return Rule(init=init, update=update)
