"""The one number a rule needs: the global L2 norm, every entry counted once, however the tree is split.

Each leaf has its square sum on each device. Over a mesh axis that splits the leaf these differ and must be
added; over one that does not they are copies, of which one counts. So a leaf's sum is divided by the sizes
of the axes that do not split it, and then one `psum` over all axes adds everything up.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from zclip_jax._numerics import safe_sqrt
from zclip_jax._typing import FloatScalar, PyTree

AxisNames = str | tuple[str, ...] | None

reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard


def check_split(axis_name: Any, split: Any) -> None:
    """Raises ValueError for an `axis_name` that names no axes, or a `split` of no axes."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if axis_name is not None and not all(isinstance(name, str) for name in names):
        raise ValueError(f"axis_name must be a string, a tuple of strings or None, got {axis_name!r}")
    if split is not None and axis_name is None:
        raise ValueError(f"split needs axis_name, the axes that it speaks of; got split={split!r} alone")


def is_gradient(x: jax.typing.ArrayLike) -> bool:
    """Whether a leaf takes part in norm and scaling: floats and complex; not ints, bools, keys or float0."""
    return jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact)


def accumulator_dtype(x: jax.typing.ArrayLike) -> jnp.dtype:
    """The real dtype in which a leaf is squared and scaled: float32, or float64 for 64-bit leaves."""
    wide = jnp.finfo(jax.dtypes.result_type(x)).bits == 64
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def global_norm(tree: PyTree, axis_name: AxisNames = None, split: Any = None) -> FloatScalar:
    """The L2 norm over all float and complex leaves of `tree`, each entry counted once.

    Squares are taken and summed in float32 (float64 for 64-bit leaves), so a norm above 1.8e19 overflows to
    `inf` and one below about 1e-19 underflows to 0. Each leaf is read once.

    Under plain `jit` the arrays are global and a sum is all there is to it. Inside `shard_map` the type of a
    leaf names the mesh axes over which it varies. Where types carry nothing (`pmap`,
    `shard_map(check_vma=False)`), or not the whole truth (equal values of varying type), the caller says it.

    Args:
      tree: the gradients; any shapes, zero-size ones included. A tree without such leaves has norm 0.
      axis_name: mapped axes over which leaves are split.
      split: which leaves; see `clip_by_rule`.

    Raises:
      ValueError: an axis is not bound here, `split` does not match `tree`, or a leaf is unreduced.
    """
    slots = tuple(() if is_gradient(x) else None for x in jax.tree.leaves(tree))
    return safe_sqrt(square_sums(tree, slots, (), axis_name, split))


def square_sums(
    tree: PyTree,
    slots: tuple[Any, ...],
    shape: tuple[int, ...],
    axis_name: AxisNames = None,
    split: Any = None,
) -> jax.Array:
    """The squares of the norms of groups of leaves, of that shape; see `_groups.Groups` for `slots` and `shape`."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    for axis in axes:
        if not _is_bound(axis):
            raise ValueError(
                f"axis_name={axis!r} is no mapped axis here: pass it only where the update runs inside a "
                "pmap or shard_map over that axis; under plain jit leave axis_name out"
            )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    given = _split_axes(split, tree, axes)
    # Together by the axes they are split over, so that what follows does not grow with the number of leaves.
    parts: dict[frozenset[str], list[tuple[jax.Array, Any]]] = {}
    for (path, x), over, slot in zip(leaves, given, slots, strict=True):
        if slot is None:
            continue
        _check_reduced(path, x)
        over = _varying(x) if over is None else over
        parts.setdefault(over, []).append((_square_sum(x, layers=isinstance(slot, np.ndarray)), slot))
    sums = {over: _gather(items, shape) for over, items in parts.items()}

    summed_over = frozenset().union(*sums, *map(_varying, sums.values()))
    total = None
    for over, square_sum in sums.items():
        copies = math.prod(jax.lax.axis_size(axis) for axis in summed_over - over)
        total = square_sum / copies if total is None else _add(total, square_sum / copies)
    if total is None:
        return jnp.zeros(shape, jnp.float32)
    if summed_over:
        total = jax.lax.psum(_cast_to_varying(total, summed_over), tuple(sorted(summed_over)))
    return total


def _square_sum(x: jax.typing.ArrayLike, layers: bool) -> jax.Array:
    """The sum of the squares of `x`; with `layers` of each entry along its leading axis."""
    x = jnp.asarray(x)
    dtype = accumulator_dtype(x)
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    squares = [jnp.square(part.astype(dtype)) for part in parts]
    return _whole(jnp.sum(sum(squares[1:], squares[0]), axis=tuple(range(1 if layers else 0, x.ndim))))


def _whole(x: jax.Array) -> jax.Array:
    """`x` whole on each device, where its type says that a mesh with explicit axes splits it."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    if all(axes is None for axes in spec):
        return x
    return reshard(x, PartitionSpec(*(None,) * x.ndim))


