"""Which leaves of the gradients share a norm."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._norm import is_gradient
from zclip_jax._typing import PyTree

Granularity = str | Callable[[Any], Any]
Stacked = Callable[[Any], bool] | None


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of a tree.

    Args:
      names: one for each group, in the order of the arrays in state and metrics.
      slots: for each leaf of the tree int `[]`, the place of its group in that order, or int `[layers]` for the
        groups of a stacked leaf; None for a leaf that is no gradient.
    """

    names: tuple[str, ...]
    slots: tuple[np.ndarray | None, ...]


def check_granularity(granularity: Granularity, stacked: Stacked) -> None:
    """Raises ValueError for arguments of `find_groups` that are not accepted."""
    if granularity not in ("global", "leaf") and not callable(granularity):
        raise ValueError(
            f"granularity must be 'global', 'leaf' or a function of a leaf's key path, got {granularity!r}"
        )
    if stacked is not None and (not callable(stacked) or granularity == "global"):
        raise ValueError(
            f"stacked must be a function of a leaf's key path, beside a granularity other than 'global'; got "
            f"stacked={stacked!r} with granularity={granularity!r}"
        )


def find_groups(tree: PyTree, granularity: Granularity, stacked: Stacked = None) -> Groups | None:
    """The groups of `tree`; None for the one group of `"global"`."""
    if granularity == "global":
        return None
    places: dict[str, int] = {}
    slots: list[np.ndarray | None] = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not is_gradient(x):
            slots.append(None)
            continue
        label = granularity(path) if callable(granularity) else leaf_name(path)
        if stacked is not None and stacked(path):
            if jnp.ndim(x) == 0:
                raise ValueError(f"stacked names {leaf_name(path)}, a scalar without an axis of layers")
            names = [f"{label}[{i}]" for i in range(jnp.shape(x)[0])]
            slots.append(np.array([places.setdefault(name, len(places)) for name in names], np.int32))
        else:
            slots.append(np.array(places.setdefault(str(label), len(places)), np.int32))
    return Groups(names=tuple(places), slots=tuple(slots))


def leaf_name(path: Any) -> str:
    """A key path as `"blocks/attention/wq"`."""
    # Of a variable of flax's NNX the array is an attribute.
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


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
    groups = find_groups(params, granularity, stacked)
    return ("global",) if groups is None else groups.names
