"""Rules as optax transformations: `clip_by_rule`, and `zclip` as its most used composition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zclip_jax import rules
from zclip_jax._flax import register_with_flax
from zclip_jax._norm import AxisNames, accumulator_dtype, global_norm, is_gradient
from zclip_jax._rule import Outcome, Rule, as_float, check_choice, check_number, decide
from zclip_jax._typing import IntScalar, PyTree, dataclass

NONFINITE = ("zero", "propagate")


@dataclass(frozen=True)
class ClipState:
    """State of `clip_by_rule`; read it with `zclip_jax.metrics`.

    Args:
      rule_state: the rule's own state.
      last: the `Outcome` of the last step; before the first, zeros, with `clip_scale` 1 and `threshold` inf.
      num_steps: int32, calls of `update` so far, non-finite ones included.
      num_fired: int32, steps that the rule called spikes.
      num_bound: int32, steps that the rule scaled down.
      num_capped: int32, steps that the cap scaled down further.
      num_nonfinite: int32, steps whose norm was NaN or infinite.
      spike_run: int32, consecutive spikes up to now; a non-finite or zero norm neither extends nor ends it.
      longest_spike_run: int32, the longest such run so far.
    """

    rule_state: PyTree
    last: Outcome
    num_steps: IntScalar
    num_fired: IntScalar
    num_bound: IntScalar
    num_capped: IntScalar
    num_nonfinite: IntScalar
    spike_run: IntScalar
    longest_spike_run: IntScalar


def clip_by_rule(
    rule: Rule,
    *,
    prior_norms: Any = None,
    axis_name: AxisNames = None,
    split: Any = None,
    nonfinite: str = "zero",
    observe_only: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Scales the updates down to the norm that `rule` allows.

    The updates keep structure, shapes and dtypes; integer and `float0` leaves pass untouched and do not
    count in the norm. The scaling is a selection by one scalar, so that NaN times 0 cannot leak through.

    Args:
      rule: decides from the global norm; see `zclip_jax.rules`.
      prior_norms: 1-D, norms recorded in an earlier run, oldest first. The rule absorbs them at `init`,
        so that a run starts with warm statistics. They are not counted as steps.
      axis_name: mapped axes over which leaves of the updates are split, where JAX cannot know: in `pmap` and
        in `shard_map(check_vma=False)`. Nothing is needed under plain `jit`, where arrays are global, nor in
        a type-checked `shard_map`, where types name the axes.
      split: which leaves are split over `axis_name`; all of them unless given. A pytree of bools or
        `PartitionSpec`s like the updates (or a prefix of it), or a function of a leaf's key path that returns
        one. A spec says over which of the axes. Overrules the types of a checked `shard_map`, for values that
        are equal though their type varies.
      nonfinite: what a NaN or infinite norm does to the updates: `"zero"` them, or `"propagate"` them as
        they are. The statistics stay untouched and the step is counted either way. Gradients so large that
        their squares overflow float32 (a norm above 1.8e19) count as non-finite.
      observe_only: run and count everything, but return all updates as they came. The metrics say what would
        have been done.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `ClipState`. Passes `value=` and other extra
      arguments of `update` on to the rule.

    Raises:
      ValueError: an argument is none of those accepted.

    Examples:
      >>> import jax.numpy as jnp
      >>> import zclip_jax
      >>> tx = zclip_jax.clip_by_rule(zclip_jax.rules.fixed(1.0))
      >>> grads = {"w": jnp.asarray([3.0, 4.0]), "step": jnp.asarray(7)}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> updates["w"], updates["step"]
      (Array([0.6..., 0.8...], dtype=float32), Array(7, dtype=int32, weak_type=True))
    """
    check_choice("nonfinite", nonfinite, NONFINITE)
    if not isinstance(rule, Rule):
        raise ValueError(f"rule must be a Rule such as rules.zscore(), got {rule!r}")
    if split is not None and axis_name is None:
        raise ValueError(f"split needs axis_name, the axes that it speaks of; got split={split!r} alone")
    if prior_norms is not None and np.ndim(prior_norms) != 1:
        raise ValueError(
            f"prior_norms must be one-dimensional, got an array of shape {np.shape(prior_norms)}"
        )

    def init(params: PyTree) -> PyTree:
        del params
        # Strongly typed arrays, so that no update can change a type.
        rule_state = jax.tree.map(lambda x: jnp.asarray(x, jax.dtypes.result_type(x)), rule.init())
        if prior_norms is not None:
            rule_state, _ = jax.lax.scan(
                lambda state, norm: decide(rule, norm, state)[::-1],
                rule_state,
                as_float(prior_norms),
            )
        state = ClipState(
            rule_state=rule_state,
            last=Outcome(
                **{name: _zero(jnp.result_type(float)) for name in ("grad_norm", "z_score", "mean", "std")},
                **{name: _zero(jnp.bool_) for name in ("fired", "bound", "capped", "nonfinite")},
                clip_scale=as_float(jnp.ones(())),
                threshold=as_float(jnp.full((), jnp.inf)),
            ),
            **{name: _zero(jnp.int32) for name in TOTALS},
        )
        register_with_flax(state)
        return state

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        del params
        if not isinstance(state, ClipState):
            raise ValueError(
                f"the state of this transformation must be a ClipState, got a {type(state).__name__}: was "
                "the optimizer state made by another chain?"
            )
        norm = global_norm(updates, axis_name, split)
        outcome, rule_state = decide(rule, norm, state.rule_state, **extra_args)
        if not observe_only:
            updates = jax.tree.map(lambda x: _scale(x, outcome, nonfinite), updates)
        return updates, _count(state, outcome, rule_state)

    return optax.GradientTransformationExtraArgs(init, update)


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
      prior_norms: see `clip_by_rule`.
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
    if max_grad_norm is not None:
        check_number("max_grad_norm", max_grad_norm, "a number >= 0 or None", lambda x: x >= 0)
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
        axis_name=axis_name,
        split=split,
        nonfinite=nonfinite,
        observe_only=observe_only,
    )