def _gather(items: list[tuple[jax.Array, Any]], shape: tuple[int, ...]) -> jax.Array:
    """The sums of each group, of that shape."""
    if not shape:
        return functools.reduce(_add, (square_sum for square_sum, _ in items))
    widest = max((square_sum.dtype for square_sum, _ in items), key=lambda dtype: dtype.itemsize)
    values = jnp.concatenate([jnp.atleast_1d(square_sum).astype(widest) for square_sum, _ in items])
    places = np.concatenate([np.atleast_1d(slot) for _, slot in items])
    if np.array_equal(places, np.arange(*shape)):  # as they come, with nothing to add up
        return values
    return jnp.zeros(shape, widest).at[places].add(values)


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum in the wider of both dtypes."""
    wider = max(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return a.astype(wider) + b.astype(wider)


def _split_axes(split: Any, tree: PyTree, axes: tuple[str, ...]) -> list[frozenset[str] | None]:
    """For each leaf of `tree` the axes it is split over, None where its type says so."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    if split is None:
        types_know = not axes or bool(_varying(jax.lax.axis_index(axes[0])))
        return [None if types_know else frozenset(axes)] * len(paths)
    if callable(split):
        entries = [split(path) for path, _ in paths]
    else:
        try:
            entries = structure.flatten_up_to(jax.tree.broadcast(split, tree, _is_split_entry))
        except ValueError as error:
            raise ValueError(
                f"split does not match the updates: got {jax.tree.structure(split, is_leaf=_is_split_entry)} "
                f"for {structure}"
            ) from error
    return [_entry_axes(entry, path, axes) for entry, (path, _) in zip(entries, paths, strict=True)]


def _is_split_entry(x: Any) -> bool:
    return isinstance(x, bool | np.bool_ | PartitionSpec)


def _entry_axes(entry: Any, path: Any, axes: tuple[str, ...]) -> frozenset[str]:
    if isinstance(entry, bool | np.bool_):
        return frozenset(axes if entry else ())
    if not isinstance(entry, PartitionSpec):
        raise ValueError(
            f"split must give a bool or a PartitionSpec, got {entry!r} for {jax.tree_util.keystr(path)}"
        )
    names = {name for part in entry if part for name in ((part,) if isinstance(part, str) else part)}
    for name in names - set(axes):
        # An axis that is not mapped here is none of ours: the arrays are whole over it.
        if _is_bound(name):
            raise ValueError(
                f"split says that {jax.tree_util.keystr(path)} is split over {name!r}, "
                f"which axis_name={axes} lacks"
            )
    return frozenset(names & set(axes))


def _is_bound(axis: str) -> bool:
    try:
        jax.lax.axis_size(axis)
    except (NameError, KeyError, AssertionError):  # as JAX's versions and contexts have it
        return False
    return True


def _varying(x: jax.typing.ArrayLike) -> frozenset[str]:
    """The mapped axes over which the type of `x` says it varies."""
    type_ = jax.typeof(x)
    if hasattr(type_, "manual_axis_type"):  # from JAX 0.10 on
        return frozenset(type_.manual_axis_type.varying)
    return frozenset(getattr(type_, "vma", ()))


def _cast_to_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - _varying(x)))
    if not missing or not _varying(jax.lax.axis_index(missing[0])):  # there, types carry no axes
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)  # pyrefly: ignore[missing-attribute]


def _check_reduced(path: Any, x: jax.typing.ArrayLike) -> None:
    type_ = jax.typeof(x)
    unreduced = set(getattr(getattr(type_, "manual_axis_type", None), "unreduced", ()))
    unreduced |= set(getattr(getattr(getattr(type_, "sharding", None), "spec", None), "unreduced", ()))
    if unreduced:
        raise ValueError(
            f"gradient {jax.tree_util.keystr(path)} is unreduced over {sorted(unreduced)}, its shards are "
            "terms of a sum still to be taken: reduce it (jax.reshard or jax.lax.psum) before clipping"
        )
