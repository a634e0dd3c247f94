"""The states inside an optimizer state, each a unit that is carried over whole or not at all, and which match."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._state import ClipState
from zclip_jax._watch_state import WatchState
from zclip_jax.rules._schedules import ScheduledState
from zclip_jax.rules.combinators import LossAwareState

Path = tuple[Any, ...]

# Fields with these endings hold the state of an inner transformation, whatever its type.
INNER = ("inner_state", "inner_states", "opt_state", "optimizer_state", "rule_state")
ACCEPTED = (
    "an optimizer state, such as tx.init and tx.update return or optimizer.opt_state of an nnx.Optimizer"
)
# Inside of these a rule sees the norms as they are.
OF_NORMS = (ScheduledState, LossAwareState)
ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@dataclasses.dataclass(eq=False)
class Unit:
    """A state with arrays of its own.

    Args:
      path: where it is.
      node: what stands there.
      typed: whether it has a type that says what its arrays mean, which an array, a dict or a tuple has not.
      own: its arrays by their path within it, without those of the units inside.
      within: in a rule, the types around it that may change what it keeps the statistics of.
      around: the `ClipState` or `WatchState` that it belongs to, or the plain tuple or dict that it is an item of.
      inside: all units inside of it, outer ones first.
      partner: the unit of the other tree that it is matched with.
      covered: whether it is matched as a part of another unit.
    """

    path: Path
    node: Any
    typed: bool
    own: dict[Path, Any]
    within: tuple[str, ...]
    around: "Unit | None"
    inside: "list[Unit]" = dataclasses.field(default_factory=list)
    partner: "Unit | None" = None
    covered: bool = False

    def __post_init__(self):
        self.leaves, self.structure = jax.tree.flatten(self.node)
        # The keys of the dicts on the way: names in a chain, labels of a partition, hyperparameters.
        self.keys = [key.key for key in self.path if isinstance(key, jax.tree_util.DictKey)]
        self.is_clip = isinstance(self.node, ClipState | WatchState)
        self.group_ids = _group_ids(self.node)
        self.is_schedule = isinstance(self.node, ScheduledState)
        name = type(self.node).__name__
        self.kind = (*self.within, "array" if is_leaf(self.node) else name)
        if is_leaf(self.node):
            name = f"{jnp.result_type(self.node)}{list(jnp.shape(self.node))}"
        self.name = f"{path_name(self.path)} {name}".strip()


def find_units(
    node: Any, path: Path = (), within: tuple[str, ...] = (), around: Unit | None = None, chain: bool = True
) -> Iterator[Unit]:
    """The units of an optimizer state, outer ones first.

    A plain tuple or dict without typed states is one unit. Where a `chain` can stand, its items are units too.
    """
    children, typed = one_level(node), _is_typed(node)
    if not jax.tree.leaves(node):
        return
    in_rule = around is not None and around.is_clip and not isinstance(node, OF_NORMS)
    inside = (*within, type(node).__name__) if in_rule else within
    if not typed and _holds_state(node):
        for key, child in children:
            yield from find_units(child, path + key, inside, around, chain=False)
        return
    inner = [(key, child) for key, child in children if typed and _is_inner(key, child)]
    keys = {key for key, _ in inner}
    own = {key: x for key, x in jax.tree_util.tree_leaves_with_path(node) if key[:1] not in keys}
    unit = Unit(path, node, typed, own, within, around)
    if unit.is_clip or not typed:
        around = unit
    for key, child in inner or (() if typed or not chain else children):
        unit.inside += find_units(
            child, path + key, inside, around, chain=typed and "rule_state" not in path_name(key)
        )
    if own:
        yield unit
    yield from unit.inside


def match(old_units: list[Unit], new_units: list[Unit]) -> None:
    """Makes partners: first of units that agree with all inside of them, the larger first, then of the others."""

    def same_own(new, old):
        if isinstance(new.node, WatchState) and new.group_ids != old.group_ids:
            return False
        return new.own.keys() == old.own.keys() and all(_fits(x, old.own[key]) for key, x in new.own.items())

    def agree(new, old):
        if new.kind != old.kind:
            return False
        if new.typed:
            return same_own(new, old)
        # The order says which is which where there are as many, of the same names, in both trees.
        alike = [[new.keys == x.keys and same(new, x) for x in units] for units in (old_units, new_units)]
        return new.keys == old.keys and same(new, old) and sum(alike[0]) == sum(alike[1])

    def rank(pair):
        new, old = pair
        inside = ((a, b) for a in new.inside for b in old.inside if a.kind == b.kind and not a.is_schedule)
        shares = any(same_own(a, b) for a, b in inside)
        return -len(new.leaves) if same(new, old) else 0, new.keys != old.keys, not shares

    for new, old in sorted((p for p in itertools.product(new_units, old_units) if agree(*p)), key=rank):
        if _free([new, old]):
            new.partner, old.partner = old, new
            if same(new, old) and _free(new.inside + old.inside):
                for a, b in zip(new.inside, old.inside, strict=new.typed):
                    a.partner, b.partner = b, a
                for part in (*new.inside, *old.inside):
                    part.covered = True
    for new in new_units:
        if not new.typed and new.partner is None and any(item.partner is None for item in new.inside):
            undo(new.inside)


def undo(units: list[Unit]) -> None:
    for unit in units:
        if unit.partner is not None:
            unit.partner.partner, unit.partner.covered = None, False
            unit.partner, unit.covered = None, False


def _free(units: list[Unit]) -> bool:
    return not any(unit.partner is not None or unit.covered for unit in units)


def same(new: Unit, old: Unit) -> bool:
    alike = new.structure == old.structure and new.group_ids == old.group_ids
    return alike and all(map(_fits, new.leaves, old.leaves))


def _fits(new: Any, old: Any) -> bool:
    if jnp.shape(new) != jnp.shape(old):
        return False
    number = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating}.get(type(old))
    dtype = jnp.result_type(new)
    return dtype == jnp.result_type(old) if number is None else jnp.issubdtype(dtype, number)


def _group_ids(node: Any) -> list[list[int]]:
    """The checksums of the names of the groups, of each watch in `node`."""
    watches = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, WatchState))
    return [np.asarray(x.group_ids).tolist() for x in watches if isinstance(x, WatchState)]


def is_leaf(x: Any) -> bool:
    return jax.tree_util.all_leaves([x])


def one_level(x: Any) -> list[tuple[Path, Any]]:
    """The children of a node with their keys; none of an array."""
    return [] if is_leaf(x) else jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]


def path_name(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_typed(node: Any) -> bool:
    if hasattr(node, "_fields") or dataclasses.is_dataclass(node):
        return True
    # Of other classes, such as nnx.Optimizer, those around one array are variables and say nothing.
    return not isinstance(node, (tuple, list, Mapping)) and len(one_level(node)) > 1


def _is_inner(key: Path, child: Any) -> bool:
    name = path_name(key)
    # Elsewhere stand moments as well, and parameters may be of a class that somebody named a state.
    return name.endswith(INNER) or _holds_state(child, "" if "state" in name else ("optax", "zclip_jax"))


def _holds_state(node: Any, modules: str | tuple[str, ...] = "") -> bool:
    """Whether `node`, or something in its plain tuples and dicts, is a state by its name, as those of optax are."""
    if _is_typed(node):
        return type(node).__name__.endswith("State") and type(node).__module__.startswith(modules)
    if not isinstance(node, (tuple, list, dict)):
        return False
    return any(_holds_state(child, modules) for _, child in one_level(node))


def check_tree(argument: str, tree: Any) -> None:
    """Raises ValueError unless all leaves of `tree` are arrays."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not _is_array(x):
            where = f" at {path_name(path)!r}" if path else ""
            raise ValueError(f"{argument} must be {ACCEPTED}; got {type(x).__name__}{where}")


def check_types(argument: str, tree: Any, others: Iterable[Unit]) -> None:
    """Raises ValueError if `tree` has the fields of states, as `others` or nnx have them, without their types."""
    if _is_typed(tree) or _holds_state(tree):
        return
    fields = {names for unit in others if _holds_state(unit.node) and len(names := _names(unit.node)) > 1}
    if type(tree).__module__.startswith("flax.nnx.statelib") or fields & set(_mappings(tree)):
        raise ValueError(
            f"{argument} must be {ACCEPTED}; got a {type(tree).__name__} without the types of the states in it: "
            "first restore it into its optimizer, with nnx.update(optimizer, state) or as the structure of tx.init"
        )


def _is_array(x: Any) -> bool:
    try:
        return isinstance(x, ARRAYS) and jnp.result_type(x) is not None
    except TypeError:  # an array of strings or objects
        return False


def _names(node: Any) -> frozenset[str]:
    return frozenset(path_name(key) for key, child in one_level(node) if jax.tree.leaves(child))


def _mappings(node: Any) -> Iterator[frozenset[str]]:
    """The names of what is in each mapping of `node`."""
    if isinstance(node, Mapping):
        yield _names(node)
    for _, child in one_level(node):
        yield from _mappings(child)