TOTALS = (
    "num_steps",
    "num_fired",
    "num_bound",
    "num_capped",
    "num_nonfinite",
    "spike_run",
    "longest_spike_run",
)


def _zero(dtype):
    # A computation of its own each time: a donated state must not share buffers between its leaves.
    return jnp.zeros((), dtype)


def _scale(x, outcome, nonfinite):
    if not is_gradient(x):
        return x
    x = jnp.asarray(x)
    # Multiplying in float32 keeps the scale's digits for bf16 and its range for fp16; XLA fuses the casts.
    dtype = accumulator_dtype(x)
    scale = jnp.where(outcome.nonfinite, 1.0, outcome.clip_scale).astype(dtype)
    if jnp.iscomplexobj(x):
        scaled = jax.lax.complex(x.real * scale, x.imag * scale)
    else:
        scaled = (x.astype(dtype) * scale).astype(x.dtype)
    # Selection, since NaN * 0 and inf * 0 are NaN.
    return jnp.where(outcome.nonfinite, jnp.zeros_like(x) if nonfinite == "zero" else x, scaled)


def _count(state, outcome, rule_state):
    absorbed = ~outcome.nonfinite & (outcome.grad_norm > 0)
    spike_run = jnp.where(absorbed, jnp.where(outcome.fired, state.spike_run + 1, 0), state.spike_run)
    return ClipState(
        rule_state=rule_state,
        last=jax.tree.map(lambda new, old: new.astype(old.dtype), outcome, state.last),
        num_steps=state.num_steps + 1,
        num_fired=state.num_fired + outcome.fired.astype(jnp.int32),
        num_bound=state.num_bound + outcome.bound.astype(jnp.int32),
        num_capped=state.num_capped + outcome.capped.astype(jnp.int32),
        num_nonfinite=state.num_nonfinite + outcome.nonfinite.astype(jnp.int32),
        spike_run=spike_run,
        longest_spike_run=jnp.maximum(state.longest_spike_run, spike_run),
    )
