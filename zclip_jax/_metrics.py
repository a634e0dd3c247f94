"""`metrics`: the numbers of every clip state inside an optimizer state."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zclip_jax._clip import TOTALS, ClipState
from zclip_jax._rule import Outcome

FIELDS = {field.name for field in dataclasses.fields(ClipState)}
OUTCOME = tuple(field.name for field in dataclasses.fields(Outcome))
RATES = ("fired", "bound", "capped")


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Reads the last decision and the totals out of an optimizer state.

    Works on the device arrays as they are: inside or outside `jit`, and without waiting for the device.

    Args:
      opt_state: an optimizer state that holds one clip state or several, at any depth (`optax.chain`,
        `named_chain`, `partition`, `MultiSteps`, `inject_hyperparams`, `masked`, …), or an object that
        holds such a state: a flax `TrainState`, an `nnx.Optimizer`, its `opt_state` or its `nnx.state`.

    Returns:
      Scalars under `"zclip/<name>"`: the fields of `Outcome` (`grad_norm` is the norm *before* clipping),
      the totals of `ClipState`, and `fired_rate`, `bound_rate`, `capped_rate`, each a total over
      `num_steps`. With several clip states the key holds the path, `"zclip/<path>/<name>"`.

    Raises:
      ValueError: there is no clip state in `opt_state`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from zclip_jax import metrics, zclip
      >>> tx = optax.chain(zclip(), optax.adam(1e-3))
      >>> params = jnp.zeros(2)
      >>> _, opt_state = tx.update(jnp.asarray([6.0, 8.0]), tx.init(params), params)
      >>> logged = metrics(opt_state)
      >>> float(logged["zclip/grad_norm"]), float(logged["zclip/threshold"])
      (10.0, 1.0)
      >>> float(logged["zclip/fired_rate"]), float(logged["zclip/capped_rate"])
      (0.0, 1.0)
    """
    # An optimizer that is no pytree, such as the nnx.Optimizer of older flax, holds its state as `opt_state`.
    found = _clip_states(opt_state) or _clip_states(getattr(opt_state, "opt_state", None))
    if not found:
        raise ValueError(
            f"no clip state in this {type(opt_state).__name__}: put zclip() or clip_by_rule(...) into the "
            "optimizer's chain, and pass the state that its init or update returned"
        )
    if len(found) == 1:
        return _read(found[0][1], "zclip")
    return {key: x for path, node in found for key, x in _read(node, f"zclip/{_path_name(path)}").items()}


def _clip_states(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_clip_state)
    return [(path, node) for path, node in leaves if _is_clip_state(node)]


def _is_clip_state(node):
    # A ClipState is a mapping of its fields, and so is what `nnx.state` makes of one.
    return isinstance(node, Mapping) and set(node) >= FIELDS


def _path_name(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _read(state, prefix):
    values = {name: state["last"][name] for name in OUTCOME}
    values |= {name: state[name] for name in TOTALS}
    # An nnx.Optimizer wraps each array into a variable, itself a pytree of one leaf.
    values = {name: jax.tree.leaves(x)[0] for name, x in values.items()}
    steps = jnp.maximum(values["num_steps"], 1)
    for name in RATES:
        values[f"{name}_rate"] = values[f"num_{name}"] / steps
    return {f"{prefix}/{name}": x for name, x in values.items()}
