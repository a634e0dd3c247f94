"""Carries optimizer state from one chain into another."""

import dataclasses
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zclip_jax._clip import TOTALS, ClipState
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
    moments, counts and schedules go on, and so does a clip state whose rule keeps the same statistics. The k-th
    state of a type in the old chain goes to the k-th of that type in the new one. Where the types agree and the
    arrays inside do not (another model, another rule), the new state stays fresh; of a clip state the totals are
    carried all the same.

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
    sources: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for name, state in _states(old_opt_state):
        sources[type(state).__name__].append((name, state))
    carried: list[str] = []
    fresh: list[str] = []

    def place(path, new):
        if not _is_state(new):
            return new
        kind, name = type(new).__name__, _name(path, new)
        if not sources[kind]:
            fresh.append(f"{name}: the old chain has none")
            return new
        _, old = sources[kind].pop(0)
        if _spec(old) == _spec(new):
            carried.append(name)
            return old
        fresh.append(f"{name}: the old one holds other arrays")
        if isinstance(new, ClipState) and jnp.shape(old.num_steps) == jnp.shape(new.num_steps):
            fresh[-1] += ", only its totals are carried"
            return dataclasses.replace(new, **{total: getattr(old, total) for total in TOTALS})
        return new

    state = jax.tree_util.tree_map_with_path(place, new_opt_state, is_leaf=_is_state)
    dropped = tuple(name for left in sources.values() for name, _ in left)
    return state, TransplantReport(tuple(carried), tuple(fresh), dropped)


def _is_state(x: Any) -> bool:
    """Whether `x` is a named state with arrays and no named state inside: a wrapper is no unit to carry."""
    named = hasattr(x, "_fields") or dataclasses.is_dataclass(x)
    if isinstance(x, ClipState):
        return True
    return named and bool(jax.tree.leaves(x)) and not _states(x, inside=True)


def _states(tree: Any, inside: bool = False) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: not (inside and x is tree) and _is_state(x)
    )
    return [(_name(path, x), x) for path, x in leaves if _is_state(x)]


def _name(path: Any, state: Any) -> str:
    return f"{jax.tree_util.keystr(path, simple=True, separator='/')} {type(state).__name__}".strip()


def _spec(tree: Any) -> Any:
    leaves = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), leaves
