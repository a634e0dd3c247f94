"""A spike is a norm well above the level of those before it, and beyond the run's own tail."""

import math
from typing import Any

import jax.numpy as jnp

from zclip_jax._checks import check_count, check_number
from zclip_jax._numerics import as_float, increment, moving_mean, unfused
from zclip_jax._rule import Decision, Rule
from zclip_jax._typing import FloatEach, IntEach, dataclass
from zclip_jax.rules._schedules import takes_schedules

# The level is remembered for a third of the run so far, one part in 1 + 3 of the second norm being new; the tail for
# all of it, as if 3 norms without a deviation had gone before, and for 100 norms at most.
YOUNG = 3.0
TAIL_DECAY = 0.99
# Of a normal variable: its standard deviation as a multiple of its mean upward deviation.
STD_PER_RISE = math.sqrt(2 * math.pi)
# Times the level a norm may be to be absorbed whole, or has to be below it to count as off it.
FAR = 2.0
# The logarithm of the trigger over the level, at most, so that it can't overflow.
FURTHEST = 30.0


@dataclass(frozen=True)
class LevelState:
    """The level of `level`, and the tail of the norms above it.

    Args:
      num_norms: int32, norms absorbed since the rule last began.
      mean: float, the level: a moving mean of the norms.
      rise: float, the tail: the mean upward deviation of their logarithms from that of the level.
      num_off: int32, steps above the level less steps below it, brought nearer to 0 by each step on it.
    """

    num_norms: IntEach
    mean: FloatEach
    rise: FloatEach
    num_off: IntEach


