"""The z-score against a sliding window of norms in place of exponential moving statistics."""

from typing import Any

import jax.numpy as jnp

from zclip_jax._checks import check_count, check_length
from zclip_jax._rule import Rule
from zclip_jax._typing import Floats, IntEach, dataclass
from zclip_jax.rules._schedules import takes_schedules
from zclip_jax.rules._window import count_on, mean_and_std, push
from zclip_jax.rules.zscore import ZTest


@dataclass(frozen=True)
class WindowState:
    """State of `window_zscore`.

    Args:
      num_norms: int32, norms absorbed so far.
      norms: float `[window]`, the last norms, round and round.
    """

    num_norms: IntEach
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
    check_length("window", window, least=2)
    check_count("warmup_steps", warmup_steps, least=1)
    test = ZTest(z_thresh, eps, clip_factor, strategy, min_rel_std)
    test.check()

    def init():
        return WindowState(
            num_norms=jnp.zeros((), jnp.int32), norms=jnp.zeros(window, jnp.result_type(float))
        )

    def update(norm, state, /, **extra_args):
        del extra_args
        count = state.num_norms
        warming = count < jnp.asarray(warmup_steps, jnp.int32)
        decision, _ = test.judge(norm, *mean_and_std(state.norms, count), warming)
        norms = push(state.norms, count, norm)
        return decision, WindowState(num_norms=count_on(count, window), norms=norms)

    return Rule(init=init, update=update)
