"""The rule of ZClip: a spike is a norm whose z-score against its moving mean and variance is large."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zclip_jax._checks import check_choice, check_count, check_flag, check_length, check_number
from zclip_jax._numerics import as_float, increment, moving_mean, safe_sqrt, unfused
from zclip_jax._rule import Decision, Rule
from zclip_jax._typing import FloatEach, Floats, IntEach, dataclass
from zclip_jax.rules._schedules import takes_schedules

STRATEGIES = ("reciprocal", "max", "mean")
ABSORB = ("clipped", "none", "raw")

# The standard deviation of a Gaussian is this many median absolute deviations.
MAD_TO_STD = 1.4826


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

    num_norms: IntEach
    mean: FloatEach
    var: FloatEach
    spike_run: IntEach
    warmup_norms: Floats | None = None


class ZTest(NamedTuple):
    """How `zscore` and `window_zscore` judge a norm; see `zscore` for the settings."""

    z_thresh: Any
    eps: Any
    clip_factor: Any
    strategy: str
    min_rel_std: Any

    def check(self) -> None:
        """Raises ValueError for a setting that is not accepted."""
        check_number("z_thresh", self.z_thresh, "a number > 0", lambda x: x > 0)
        check_number("eps", self.eps, "a number > 0", lambda x: x > 0)
        check_number("clip_factor", self.clip_factor, "a number > 0", lambda x: x > 0)
        check_number("min_rel_std", self.min_rel_std, "a number >= 0", lambda x: x >= 0)
        check_choice("strategy", self.strategy, STRATEGIES)

    def judge(
        self, norm: jax.Array, mean: jax.Array, std: jax.Array, warming: jax.Array
    ) -> tuple[Decision, jax.Array]:
        """The decision on a norm, and the norm that would be allowed if it is a spike."""
        z_max, eps = as_float(self.z_thresh), as_float(self.eps)
        std = jnp.maximum(std, as_float(self.min_rel_std) * mean)
        z = (norm - mean) / (std + eps)
        above = mean + unfused(z_max * std)
        if self.strategy == "max":
            spike, limit, trigger = norm > above, above, above
        else:
            spike, trigger = z > z_max, mean + unfused(z_max * (std + eps))
            # On a spike z > z_max, so the maximum is z itself; elsewhere it keeps 0/0 out.
            reciprocal = mean + z_max * std * z_max / jnp.maximum(z, z_max)
            limit = mean if self.strategy == "mean" else as_float(self.clip_factor) * reciprocal
        fired = ~warming & spike
        decision = Decision(
            threshold=jnp.where(fired, limit, jnp.inf),
            fired=fired,
            trigger=jnp.where(warming, jnp.inf, trigger),
            z_score=jnp.where(warming, 0.0, z),
            mean=mean,
            std=std,
        )
        return decision, limit


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
        spike. A sustained shift of level is thus learned. None never does; that is the published rule, which can
        call every later step a spike, except that the published one absorbs norms of zero, too.
      robust_warmup: end the warm-up with the median and 1.4826 times the median absolute deviation in
        place of mean and standard deviation, so that an outlier among the first norms does no harm. Keeps
        those norms in the state; `warmup_steps` must then be a Python int.
      min_rel_std: the standard deviation never counts as less than this multiple of the mean; 0 is off.

    Returns:
      A `Rule` whose state is a `ZScoreState`. For norms with a heavy tail put it into `in_log_space`.

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
    test = ZTest(z_thresh, eps, clip_factor, strategy, min_rel_std)
    test.check()
    check_number("alpha", alpha, "a number in [0, 1)", lambda x: 0 <= x < 1)
    check_count("warmup_steps", warmup_steps, least=1)
    check_choice("absorb", absorb, ABSORB)
    check_flag("robust_warmup", robust_warmup)
    if patience is not None:
        check_count("patience", patience, least=1, accepted=" or None")
    if robust_warmup:
        if isinstance(warmup_steps, jax.core.Tracer):
            raise ValueError(
                "robust_warmup needs a warmup_steps that is a Python int, got a traced value; with "
                "optax.inject_hyperparams name it in static_args"
            )
        check_length("warmup_steps", int(warmup_steps), least=1)

    def init():
        return ZScoreState(
            num_norms=jnp.zeros((), jnp.int32),
            mean=as_float(jnp.zeros(())),
            var=as_float(jnp.zeros(())),
            spike_run=jnp.zeros((), jnp.int32),
            warmup_norms=jnp.zeros(int(warmup_steps), jnp.result_type(float)) if robust_warmup else None,
        )

    def update(norm, state, /, **extra_args):
        del extra_args
        warming = state.num_norms < jnp.asarray(warmup_steps, jnp.int32)
        decision, limit = test.judge(norm, as_float(state.mean), safe_sqrt(as_float(state.var)), warming)
        spike_run = jnp.where(decision.fired, increment(state.spike_run), 0)
        as_is = ~decision.fired
        if patience is not None:
            as_is |= spike_run > jnp.asarray(patience, jnp.int32)
        taken = norm if absorb == "raw" else jnp.where(as_is, norm, limit)
        kept = ~as_is & (absorb == "none")
        state = jax.tree.map(
            lambda early, late, old: jnp.where(warming, early, jnp.where(kept, old, late)),
            _collect(norm, state),
            _absorb(taken, state, as_float(alpha)),
            state,
        )
        return decision, dataclasses.replace(state, spike_run=spike_run)

    return Rule(init=init, update=update)


def _collect(norm: jax.Array, state: ZScoreState) -> ZScoreState:
    """Warm-up: Welford's running mean and population variance."""
    num_norms = increment(state.num_norms)
    mean, var = as_float(state.mean), as_float(state.var)
    new_mean = mean + (norm - mean) / num_norms.astype(norm.dtype)
    new_var = var + (unfused((norm - mean) * (norm - new_mean)) - var) / num_norms.astype(norm.dtype)
    buffer = state.warmup_norms
    if buffer is not None:
        buffer = buffer.at[state.num_norms].set(norm.astype(buffer.dtype), mode="drop")
        median = as_float(jnp.median(buffer))
        mad = jnp.median(jnp.abs(as_float(buffer) - median))
        full = num_norms == buffer.size
        new_mean = jnp.where(full, median, new_mean)
        new_var = jnp.where(full, jnp.square(unfused(MAD_TO_STD * mad)), new_var)
    return dataclasses.replace(state, num_norms=num_norms, mean=new_mean, var=new_var, warmup_norms=buffer)


def _absorb(norm: jax.Array, state: ZScoreState, decay: jax.Array) -> ZScoreState:
    """Afterwards: exponential moving mean, then the variance around the new mean."""
    mean = moving_mean(as_float(state.mean), norm, decay)
    var = moving_mean(as_float(state.var), unfused(jnp.square(norm - mean)), decay)
    return dataclasses.replace(state, num_norms=increment(state.num_norms), mean=mean, var=var)
