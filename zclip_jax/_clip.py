"""A rule as an optax transformation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zclip_jax._flax import register_with_flax
from zclip_jax._groups import Granularity, Groups, Stacked, check_granularity, find_groups
from zclip_jax._norm import AxisNames, accumulator_dtype, global_norm, is_gradient, square_sums
from zclip_jax._rule import (
    Outcome,
    Rule,
    as_float,
    check_choice,
    check_rule,
    decide,
    decide_all,
    init_state,
    safe_sqrt,
)
from zclip_jax._typing import IntEach, PyTree, dataclass

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
    num_steps: IntEach
    num_fired: IntEach
    num_bound: IntEach
    num_capped: IntEach
    num_nonfinite: IntEach
    spike_run: IntEach
    longest_spike_run: IntEach


def clip_by_rule(
    rule: Rule,
    *,
    prior_norms: Any = None,
    granularity: Granularity = "global",
    stacked: Stacked = None,
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
      granularity: what has a norm, statistics and a decision of its own: `"global"`, all leaves together;
        `"leaf"`, each leaf; or a function of a leaf's key path that returns the label of its group. State and
        metrics are then arrays `[groups]`, in the order of `group_names`. A group without gradients (an expert
        without tokens, a frozen adapter) is not absorbed and not clipped, and a non-finite one is zeroed alone.
      stacked: function of a leaf's key path: whether its leading axis counts layers, stacked for a scan, each
        of which is then a group of its own. Inside `shard_map` that axis must not be split.
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
    check_granularity(granularity, stacked)
    check_rule(rule)
    check_split(axis_name, split)
    if prior_norms is not None and np.ndim(prior_norms) != 1:
        raise ValueError(
            f"prior_norms must be one-dimensional, got an array of shape {np.shape(prior_norms)}"
        )
    if prior_norms is not None and granularity != "global":
        raise ValueError(f"prior_norms needs granularity 'global', got {granularity!r}")

    def init(params: PyTree) -> PyTree:
        state = init_clip_state(rule, prior_norms)
        groups = find_groups(params, granularity, stacked)
        if groups is None:
            return state
        return jax.tree.map(lambda x: jnp.repeat(x[None], len(groups.names), axis=0), state)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        del params
        check_state(state, ClipState)
        groups = find_groups(updates, granularity, stacked)
        if groups is None:
            norm = global_norm(updates, axis_name, split)
            outcome, rule_state = decide(rule, norm, state.rule_state, global_norm=norm, **extra_args)
            slots = None
        else:
            check_num_groups(state, groups)
            slots = groups.slots
            squares = square_sums(updates, axis_name, split, slots, len(groups.names))
            # Of the groups that have one: a fault in one of them is no reason to scale the others.
            whole = safe_sqrt(jnp.sum(jnp.where(jnp.isfinite(squares), squares, 0.0)))
            outcome, rule_state = jax.vmap(
                lambda norm, state: decide(rule, norm, state, global_norm=whole, **extra_args)
            )(safe_sqrt(squares), state.rule_state)
        if not observe_only:
            updates = _scale(updates, outcome, nonfinite, slots)
        return updates, count(state, outcome, rule_state)

    return optax.GradientTransformationExtraArgs(init, update)


TOTALS = (
    "num_steps",
    "num_fired",
    "num_bound",
    "num_capped",
    "num_nonfinite",
    "spike_run",
    "longest_spike_run",
)


def check_split(axis_name: AxisNames, split: Any) -> None:
    """Raises ValueError for a `split` of no axes."""
    if split is not None and axis_name is None:
        raise ValueError(f"split needs axis_name, the axes that it speaks of; got split={split!r} alone")


def check_state(state: Any, kind: type) -> None:
    """Raises ValueError for the state of another transformation than the one whose state is a `kind`."""
    if not isinstance(state, kind):
        raise ValueError(
            f"the state of this transformation must be a {kind.__name__}, got a {type(state).__name__}: was the "
            "optimizer state made by another chain?"
        )


def check_num_groups(state: ClipState, groups: Groups) -> None:
    """Raises ValueError for a state of another number of groups."""
    found = jnp.shape(state.num_steps)
    if found != (len(groups.names),):
        raise ValueError(
            f"the updates have {len(groups.names)} groups, but the state was made for shape {found}: init and "
            "update must see trees of the same structure"
        )


def init_clip_state(rule: Rule, prior_norms: Any = None) -> ClipState:
    """The state before the first step, with `prior_norms` absorbed."""
    if prior_norms is None:
        rule_state = init_state(rule)
    else:
        _, rule_state = decide_all(rule, as_float(prior_norms))
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


def _zero(dtype):
    # A computation of its own each time: a donated state must not share buffers between its leaves.
    return jnp.zeros((), dtype)


def _scale(updates, outcome, nonfinite, slots):
    leaves, structure = jax.tree.flatten(updates)
    places = [None] * len(leaves) if slots is None else slots
    scaled = [
        _scale_leaf(x, outcome.clip_scale, outcome.nonfinite, nonfinite, place)
        for x, place in zip(leaves, places, strict=True)
    ]
    return structure.unflatten(scaled)


def _scale_leaf(x, clip_scale, is_nonfinite, nonfinite, place):
    if not is_gradient(x):
        return x
    x = jnp.asarray(x)
    if place is not None:
        # One factor for the leaf, or one for each entry along its leading axis.
        shape = place.shape + (1,) * (x.ndim - place.ndim if place.ndim else 0)
        clip_scale, is_nonfinite = clip_scale[place].reshape(shape), is_nonfinite[place].reshape(shape)
    # Multiplying in float32 keeps the scale's digits for bf16 and its range for fp16; XLA fuses the casts.
    dtype = accumulator_dtype(x)
    scale = jnp.where(is_nonfinite, 1.0, clip_scale).astype(dtype)
    if jnp.iscomplexobj(x):
        scaled = jax.lax.complex(x.real * scale, x.imag * scale)
    else:
        scaled = (x.astype(dtype) * scale).astype(x.dtype)
    # Selection, since NaN * 0 and inf * 0 are NaN.
    return jnp.where(is_nonfinite, jnp.zeros_like(x) if nonfinite == "zero" else x, scaled)


def count(state: ClipState, outcome: Outcome, rule_state: PyTree) -> ClipState:
    """The state after a step with this outcome."""
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
