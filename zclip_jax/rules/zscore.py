"""The rule of ZClip: a spike is a norm whose z-score against its moving mean and variance is large."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zclip_jax._rule import (
    Decision,
    Rule,
    as_float,
    check_choice,
    check_count,
    check_number,
    moving_mean,
    safe_sqrt,
    unfused,
)
from zclip_jax._typing import Floats, FloatScalar, IntScalar, dataclass
from zclip_jax.rules._schedules import takes_schedules

STRATEGIES = ("reciprocal", "max", "mean")
ABSORB = ("clipped", "none", "raw")

# The standard deviation of a Gaussian is this many median absolute deviations.
MAD_TO_STD = 1.4826


SPACES = ("linear", "log")


@dataclass(frozen=True)
class ZScoreState:
    """The statistics of `zscore`.

    Args:
      num_norms: int32, norms absorbed so far; the warm-up ends at `warmup_steps`.
      mean: float, moving mean of the absorbed norms.
      var: float, their moving variance.
      spike_run: int32, consecutive spikes up to and including the last norm.
      warmup_norms: float `[warmup_steps]`, the norms of the warm-up; None unless `robust_warmup`.
    """

    num_norms: IntScalar
    mean: FloatScalar
    var: FloatScalar
    spike_run: IntScalar
    warmup_norms: Floats | None = None


@dataclass(frozen=True)
class LogZScoreState(ZScoreState):
    """The statistics of `zscore(space="log")`, of logarithms: another type, so that none is taken for the other."""


def judge(
    x: jax.Array, mean: jax.Array, std: jax.Array, z_max: jax.Array, eps: jax.Array, strategy: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The z-score of `x`, whether it is a spike, and what would be allowed then; scalars all."""
    z = (x - mean) / (std + eps)
    limit = mean + unfused(z_max * std)
    if strategy == "max":
        return z, x > limit, limit
    if strategy == "mean":
        return z, z > z_max, mean
    # On a spike z > z_max, so the maximum is z itself; elsewhere it keeps 0/0 out.
    return z, z > z_max, mean + z_max * std * z_max / jnp.maximum(z, z_max)


