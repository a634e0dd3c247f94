"""The transformations under their names: each one line of composition."""

from typing import Any

import optax

from zclip_jax import rules
from zclip_jax._clip import clip_by_rule
from zclip_jax._groups import Granularity, Stacked
from zclip_jax._norm import AxisNames
from zclip_jax._rule import check_cap


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
    space: str = "linear",
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
    fails: NaN and infinite norms leave the statistics alone, and after `patience` consecutive spikes the
    new level is learned.

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
      patience: consecutive spikes after which raw norms are absorbed; None as published.
      robust_warmup: median and MAD of the warm-up norms in place of mean and standard deviation.
      min_rel_std: lower bound of the standard deviation as a multiple of the mean.
      space: `"log"` judges by the logarithms of the norms, for a heavy tail; see `rules.zscore`.
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
        space=space,
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
    multiple: Any = 1.65,
    alpha: Any = 0.95,
    max_grad_norm: Any = 1.0,
    patience: Any = 25,
    num_std: Any = 2.9,
    *,
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


def autoclip(
    p: Any = 10.0,
    window: Any = 1000,
    *,
    prior_norms: Any = None,
    axis_name: AxisNames = None,
    split: Any = None,
    nonfinite: str = "zero",
    observe_only: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AutoClip: caps each step at a percentile of the last norms.

    Args:
      p: see `rules.percentile`.
      window: see `rules.percentile`.
      prior_norms: see `clip_by_rule`.
      axis_name: see `clip_by_rule`.
      split: see `clip_by_rule`.
      nonfinite: see `clip_by_rule`.
      observe_only: see `clip_by_rule`.

    Examples:
      >>> import optax
      >>> from zclip_jax import autoclip
      >>> tx = optax.chain(autoclip(p=50.0), optax.adamw(3e-4))
    """
    return clip_by_rule(
        rules.percentile(p, window),
        prior_norms=prior_norms,
        axis_name=axis_name,
        split=split,
        nonfinite=nonfinite,
        observe_only=observe_only,
    )


def adagc(
    lam: Any = 1.05,
    decay: Any = 0.98,
    warmup_steps: Any = 100,
    warmup_max_norm: Any = 1.0,
    *,
    granularity: Granularity = "leaf",
    stacked: Stacked = None,
    axis_name: AxisNames = None,
    split: Any = None,
    nonfinite: str = "zero",
    observe_only: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AdaGC: caps each tensor slightly above the moving mean of its own clipped norms.

    Args:
      lam: see `rules.adagc`.
      decay: see `rules.adagc`.
      warmup_steps: see `rules.adagc`.
      warmup_max_norm: see `rules.adagc`.
      granularity: see `clip_by_rule`.
      stacked: see `clip_by_rule`.
      axis_name: see `clip_by_rule`.
      split: see `clip_by_rule`.
      nonfinite: see `clip_by_rule`.
      observe_only: see `clip_by_rule`.

    Examples:
      >>> import optax
      >>> from zclip_jax import adagc
      >>> tx = optax.chain(adagc(), optax.adamw(3e-4))
    """
    return clip_by_rule(
        rules.adagc(lam, decay, warmup_steps, warmup_max_norm),
        granularity=granularity,
        stacked=stacked,
        axis_name=axis_name,
        split=split,
        nonfinite=nonfinite,
        observe_only=observe_only,
    )


def gradient_stabilizer(
    decay1: Any = 0.6,
    decay2: Any = 0.999,
    *,
    axis_name: AxisNames = None,
    split: Any = None,
    nonfinite: str = "zero",
    observe_only: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """GradientStabilizer: replaces the norm by the ratio of its moving moments.

    Args:
      decay1: see `rules.gradient_stabilizer`.
      decay2: see `rules.gradient_stabilizer`.
      axis_name: see `clip_by_rule`.
      split: see `clip_by_rule`.
      nonfinite: see `clip_by_rule`.
      observe_only: see `clip_by_rule`.

    Examples:
      >>> import optax
      >>> from zclip_jax import gradient_stabilizer
      >>> tx = optax.chain(gradient_stabilizer(), optax.adamw(3e-4))
    """
    return clip_by_rule(
        rules.gradient_stabilizer(decay1, decay2),
        axis_name=axis_name,
        split=split,
        nonfinite=nonfinite,
        observe_only=observe_only,
    )
