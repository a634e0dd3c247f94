"""A percentile of past norms, as AutoClip has it."""

from typing import Any

import jax.numpy as jnp

from zclip_jax._checks import check_length, check_number
from zclip_jax._numerics import as_float, unfused
from zclip_jax._rule import Decision, Rule
from zclip_jax._typing import Floats, IntEach, dataclass
from zclip_jax.rules._schedules import takes_schedules
from zclip_jax.rules._window import count_on, push


@dataclass(frozen=True)
class PercentileState:
    """State of `percentile`.

    Args:
      num_norms: int32, norms absorbed so far.
      norms: float `[window]`, the last norms in the order they came, round and round.
      sorted_norms: float `[window]`, the same in ascending order; `inf` where there is none yet.
    """

    num_norms: IntEach
    norms: Floats
    sorted_norms: Floats


@takes_schedules
def percentile(p: Any = 10.0, window: Any = 1000) -> Rule:
    r"""Allows the p-th percentile of the last `window` norms, this step's included.

    Equal to `numpy.percentile` of the window, and to AutoClip as long as the history fits the window. The
    norms are kept in order beside the ring buffer, so a step costs two passes over the window and no sort.

    Absorbs the raw norm. There is no warm-up: the first norm is its own percentile. With a low `p` most steps
    are scaled down, which is AutoClip's intention.

    Args:
      p: percentile, in [0, 100].
      window: norms to keep, a Python int, at least 1.

    Returns:
      A `Rule` whose state is a `PercentileState`.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.percentile(50.0, window=3)
      >>> state = rule.init()
      >>> for norm in [1.0, 2.0, 3.0, 4.0]:
      ...     outcome, state = decide(rule, norm, state)
      >>> float(outcome.threshold)
      3.0

    References:
      Seetharaman, Wichern, Pardo, Le Roux, "AutoClip: Adaptive Gradient Clipping for Source Separation
      Networks", https://arxiv.org/abs/2007.14469, 2020.
    """
    check_number("p", p, "a number in [0, 100]", lambda x: 0 <= x <= 100)
    check_length("window", window, least=1)

    def init():
        dtype = jnp.result_type(float)
        return PercentileState(
            num_norms=jnp.zeros((), jnp.int32),
            norms=jnp.zeros(window, dtype),
            sorted_norms=jnp.full(window, jnp.inf, dtype),
        )

    def update(norm, state, /, **extra_args):
        del extra_args
        count, ordered = state.num_norms, as_float(state.sorted_norms)
        index = jnp.arange(window, dtype=jnp.int32)

        # Once the window is full its oldest entry leaves: everything behind it moves up.
        oldest = jnp.sum(ordered < as_float(state.norms)[count % window], dtype=jnp.int32)
        moved_up = jnp.append(ordered[1:], jnp.inf)
        ordered = jnp.where((count >= window) & (index >= oldest), moved_up, ordered)

        last = jnp.minimum(count, window - 1)
        rank = as_float(p) / 100 * last.astype(norm.dtype)
        below = jnp.minimum(jnp.floor(rank).astype(jnp.int32), last)
        above = jnp.minimum(below + 1, last)
        # A norm is above the percentile that it is part of if it is above the one there without it: there is none
        # for the first, nor for the largest.
        trigger = jnp.where(below < last, ordered[below], jnp.inf)

        # The new one enters in its place: everything behind it moves down.
        place = jnp.sum(ordered < norm, dtype=jnp.int32)
        moved_down = jnp.append(norm, ordered[:-1])
        ordered = jnp.where(index > place, moved_down, jnp.where(index == place, norm, ordered))

        low, high = ordered[below], ordered[above]
        threshold = low + unfused((high - low) * (rank - below.astype(norm.dtype)))

        decision = Decision(threshold=threshold, fired=norm > threshold, trigger=trigger)
        return decision, PercentileState(
            num_norms=count_on(count, window), norms=push(state.norms, count, norm), sorted_norms=ordered
        )

    return Rule(init=init, update=update)
