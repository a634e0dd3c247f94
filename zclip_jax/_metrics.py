"""`metrics`: the numbers of every clip state and watch inside an optimizer state."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zclip_jax._rule import Outcome
from zclip_jax._skip import SkipState
from zclip_jax._state import TOTALS, ClipState
from zclip_jax._watch_state import LAST, MOMENT, WatchState

CLIP = {field.name for field in dataclasses.fields(ClipState)}
SKIP = {field.name for field in dataclasses.fields(SkipState)}
WATCH = {field.name for field in dataclasses.fields(WatchState)}
SKIPPED = ("num_skipped", "skip_run", "longest_skip_run", "alarm")
OUTCOME = tuple(field.name for field in dataclasses.fields(Outcome))
RATES = ("fired", "bound", "capped")
WATCHED = ("num_steps", "num_fired", "num_nonfinite")
RATIOS = ("ratio", "ratio_rise", "ratio_group", "ratio_group_rise")


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
      `num_steps`; of `skip_by_rule` also `num_skipped`, `skip_run`, `longest_skip_run` and `alarm`. With several
      clip states the key holds the path, `"zclip/<path>/<name>"`. With a granularity other than `"global"` the
      values are arrays `[groups]` in the order of `group_names`.

      Of `watch` under `"watch/grads/<name>"` or `"watch/updates/<name>"`, with several of a kind
      `"watch/grads/<path>/<name>"`: of the last step `norm`, its `level`, what was `allowed`, `trigger`, `fired`,
      `nonfinite` and `num_nonfinite_groups`; `share_group`, an index into `group_names`, with `share` and
      `share_norm`; `rise_group`, furthest above its own history, with `rise` (a multiple of its level),
      `rise_norm` and `rise_z`; on updates `ratio`, `ratio_rise`, `ratio_group` and `ratio_group_rise`; the totals
      `num_steps`, `num_fired` and `num_nonfinite`; and the arrays `norms` and `nonfinite_groups`.

    Raises:
      ValueError: there is no clip state and no watch in `opt_state`.

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
    found = find_states(opt_state)
    if not found:
        raise ValueError(
            f"no clip state in this {type(opt_state).__name__}, nor a watch: put zclip(), clip_by_rule(...) or "
            "watch(...) into the optimizer's chain, and pass the state that its init or update returned"
        )
    return {
        f"{prefix}/{name}": x
        for prefix, node in name_states(found)
        for name, x in (read_watch(node) if prefix.startswith("watch/") else _read(node)).items()
    }


def find_states(opt_state: Any) -> list[tuple[Any, Any]]:
    """Paths and nodes of all clip states, skip states and watches in an optimizer state or an optimizer."""
    # An optimizer that is no pytree, such as the nnx.Optimizer of older flax, holds its state as `opt_state`.
    return _find(opt_state) or _find(getattr(opt_state, "opt_state", None))


def name_states(found: list[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    """The states with the prefix of their metrics: `zclip`, `watch/grads` or `watch/updates`, and where one is."""
    kinds: dict[str, list[tuple[Any, Any]]] = {}
    for path, node in found:
        kinds.setdefault(f"watch/{_watched(node)}" if _is(node, WATCH) else "zclip", []).append((path, node))
    # The way from an optimizer to its one state tells nothing.
    shared = all(_path_name(path[:1]) == "opt_state" for path, _ in found)
    named = []
    for kind, states in kinds.items():
        if len(states) == 1:
            named.append((kind, states[0][1]))
            continue
        paths = [path[1:] if shared else path for path, _ in states]
        names = [_path_name(path) for path in paths]
        if len(set(names)) < len(names):  # as of "x/y" and of "y" in "x"
            names = [jax.tree_util.keystr(path) for path in paths]
        named += [
            (f"{kind}/{name}" if name else kind, node) for name, (_, node) in zip(names, states, strict=True)
        ]
    return named


def _find(tree, prefix=()):
    """Paths and nodes of all states, those inside a skip state too."""
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: any(_is(x, fields) for fields in (CLIP, SKIP, WATCH))
    )
    for path, node in leaves:
        path = (*prefix, *path)
        if _is(node, SKIP):
            found.append((path, node))
            found += _find(node["inner_state"], (*path, jax.tree_util.GetAttrKey("inner_state")))
        elif _is(node, CLIP) or _is(node, WATCH):
            found.append((path, node))
    return found


def _is(node, fields):
    # A state is a mapping of its fields, and so is what `nnx.state` makes of one.
    return isinstance(node, Mapping) and set(node) >= fields


def _path_name(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _array(x):
    # An nnx.Optimizer wraps each array into a variable, itself a pytree of one leaf.
    return jax.tree.leaves(x)[0]


def _read(state):
    values = {}
    if _is(state, SKIP):
        values |= {name: state[name] for name in SKIPPED}
        state = state["clip_state"]
    values |= {name: state["last"][name] for name in OUTCOME}
    values |= {name: state[name] for name in TOTALS}
    values = {name: _array(x) for name, x in values.items()}
    rates = _rates(values["num_steps"], {name: values[f"num_{name}"] for name in RATES})
    return values | {f"{name}_rate": rate for name, rate in rates.items()}


def _watched(state):
    """What a watch stands behind; on updates it has the histories of the ratios as well."""
    num_groups, num_norms = (_array(x).shape[-1] for x in (state["norms"], state["history"]["num_seen"]))
    return "grads" if num_norms == num_groups + 1 else "updates"


def read_watch(state: Any, moment: int = LAST) -> dict[str, jax.Array]:
    """Of a watch: what one of the steps of `Moments` showed, the totals, and the arrays of the last step."""
    skipped = ("step", *(RATIOS if _watched(state) == "grads" else ()))
    moments = {name: _array(state["moments"][name]) for name in MOMENT if name not in skipped}
    values, arrays = _at(moments, _array(state["norms"]), moment)
    return values | {name: _array(state[name]) for name in WATCHED} | arrays


@functools.partial(jax.jit, static_argnums=2)
def _at(moments, norms, moment):
    values = {name: x[..., moment] for name, x in moments.items()}
    return values, {"norms": norms, "nonfinite_groups": ~jnp.isfinite(norms)}


@jax.jit  # whose constants are on the device already: a transfer of them may be forbidden
def _rates(num_steps, totals):
    return {name: total / jnp.maximum(num_steps, 1) for name, total in totals.items()}
