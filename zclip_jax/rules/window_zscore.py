"""The z-score against a sliding window of norms in place of exponential moving statistics."""

from typing import Any

import jax.numpy as jnp

from zclip_jax._rule import Decision, Rule, as_float, check_choice, check_count, check_number
from zclip_jax._typing import Floats, IntScalar, dataclass
from zclip_jax.rules._schedules import takes_schedules
from zclip_jax.rules._window import check_window, mean_and_std, push
from zclip_jax.rules.zscore import STRATEGIES, judge


@dataclass(frozen=True)
class WindowState:
    """State of `window_zscore`.

    Args:
      num_norms: int32, norms absorbed so far.
      norms: float `[window]`, the last norms, round and round.
    """

    num_norms: IntScalar
    norms: Floats


@takes_schedules
def window_zscore(
    window: Any = 100,
    z_thresh: Any = 2.5,
    eps: Any = 1e-6,
    warmup_steps: Any = 25,
    clip_factor: Any = 1.0,
    *,
    strategy: str = "reciprocal",
    min_rel_std: Any = 0.0,
) -> Rule:
    r"""`zscore` against mean and population standard deviation of the last `window` norms.

    Absorbs the raw norm, so a shift of level is learned within the window, and a spike raises the threshold
    until it leaves the window. Never fires before `warmup_steps` norms.

    Args:
      window: norms to keep, a Python int, at least 2.
      z_thresh: z-score above which a step is a spike, positive.
      eps: added to the standard deviation, positive.
      warmup_steps: norms to collect before the rule may fire, at least 1.
      clip_factor: scales the threshold of the reciprocal strategy, positive.
      strategy: `"reciprocal"`, `"max"` or `"mean"`; see `zscore`.
      min_rel_std: the standard deviation never counts as less than this multiple of the mean.

    Returns:
      A `Rule` whose state is a `WindowState`.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.window_zscore(window=4, warmup_steps=4)
      >>> state = rule.init()
      >>> for norm in [9.0, 1.0, 1.1, 0.9, 1.0, 3.0]:
      ...     outcome, state = decide(rule, norm, state)
      >>> bool(outcome.fired), round(float(outcome.mean), 3)
      (True, 1.0)
    """
    check_window("window", window, least=2)
    check_number("z_thresh", z_thresh, "a number > 0", lambda x: x > 0)
    check_number("eps", eps, "a number > 0", lambda x: x > 0)
    check_count("warmup_steps", warmup_steps, least=1)
    check_number("clip_factor", clip_factor, "a number > 0", lambda x: x > 0)
    check_number("min_rel_std", min_rel_std, "a number >= 0", lambda x: x >= 0)
    check_choice("strategy", strategy, STRATEGIES)

    def init():
        return WindowState(
            num_norms=jnp.zeros((), jnp.int32), norms=jnp.zeros(window, jnp.result_type(float))
        )

    def update(norm, state, **extra_args):
        del extra_args
        warming = state.num_norms < jnp.asarray(warmup_steps, jnp.int32)
        mean, std = mean_and_std(state.norms, state.num_norms)
        std = jnp.maximum(std, as_float(min_rel_std) * mean)
        z, spike, limit = judge(norm, mean, std, as_float(z_thresh), as_float(eps), strategy)
        if strategy == "reciprocal":
            limit = as_float(clip_factor) * limit
        fired = ~warming & spike
        decision = Decision(
            threshold=jnp.where(fired, limit, jnp.inf),
            z_score=jnp.where(warming, 0.0, z),
            fired=fired,
            mean=mean,
            std=std,
        )
        norms = push(state.norms, state.num_norms, norm)
        return decision, WindowState(num_norms=state.num_norms + 1, norms=norms)

    return Rule(init=init, update=update)
