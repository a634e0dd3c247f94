"""The level of each of many norms over the steps, and how far the next ones lie above it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from zclip_jax._numerics import as_float, increment, moving_mean, safe_sqrt, unfused
from zclip_jax._typing import FloatEach, IntEach, dataclass

# The mean is remembered for a third of the run so far, and for 20 norms at most; the variance as if 4 norms of the
# deviation START had gone before, and for 50 norms at most.
YOUNG, MEAN_WEIGHT = 3.0, 0.05
PRIOR, VAR_WEIGHT = 4.0, 0.02
START = 0.5
# Ordinary noise of a quiet run moves a norm by a few per cent. A deviation below this one is no sign of anything.
LEAST = 0.2
# Standard deviations, beyond which a norm is absorbed as if it were there.
FAR = 2.5
# The logarithm of a norm over its level, at most, so that it can't overflow.
FURTHEST = 85.0


@dataclass(frozen=True)
class History:
    """Moving means and variances of the logarithms of norms.

    Args:
      num_seen: int32 `[norms]`, norms absorbed so far.
      log_mean: float `[norms]`, the moving mean of their logarithms.
      log_var: float `[norms]`, the moving mean of the squared deviations from it.
    """

    num_seen: IntEach
    log_mean: FloatEach
    log_var: FloatEach


class Comparison(NamedTuple):
    """Norms beside what a history held before them, each `[norms]`; zeros where one of the two says nothing.

    Args:
      known: there is a history, and a norm to compare with it.
      level: the geometric mean of the norms before; known also where this norm says nothing.
      times_level: the norm over its level.
      z_score: the logarithm of that, in standard deviations of the logarithms before.
    """

    known: jax.Array
    level: jax.Array
    times_level: jax.Array
    z_score: jax.Array


def init_history(num_norms: int) -> History:
    """The history before the first step."""
    return History(
        num_seen=jnp.zeros(num_norms, jnp.int32),
        log_mean=as_float(jnp.zeros(num_norms)),
        log_var=as_float(jnp.full(num_norms, START**2)),
    )


def compare(history: History, norms: jax.Array) -> tuple[Comparison, History]:
    """Holds `norms` against the history, then absorbs them.

    A norm that is zero, NaN or infinite says nothing and is not absorbed. One far off is absorbed as if it lay 2.5
    standard deviations off: a spike hardly moves the level, and a shift is followed, the faster the longer it lasts.
    """
    usable = jnp.isfinite(norms) & (norms > 0)
    seen = history.num_seen > 0
    mean, var = as_float(history.log_mean), as_float(history.log_var)
    std = jnp.maximum(safe_sqrt(var), LEAST)
    logs = jnp.log(jnp.where(usable, norms, 1.0))
    deviation = jnp.where(usable & seen, logs - mean, 0.0)
    count = as_float(history.num_seen)
    near = jnp.clip(deviation, -FAR * std, FAR * std)
    mean_weight = jnp.maximum(MEAN_WEIGHT, YOUNG / (count + YOUNG))
    var_weight = jnp.maximum(VAR_WEIGHT, 1 / (count + PRIOR))
    moved = mean + unfused(mean_weight * near)
    spread = moving_mean(var, unfused(near * near), 1 - var_weight)
    absorbed = History(
        num_seen=increment(history.num_seen, usable),
        log_mean=jnp.where(usable, jnp.where(seen, moved, logs), mean),
        log_var=jnp.where(usable & seen, spread, var),
    )
    comparison = Comparison(
        known=usable & seen,
        level=jnp.where(seen, jnp.exp(mean), 0.0),
        times_level=jnp.where(usable & seen, jnp.exp(jnp.minimum(deviation, FURTHEST)), 0.0),
        z_score=deviation / std,
    )
    return comparison, absorbed
