"""A rule as an optax transformation."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zclip_jax._checks import check_choice, check_flag
from zclip_jax._frame import make_frame
from zclip_jax._groups import Granularity, Groups, Slot, Stacked
from zclip_jax._norm import AxisNames, accumulator_dtype
from zclip_jax._rule import Outcome, Rule
from zclip_jax._state import ClipState, check_state
from zclip_jax._typing import PyTree

NONFINITE = ("zero", "propagate")


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
      prior_norms: norms recorded in an earlier run, oldest first, `[steps]`; `[steps, groups]` where there are
        several groups. The rule absorbs them at `init`, so that a run starts with warm statistics. They are not
        counted as steps.
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
    check_flag("observe_only", observe_only)
    frame = make_frame(rule, prior_norms, granularity, stacked, axis_name, split)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        del params
        check_state(state, ClipState)
        outcome, groups, state = frame.decide(updates, state, **extra_args)
        if not observe_only:
            updates = _scale(updates, outcome, nonfinite, groups)
        return updates, state

    return optax.GradientTransformationExtraArgs(frame.init, update)


def _scale(updates: PyTree, outcome: Outcome, nonfinite: str, groups: Groups) -> PyTree:
    """The updates times the scale of their groups; of bad groups zeros, or the updates as they are."""
    scale = _at_slots(jnp.where(outcome.nonfinite, BAD, outcome.clip_scale), groups)
    leaves, structure = jax.tree.flatten(updates)
    scaled = [
        x if slot is None else _scale_leaf(jnp.asarray(x), scale(slot), nonfinite)
        for x, slot in zip(leaves, groups.slots, strict=True)
    ]
    return structure.unflatten(scaled)


BAD = -1.0  # in place of a scale


def _scale_leaf(x: jax.Array, scale: jax.Array, nonfinite: str) -> jax.Array:
    if scale.ndim:  # one for each entry along the leading axis
        scale = jnp.expand_dims(scale, tuple(range(1, x.ndim)))
    bad = scale == BAD
    # Multiplying in float32 keeps the scale's digits for bf16 and its range for fp16; XLA fuses the casts.
    dtype = accumulator_dtype(x)
    scale = jnp.where(bad, 1.0, scale).astype(dtype)
    if jnp.iscomplexobj(x):
        scaled = jax.lax.complex(x.real * scale, x.imag * scale)
    else:
        scaled = (x.astype(dtype) * scale).astype(x.dtype)
    # Selection, since NaN * 0 and inf * 0 are NaN.
    return jnp.where(bad, jnp.zeros_like(x) if nonfinite == "zero" else x, scaled)


ROW = 16  # entries that share a buffer, and so the kernels that can be told apart by the place they read


def _at_slots(x: jax.Array, groups: Groups) -> Callable[[Slot], jax.Array]:
    """Reads `x`, which has an entry for each group, at a slot of `groups`.

    XLA's CPU compiler makes a kernel of its own for each place in an array that is read, and kernels that read it do
    the optimizer's work, too: 1,500 leaves took it four times as long as one norm for all. It knows a kernel again
    that reads the same place in another buffer. So there the array is cut into short rows. A conditional with equal
    branches keeps each row a buffer of its own, since nothing is fused across one.
    """
    num_groups = math.prod(groups.shape)
    if num_groups <= ROW * ROW:
        return lambda slot: x[slot]
    num_rows = -(-num_groups // ROW)

    def rows(x):
        table = jnp.pad(x, (0, num_rows * ROW - num_groups)).reshape(num_rows, ROW)
        return tuple(table[i] for i in range(num_rows))

    cut = jax.lax.platform_dependent(x, cpu=lambda x: jax.lax.cond(x[0] > 0, rows, rows, x), default=rows)
    return lambda slot: cut[slot // ROW][slot % ROW] if isinstance(slot, int) else x[slot]
