"""A spike is a norm well above the level of those before it, whatever their spread."""

from typing import Any

import jax.numpy as jnp

from zclip_jax._checks import check_count, check_number
from zclip_jax._numerics import as_float, increment, moving_mean, unfused
from zclip_jax._rule import Decision, Rule
from zclip_jax._typing import FloatScalar, IntScalar, dataclass
from zclip_jax.rules._schedules import takes_schedules

# The level is remembered for a third of the run so far, one part in 1 + 3 of the second norm being new.
YOUNG = 3.0


@dataclass(frozen=True)
class LevelState:
    """The level of `level`.

    Args:
      num_norms: int32, norms absorbed since the rule last began.
      mean: float, their moving mean.
      num_off: int32, steps off the level less steps on it, at least 0.
    """

    num_norms: IntScalar
    mean: FloatScalar
    num_off: IntScalar


@takes_schedules
def level(multiple: Any = 1.65, alpha: Any = 0.95, patience: Any = 25) -> Rule:
    r"""Limits a norm to a multiple of the moving mean, the harder the further out it is.

    A variant of `zscore` for few false alarms, whose standard deviation is a fixed part of the mean: a measured
    one is too small after quiet steps, so that ordinary norms fire, and too large after a spike or a fall. With
    the norm :math:`n` after :math:`k \ge 1` others of mean :math:`\mu`:

    .. math::
        s = (\text{multiple} - 1) (1 + 1/k)\, \mu, \qquad
        \text{fired} \iff n > \mu + s, \qquad t = \mu + s \cdot s / (n - \mu)

    where :math:`t` is the norm allowed on a spike. :math:`s` is reported as the standard deviation and
    :math:`(n - \mu) / s` as the z-score, above 1 on a spike. Absorbs :math:`u = t` on a spike and :math:`u = n`
    otherwise: :math:`\mu \leftarrow a\mu + (1 - a)u` with :math:`a = \min(\alpha, k / (k + 3))`.

    There is no warm-up. The first norm is the first level, and the memory grows with the run, so that a level that
    falls from the first step on is followed, and a spike among the first norms is one.

    A step is off the level if it fires or its norm is below half of the mean. When there have been more than
    `patience` such steps, less the other steps since, the rule begins again with the last norm as the level.

    Args:
      multiple: of the level, above which a norm is a spike, above 1; 1.65 is midway between the 1.3 that ordinary
        noise reaches and 2.
      alpha: decay of the mean once the run has got long, in [0, 1).
      patience: steps off the level to take for a spike rather than for a shift, at least 1.

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

    def init():
        return LevelState(
            num_norms=jnp.zeros((), jnp.int32),
            mean=as_float(jnp.zeros(())),
            num_off=jnp.zeros((), jnp.int32),
        )

    def update(norm, state, /, **extra_args):
        del extra_args
        first, mean = state.num_norms == 0, as_float(state.mean)
        count = as_float(jnp.maximum(state.num_norms, 1))
        excess = unfused((as_float(multiple) - 1) * (1 + 1 / count) * mean)
        trigger = jnp.where(first, jnp.inf, mean + excess)
        fired = norm > trigger
        limit = mean + unfused(excess * (excess / jnp.where(fired, norm - mean, 1.0)))
        decision = Decision(
            threshold=jnp.where(fired, limit, jnp.inf),
            trigger=trigger,
            z_score=jnp.where(first, 0.0, (norm - mean) / jnp.where(first, 1.0, excess)),
            fired=fired,
            mean=mean,
            std=excess,
        )

        off = ~first & (fired | (norm < mean / 2))
        num_off = jnp.where(off, increment(state.num_off), jnp.maximum(state.num_off - 1, 0))
        afresh = first | (num_off > jnp.asarray(patience, jnp.int32))
        decay = jnp.minimum(as_float(alpha), count / (count + YOUNG))
        moved = moving_mean(mean, jnp.where(fired, limit, norm), decay)
        return decision, LevelState(
            num_norms=jnp.where(afresh, 1, increment(state.num_norms)),
            mean=jnp.where(afresh, norm, moved),
            num_off=jnp.where(afresh, 0, num_off),
        )

    return Rule(init=init, update=update)
