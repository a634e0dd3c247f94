"""Carries optimizer state from one chain into another."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zclip_jax._state import TOTALS, ClipState
from zclip_jax._typing import PyTree


class TransplantReport(NamedTuple):
    """What `transplant` did; paths and state names, one string each.

    Args:
      carried: states of the new chain that took over those of the old.
      fresh: states of the new chain that stay as `init` made them, and why.
      dropped: states of the old chain that nothing took over.
    """

    carried: tuple[str, ...]
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]


def transplant(old_opt_state: PyTree, new_opt_state: PyTree) -> tuple[PyTree, TransplantReport]:
    """Moves what fits of an optimizer state into that of another chain.

    For a run that is resumed with `zclip()` where it had none before, without it, or with another rule: Adam's
    moments, counts and schedules go on, and so does a clip state whose rule keeps the same statistics. A state
    of the new chain takes the first state of the same type and the same arrays that the old chain still has,
    wrappers such as `MultiSteps` whole where they agree whole; otherwise what is inside of them is carried, and
    the arrays of their own that have the same shape. Where only the types agree (another model, another rule)
    the new state stays fresh; of a clip state the totals are carried all the same.

    Args:
      old_opt_state: the state to carry from, restored into the structure of the old chain.
      new_opt_state: the state to carry into, from the new chain's `init`.

    Returns:
      The new state, of the structure of `new_opt_state`, and a `TransplantReport`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from zclip_jax import transplant, zclip
      >>> params = jnp.ones(2)
      >>> old = optax.adam(1e-3)
      >>> _, old_state = old.update(params, old.init(params), params)
      >>> new = optax.chain(zclip(), optax.adam(1e-3))
      >>> state, report = transplant(old_state, new.init(params))
      >>> report.carried, report.fresh
      (('1/0 ScaleByAdamState',), ('0 ClipState: the old chain has none',))
    """
    old_nodes = list(_named_nodes(old_opt_state, ()))
    wanted = [_spec(new) for _, new in _named_nodes(new_opt_state, ())]
    taken: set[int] = set()  # ids of the nodes that went to the new chain, and of those inside them
    carried: list[str] = []
    fresh: list[str] = []

    def take(node: Any) -> Any:
        taken.update(id(inside) for _, inside in _named_nodes(node, ()))
        return node

    def find(new: Any, same_arrays: bool) -> Any:
        for _, old in old_nodes:
            if type(old).__name__ != type(new).__name__ or id(old) in taken:
                continue
            # What fits another state whole is not given away in parts.
            if _spec(old) == _spec(new) if same_arrays else _spec(old) not in wanted:
                return old
        return None

    def place(new: Any, path: tuple[Any, ...]) -> Any:
        if not _is_named(new):
            children, structure = _one_level(new)
            return (
                structure.unflatten([place(child, path + key) for key, child in children])
                if children
                else new
            )
        if not jax.tree.leaves(new):
            return new
        name = _name(path, new)
        old = find(new, same_arrays=True)
        if old is not None:
            carried.append(name)
            return take(old)
        old = find(new, same_arrays=False)
        why = "the old chain has none" if old is None else "the old one holds other arrays"
        if isinstance(new, ClipState):
            fresh.append(f"{name}: {why}")
            if old is None or jnp.shape(old.num_steps) != jnp.shape(new.num_steps):
                return new
            fresh[-1] += ", only its totals are carried"
            take(old)
            return dataclasses.replace(new, **{total: getattr(old, total) for total in TOTALS})
        children, structure = _one_level(new)
        if not any(_holds_named(child) for _, child in children):
            fresh.append(f"{name}: {why}")
            return new
        # A wrapper: what is inside finds its own way, and its own arrays come from one of its kind.
        own = (
            {}
            if old is None
            else {key: child for key, child in _one_level(old)[0] if not _holds_named(child)}
        )
        if old is not None:
            taken.add(id(old))
        placed = []
        for key, child in children:
            if _holds_named(child):
                placed.append(place(child, path + key))
            elif key in own and _spec(own[key]) == _spec(child):
                placed.append(own[key])
            else:
                placed.append(child)
                if jax.tree.leaves(child):
                    fresh.append(f"{_name(path + key, child)} of {type(new).__name__}")
        return structure.unflatten(placed)

    state = place(new_opt_state, ())
    dropped = tuple(_name(path, old) for path, old in _units(old_opt_state, ()) if id(old) not in taken)
    return state, TransplantReport(tuple(carried), tuple(fresh), dropped)


def _is_named(x: Any) -> bool:
    """Whether `x` is a state with a type of its own: a NamedTuple or a dataclass."""
    return hasattr(x, "_fields") or (dataclasses.is_dataclass(x) and not isinstance(x, type))


def _units(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Paths and nodes of the named states with arrays that are no wrappers of others."""
    children = [] if isinstance(tree, jax.Array) or tree is None else _one_level(tree)[0]
    wraps = any(_holds_named(child) for _, child in children) and not isinstance(tree, ClipState)
    if _is_named(tree) and jax.tree.leaves(tree) and not wraps:
        yield path, tree
        return
    for key, child in children:
        if child is not tree:
            yield from _units(child, path + key)


def _holds_named(x: Any) -> bool:
    return next(_named_nodes(x, ()), None) is not None


def _one_level(x: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """The children of a node with their keys, and how to put the node together again."""
    return jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)


def _named_nodes(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Paths and nodes of all named states with arrays, outer ones first."""
    if _is_named(tree) and jax.tree.leaves(tree):
        yield path, tree
    if isinstance(tree, jax.Array) or tree is None:
        return
    for key, child in _one_level(tree)[0]:
        if child is not tree:
            yield from _named_nodes(child, path + key)


def _name(path: Any, state: Any) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{name} {type(state).__name__}".strip() if _is_named(state) else name


def _spec(tree: Any) -> Any:
    leaves = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), leaves