@takes_schedules
def zscore(
    alpha: Any = 0.97,
    z_thresh: Any = 2.5,
    eps: Any = 1e-6,
    warmup_steps: Any = 25,
    clip_factor: Any = 1.0,
    *,
    strategy: str = "reciprocal",
    absorb: str = "clipped",
    patience: Any = 25,
    robust_warmup: bool = False,
    min_rel_std: Any = 0.0,
    space: str = "linear",
) -> Rule:
    r"""Limits a norm whose z-score exceeds `z_thresh`, the harder the further out it is.

    With the norm :math:`n`, the mean :math:`\mu` and standard deviation :math:`\sigma` before this step:

    .. math::
        z = \frac{n - \mu}{\sigma + \text{eps}}, \qquad \text{fired} \iff z > z_\text{thresh}

    and on a spike the norm allowed is

    .. math::
        t = \begin{cases}
          \text{clip\_factor} \cdot (\mu + z_\text{thresh}\, \sigma \cdot z_\text{thresh} / z)
            & \text{reciprocal} \\
          \mu + z_\text{thresh}\, \sigma & \text{max, which fires where } n > t \\
          \mu & \text{mean}
        \end{cases}

    Absorbs :math:`u = t` on a spike and :math:`u = n` otherwise, never a cap set from outside:
    :math:`\mu \leftarrow \alpha\mu + (1-\alpha)u`, then
    :math:`\sigma^2 \leftarrow \alpha\sigma^2 + (1-\alpha)(u - \mu)^2`. During the first `warmup_steps`
    norms it never fires, and keeps their exact mean and population variance.

    Args:
      alpha: decay of mean and variance, in [0, 1).
      z_thresh: z-score above which a step is a spike, positive.
      eps: added to the standard deviation, positive, in the norm's unit.
      warmup_steps: norms to collect before the rule may fire, at least 1.
      clip_factor: scales the threshold of the reciprocal strategy, positive.
      strategy: `"reciprocal"`, `"max"` or `"mean"`, see above.
      absorb: what enters the statistics on a spike: `"clipped"` (the norm allowed), `"raw"` (the norm
        itself) or `"none"` (nothing).
      patience: from the spike after this many consecutive ones on, absorb the raw norm until a step is no
        spike. A sustained shift of level is thus learned; the published rule (None) can call every later
        step a spike, for ever.
      robust_warmup: end the warm-up with the median and 1.4826 times the median absolute deviation in
        place of mean and standard deviation, so that an outlier among the first norms does no harm. Keeps
        those norms in the state; `warmup_steps` must then be a Python int.
      min_rel_std: the standard deviation never counts as less than this multiple of the mean; 0 is off. In
        log space a standard deviation is relative as it is, and this is its least value.
      space: `"log"` keeps mean and variance of the logarithms of the norms and judges by those, for norms with
        a heavy tail. The statistics reported are then those of the logarithms.

    Returns:
      A `Rule` whose state is a `ZScoreState`, or a `LogZScoreState`.

    Raises:
      ValueError: an argument is outside the range given above.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.zscore(warmup_steps=4)
      >>> state = rule.init()
      >>> for norm in [1.0, 1.1, 0.9, 1.0, 3.0]:
      ...     outcome, state = decide(rule, norm, state)
      >>> round(float(outcome.z_score), 2), bool(outcome.fired), round(float(outcome.threshold), 3)
      (28.28, True, 1.016)

    References:
      Kumar, Owen, Chowdhury, Güra, "ZClip: Adaptive Spike Mitigation for LLM Pre-Training",
      https://arxiv.org/abs/2504.02507, 2025.
    """
    check_number("alpha", alpha, "a number in [0, 1)", lambda x: 0 <= x < 1)
    check_number("z_thresh", z_thresh, "a number > 0", lambda x: x > 0)
    check_number("eps", eps, "a number > 0", lambda x: x > 0)
    check_count("warmup_steps", warmup_steps, least=1)
    check_number("clip_factor", clip_factor, "a number > 0", lambda x: x > 0)
    check_number("min_rel_std", min_rel_std, "a number >= 0", lambda x: x >= 0)
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("absorb", absorb, ABSORB)
    check_choice("space", space, SPACES)
    log = space == "log"
    if patience is not None:
        check_count("patience", patience, least=1, accepted=" or None")
    if robust_warmup and isinstance(warmup_steps, jax.core.Tracer):
        raise ValueError(
            "robust_warmup needs a warmup_steps that is a Python int, got a traced value; with "
            "optax.inject_hyperparams name it in static_args"
        )

    def init():
        buffer = jnp.zeros(int(warmup_steps), jnp.result_type(float)) if robust_warmup else None
        return (LogZScoreState if log else ZScoreState)(
            num_norms=jnp.zeros((), jnp.int32),
            mean=as_float(jnp.zeros(())),
            var=as_float(jnp.zeros(())),
            spike_run=jnp.zeros((), jnp.int32),
            warmup_norms=buffer,
        )

    def update(norm, state, **extra_args):
        del extra_args
        warming = state.num_norms < jnp.asarray(warmup_steps, jnp.int32)
        mean, z_max = as_float(state.mean), as_float(z_thresh)
        least_std = as_float(min_rel_std) if log else as_float(min_rel_std) * mean
        std = jnp.maximum(safe_sqrt(as_float(state.var)), least_std)
        # From here on `x` and `limit` are in the space of the statistics.
        x = jnp.log(jnp.where(norm > 0, norm, 1.0)) if log else norm
        z, spike, limit = judge(x, mean, std, z_max, as_float(eps), strategy)
        if strategy == "reciprocal":
            factor = as_float(clip_factor)
            limit = limit + jnp.log(factor) if log else factor * limit
        fired = ~warming & spike
        spike_run = jnp.where(fired, state.spike_run + 1, 0)

        decision = Decision(
            threshold=jnp.where(fired, jnp.exp(limit) if log else limit, jnp.inf),
            z_score=jnp.where(warming, 0.0, z),
            fired=fired,
            mean=mean,
            std=std,
        )
        as_is = ~fired if patience is None else ~fired | (spike_run > jnp.asarray(patience, jnp.int32))
        collected = collect(x, state)
        absorbed = absorb_into_ema(x, limit, as_is, state)
        state = jax.tree.map(lambda a, b: jnp.where(warming, a, b), collected, absorbed)
        return decision, dataclasses.replace(state, spike_run=spike_run)

    def collect(x, state):
        """Warm-up: Welford's running mean and population variance."""
        num_norms = state.num_norms + 1
        mean, var = as_float(state.mean), as_float(state.var)
        new_mean = mean + (x - mean) / num_norms.astype(x.dtype)
        new_var = var + (unfused((x - mean) * (x - new_mean)) - var) / num_norms.astype(x.dtype)
        buffer = state.warmup_norms
        if buffer is not None:
            buffer = buffer.at[state.num_norms].set(x, mode="drop")
            median = jnp.median(buffer)
            mad = jnp.median(jnp.abs(buffer - median))
            full = num_norms == warmup_steps
            new_mean = jnp.where(full, median, new_mean)
            new_var = jnp.where(full, jnp.square(unfused(MAD_TO_STD * mad)), new_var)
        return dataclasses.replace(
            state, num_norms=num_norms, mean=new_mean, var=new_var, warmup_norms=buffer
        )

    def absorb_into_ema(x, limit, as_is, state):
        """Afterwards: exponential moving mean, then the variance around the new mean."""
        decay = as_float(alpha)
        taken = x if absorb == "raw" else jnp.where(as_is, x, limit)
        mean = moving_mean(as_float(state.mean), taken, decay)
        var = moving_mean(as_float(state.var), unfused(jnp.square(taken - mean)), decay)
        new_state = dataclasses.replace(state, num_norms=state.num_norms + 1, mean=mean, var=var)
        if absorb == "none":
            return jax.tree.map(lambda new, old: jnp.where(as_is, new, old), new_state, state)
        return new_state

    return Rule(init=init, update=update)
