"""The transformations under their names: each a rule below a cap."""

import warnings
from typing import Any

import optax

from zclip_jax import rules
from zclip_jax._checks import check_cap
from zclip_jax._clip import clip_by_rule
from zclip_jax._groups import Granularity, Stacked
from zclip_jax._norm import AxisNames

SHORT_MEMORY = 0.8


def zclip(
    alpha: Any = 0.97,
    z_thresh: Any = 2.5,
    max_grad_norm: Any = 1.0,
    eps: Any = 1e-6,
    warmup_steps: Any = 25,
    clip_factor: Any = 1.0,
    *,
    strategy: str = "reciprocal",
    absorb: str = "clipped",
    patience: Any = 25,
    robust_warmup: bool = False,
    min_rel_std: Any = 0.0,
    prior_norms: Any = None,
    granularity: Granularity = "global",
    stacked: Stacked = None,
    axis_name: AxisNames = None,
    split: Any = None,
    nonfinite: str = "zero",
    observe_only: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """ZClip: scales down gradients whose norm is an outlier against its own recent history.

    The composition `clip_by_rule(rules.at_most(rules.zscore(...), max_grad_norm), ...)`. With no arguments
    it takes the decisions of the published PyTorch implementation, step for step, except where that one
    fails: NaN, infinite and zero norms leave the statistics alone, and after `patience` consecutive spikes the
    new level is learned.

    The first argument is `alpha`, as there, and not the norm as in `optax.clip_by_global_norm(0.5)`: an `alpha`
    that remembers fewer than five norms comes with a warning.

    Args:
      alpha: decay of mean and variance, in [0, 1).
      z_thresh: z-score above which a step is a spike.
      max_grad_norm: cap on the norm of every step, those of the warm-up included; None for no cap. Norms
        of a large model often live above 1: if `metrics` reports a `capped_rate` near 1, raise it.
      eps: added to the standard deviation.
      warmup_steps: norms to collect before any step may be called a spike.
      clip_factor: scales the threshold of the reciprocal strategy.
      strategy: the norm allowed on a spike, `"reciprocal"`, `"max"` or `"mean"`; see `rules.zscore`.
      absorb: what enters the statistics on a spike, `"clipped"`, `"raw"` or `"none"`.
      patience: consecutive spikes after which raw norms are absorbed; None as published, but for zero norms,
        which the published rule absorbs.
      robust_warmup: median and MAD of the warm-up norms in place of mean and standard deviation.
      min_rel_std: lower bound of the standard deviation as a multiple of the mean.
      prior_norms: see `clip_by_rule`.
      granularity: see `clip_by_rule`; the cap then holds for each group.
      stacked: see `clip_by_rule`.
      axis_name: see `clip_by_rule`.
      split: see `clip_by_rule`.
      nonfinite: see `clip_by_rule`.
      observe_only: see `clip_by_rule`.

    Returns:
      An `optax.GradientTransformationExtraArgs`, to be chained ahead of the optimizer.

    Raises:
      ValueError: an argument is outside its range.

    Warns:
      UserWarning: `alpha` is below 0.8.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from zclip_jax import metrics, zclip
      >>> tx = optax.chain(zclip(warmup_steps=4), optax.sgd(0.1))
      >>> params = jnp.ones(2)
      >>> opt_state = tx.init(params)
      >>> for norm in [0.10, 0.11, 0.09, 0.10, 0.50]:
      ...     grads = jnp.asarray([0.6, 0.8]) * norm
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      >>> logged = metrics(opt_state)
      >>> bool(logged["zclip/fired"]), round(float(logged["zclip/clip_scale"]), 4)
      (True, 0.2016)

    References:
      Kumar, Owen, Chowdhury, Güra, "ZClip: Adaptive Spike Mitigation for LLM Pre-Training",
      https://arxiv.org/abs/2504.02507, 2025.
    """
    check_cap(max_grad_norm)
    _warn_of_a_norm(alpha)
    rule = rules.zscore(
        alpha=alpha,
        z_thresh=z_thresh,
        eps=eps,
        warmup_steps=warmup_steps,
        clip_factor=clip_factor,
        strategy=strategy,
        absorb=absorb,
        patience=patience,
        robust_warmup=robust_warmup,
        min_rel_std=min_rel_std,
    )
    return clip_by_rule(
        rules.at_most(rule, max_grad_norm),
        prior_norms=prior_norms,
        granularity=granularity,
        stacked=stacked,
        axis_name=axis_name,
        split=split,
        nonfinite=nonfinite,
        observe_only=observe_only,
    )


def levelclip(
    *,
    multiple: Any = 1.65,
    alpha: Any = 0.95,
    max_grad_norm: Any = 1.0,
    patience: Any = 25,
    num_std: Any = 2.9,
    prior_norms: Any = None,
    granularity: Granularity = "global",
    stacked: Stacked = None,
    axis_name: AxisNames = None,
    split: Any = None,
    nonfinite: str = "zero",
    observe_only: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Scales down gradients whose norm is well above the level of those before it; few false alarms, no warm-up.

    The composition `clip_by_rule(rules.at_most(rules.level(...), max_grad_norm), ...)`. How it compares with
    `zclip` on recorded runs stands under "Fewer false alarms" in the documentation.

    Args:
      multiple: of the moving mean, above which a norm is a spike unless the run has a heavy tail.
      alpha: decay of the mean once the run has got long.
      max_grad_norm: cap on the norm of every step, the first included; None for no cap.
      patience: steps off the level after which the rule begins again at the new one.
      num_std: standard deviations of the run's own tail within which a norm is no spike; 0 for the multiple alone.
      prior_norms: see `clip_by_rule`.
      granularity: see `clip_by_rule`; the cap then holds for each group.
      stacked: see `clip_by_rule`.
      axis_name: see `clip_by_rule`.
      split: see `clip_by_rule`.
      nonfinite: see `clip_by_rule`.
      observe_only: see `clip_by_rule`.

    Examples:
      >>> import optax
      >>> from zclip_jax import levelclip
      >>> tx = optax.chain(levelclip(), optax.adamw(3e-4))
    """
    check_cap(max_grad_norm)
    return clip_by_rule(
        rules.at_most(rules.level(multiple, alpha, patience, num_std), max_grad_norm),
        prior_norms=prior_norms,
        granularity=granularity,
        stacked=stacked,
        axis_name=axis_name,
        split=split,
        nonfinite=nonfinite,
        observe_only=observe_only,
    )


def _warn_of_a_norm(alpha: Any) -> None:
    """Tells of what is more likely meant to be a norm than the decay of a moving mean."""
    if not isinstance(alpha, int | float):
        return
    if alpha >= 1:
        raise ValueError(
            f"alpha must be a number in [0, 1), got {alpha!r}; alpha, the first argument, is the decay of the moving "
            f"statistics: for a cap on the norm write zclip(max_grad_norm={alpha!r})"
        )
    if 0 <= alpha < SHORT_MEMORY:
        warnings.warn(
            f"zclip(alpha={alpha!r}): alpha, the first argument, is the decay of the moving statistics, and this one "
            f"remembers {1 / (1 - alpha):.1f} norms; for a cap on the norm write zclip(max_grad_norm={alpha!r})",
            stacklevel=3,
        )