@takes_schedules
def level(multiple: Any = 1.65, alpha: Any = 0.95, patience: Any = 25, num_std: Any = 2.9) -> Rule:
    r"""Limits a norm to a multiple of the moving mean, the harder the further out it is.

    A variant of `zscore` for few false alarms, whose standard deviation is a fixed part of the mean: a measured
    one is too small after quiet steps, so that ordinary norms fire, and too large after a spike or a fall. Only where
    the run has a heavy tail, so that the multiple is no outlier there, the tail sets a larger one. With the norm
    :math:`n` after :math:`k \ge 1` others of mean :math:`\mu` and mean upward deviation of the logarithm :math:`r`:

    .. math::
        w = \max(\text{multiple}, \; e^{\text{num\_std} \sqrt{2 \pi} r}), \qquad
        s = (w - 1) (1 + 1/k)\, \mu, \qquad
        \text{fired} \iff n > \mu + s, \qquad t = \mu + s \cdot s / (n - \mu)

    where :math:`t` is the norm allowed on a spike. :math:`s` is reported as the standard deviation and
    :math:`(n - \mu) / s` as the z-score, above 1 on a spike. :math:`\sqrt{2 \pi} r` is the standard deviation of the
    logarithm if it is normal.

    Absorbs :math:`u = t` on a spike and :math:`u = n` otherwise, but at most :math:`2\mu`, so that a heavy tail
    doesn't lift the mean far above the median: :math:`\mu \leftarrow a\mu + (1 - a)u` with
    :math:`a = \min(\alpha, k / (k + 3))`. The tail absorbs :math:`\log(n / \mu)`, at least 0 and at most
    :math:`\log w`, with weight :math:`\max(0.01, 1 / (k + 4))`.

    There is no warm-up. The first norm is the first level, and the memory grows with the run, so that a level that
    falls from the first step on is followed, and a spike among the first norms is one. A falling level leaves no
    upward deviation.

    A step counts as above the level if it fires, and as below it if its norm is below half of the mean. When there
    have been `patience` more of one kind than of the other, less the steps since that were neither, and then one
    more, the rule begins again with the last norm as the level. While :math:`o > 0` more steps were above than below,
    the tail absorbs with a weight :math:`1 + o` times smaller: a shift is no tail.

    Args:
      multiple: of the level, above which a norm may be a spike, above 1; 1.65 is midway between the 1.3 that ordinary
        noise reaches and 2.
      alpha: decay of the mean once the run has got long, in [0, 1).
      patience: steps off the level to take for spikes rather than for a shift, at least 1.
      num_std: standard deviations of the logarithm, as the tail shows them, within which a norm is no spike, at least
        0; 0 for the multiple alone.

    Returns:
      A `Rule` whose state is a `LevelState`. Multiplying all norms by a constant changes no decision.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.level()
      >>> state = rule.init()
      >>> for norm in [4.0, 2.0, 1.0, 1.0, 5.0]:
      ...     outcome, state = decide(rule, norm, state)
      >>> bool(outcome.fired), round(float(outcome.mean), 2), round(float(outcome.threshold), 2)
      (True, 1.3, 1.6)

    References:
      The comparison under "Fewer false alarms" in the documentation.
    """
    check_number("multiple", multiple, "a number > 1", lambda x: x > 1)
    check_number("alpha", alpha, "a number in [0, 1)", lambda x: 0 <= x < 1)
    check_count("patience", patience, least=1)
    check_number("num_std", num_std, "a finite number >= 0", lambda x: 0 <= x < math.inf)

    def init():
        return LevelState(
            num_norms=jnp.zeros((), jnp.int32),
            mean=as_float(jnp.zeros(())),
            rise=as_float(jnp.zeros(())),
            num_off=jnp.zeros((), jnp.int32),
        )

    def update(norm, state, /, **extra_args):
        del extra_args
        norm, mean, rise = as_float(norm), as_float(state.mean), as_float(state.rise)
        first = state.num_norms == 0
        count = as_float(jnp.maximum(state.num_norms, 1))
        tail = jnp.minimum(as_float(num_std) * STD_PER_RISE * rise, FURTHEST)
        least = as_float(multiple)
        width, width_log = jnp.maximum(least, jnp.exp(tail)), jnp.maximum(jnp.log(least), tail)
        excess = jnp.maximum(unfused((width - 1) * (1 + 1 / count) * mean), jnp.finfo(mean.dtype).tiny)

        trigger = jnp.where(first, jnp.inf, mean + excess)
        fired = norm > trigger
        beyond = jnp.where(fired, excess, 1.0) / jnp.where(fired, norm - mean, 1.0)
        limit = mean + unfused(excess * beyond)
        decision = Decision(
            threshold=jnp.where(fired, limit, jnp.inf),
            trigger=trigger,
            z_score=jnp.where(first, 0.0, (norm - mean) / jnp.where(first, 1.0, excess)),
            fired=fired,
            mean=mean,
            std=jnp.where(first, 0.0, excess),
        )

        low = ~first & (norm < mean / FAR)
        nearer = state.num_off - jnp.sign(state.num_off)
        further = jnp.where(fired, increment(state.num_off), -increment(-state.num_off))
        num_off = jnp.where(fired | low, further, nearer)
        afresh = first | (jnp.abs(num_off) > jnp.asarray(patience, jnp.int32))
        decay = jnp.minimum(as_float(alpha), count / (count + YOUNG))
        absorbed = jnp.minimum(jnp.where(fired, limit, norm), FAR * mean)
        deviation = jnp.clip(safe_log(norm) - safe_log(mean), 0.0, width_log)
        num_above = as_float(jnp.maximum(state.num_off, 0))
        weight = jnp.maximum(1 - TAIL_DECAY, 1 / (count + 1 + YOUNG)) / (1 + num_above)
        return decision, LevelState(
            num_norms=jnp.where(afresh, 1, increment(state.num_norms)),
            mean=jnp.where(afresh, norm, moving_mean(mean, absorbed, decay)),
            rise=jnp.where(first, rise, moving_mean(rise, deviation, 1 - weight)),
            num_off=jnp.where(afresh, 0, num_off),
        )

    return Rule(init=init, update=update)


def safe_log(norm: FloatEach) -> FloatEach:
    """The logarithm, of a norm too small for its type as of the smallest one."""
    return jnp.log(jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
