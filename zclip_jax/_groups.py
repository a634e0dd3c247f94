"""Which leaves of the gradients share a norm."""

import collections
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._norm import is_gradient
from zclip_jax._typing import PyTree

Granularity = str | Callable[[Any], Any]
Stacked = Callable[[Any], bool] | None
# Where in an array of `Groups.shape` the groups of a leaf are: nothing to choose, one, or one for each layer.
Slot = tuple[()] | int | np.ndarray


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of a tree.

    Args:
      names: one for each group, all different, in the order of the arrays in state and metrics.
      shape: of those arrays: `()` for the one group of `"global"`, else `(number of groups,)`.
      slots: for each leaf of the tree the index of its group in such an array: `()` or an int, or int `[layers]`
        for the groups of a stacked leaf; None for a leaf that is no gradient.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    slots: tuple[Slot | None, ...]


INJECTED = "; optax.inject_hyperparams calls a function with the step, unless static_args names its argument"


def check_granularity(granularity: Granularity, stacked: Stacked) -> None:
    """Raises ValueError for arguments of `find_groups` that are not accepted."""
    is_name = isinstance(granularity, str) and granularity in ("global", "leaf")
    if not is_name and not callable(granularity):
        raise ValueError(
            f"granularity must be 'global', 'leaf' or a function of a leaf's key path, got {granularity!r}{INJECTED}"
        )
    if stacked is not None and (not callable(stacked) or granularity == "global"):
        raise ValueError(
            f"stacked must be a function of a leaf's key path, beside a granularity other than 'global'; got "
            f"stacked={stacked!r} with granularity={granularity!r}{'' if callable(stacked) else INJECTED}"
        )


def find_groups(tree: PyTree, granularity: Granularity, stacked: Stacked = None) -> Groups:
    """The groups of `tree`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if granularity == "global":
        return Groups(("global",), (), tuple(() if is_gradient(x) else None for _, x in leaves))
    places: dict[Hashable, int] = {}  # by leaf or label, and layer: never by name, which two may share
    names: list[tuple[str, str]] = []  # short, and in full
    slots: list[Slot | None] = []

    def place(group: Hashable, name: str, full: str) -> int:
        if group not in places:
            places[group] = len(places)
            names.append((name, full))
        return places[group]

    leaf_names = _leaf_names([path for path, _ in leaves])
    for i, ((path, x), name) in enumerate(zip(leaves, leaf_names, strict=True)):
        if not is_gradient(x):
            slots.append(None)
            continue
        group, full = i, jax.tree_util.keystr(path)
        if callable(granularity):
            group = _label(granularity, path)
            name, full = str(group), repr(group)
        if stacked is None or not stacked(path):
            slots.append(place((group,), name, full))
        elif jnp.ndim(x) == 0:
            raise ValueError(f"stacked names {name}, a scalar without an axis of layers")
        else:
            layers = range(jnp.shape(x)[0])
            rows = [place((group, layer), f"{name}[{layer}]", f"{full}[{layer}]") for layer in layers]
            slots.append(np.array(rows, np.int32))
    return Groups(_distinct(names), (len(names),), tuple(slots))


def _label(granularity: Callable[[Any], Any], path: Any) -> Hashable:
    label = granularity(path)
    if not isinstance(label, Hashable):
        raise ValueError(
            f"granularity must return labels such as strings, got {label!r} for {jax.tree_util.keystr(path)}"
        )
    return label


def _leaf_names(paths: list[Any]) -> list[str]:
    """Key paths as `"blocks/attention/wq"`."""
    # Of a variable of flax's NNX the array is an attribute, its only one, whose name says nothing.
    children = collections.Counter(path[:-1] for path in paths)
    value = jax.tree_util.GetAttrKey("value")
    own = [path[:-1] if path[-1:] == (value,) and children[path[:-1]] == 1 else path for path in paths]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in own]


def _distinct(names: list[tuple[str, str]]) -> tuple[str, ...]:
    """The short names, but the full ones where a short one is that of several groups."""
    shared = collections.Counter(short for short, _ in names)
    return tuple(short if shared[short] == 1 else full for short, full in names)


def group_names(
    params: PyTree, granularity: Granularity = "leaf", stacked: Stacked = None
) -> tuple[str, ...]:
    """The names of the groups of `clip_by_rule(…, granularity=…)`, in the order of its metrics.

    Args:
      params: the parameters, or anything of their structure.
      granularity: as in `clip_by_rule`.
      stacked: as in `clip_by_rule`.

    Returns:
      One name for each group: `("global",)`, key paths such as `"blocks/wq"`, or the labels given; with the
      number of the layer behind it, `"blocks/wq[3]"`, for stacked leaves.

    Raises:
      ValueError: an argument is none of those accepted.

    Examples:
      >>> import jax.numpy as jnp
      >>> from zclip_jax import group_names
      >>> params = {"blocks": jnp.ones((2, 3)), "head": jnp.ones(3)}
      >>> group_names(params, stacked=lambda path: path[0].key == "blocks")
      ('blocks[0]', 'blocks[1]', 'head')
    """
    check_granularity(granularity, stacked)
    return find_groups(params, granularity, stacked).names
