"""Carries optimizer state from one chain into another."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._typing import PyTree
from zclip_jax._units import Unit, check_tree, check_types, find_units, match, path_name, same, undo


class TransplantReport(NamedTuple):
    """What `transplant` did; paths and state names, one string each.

    Each state of the new chain is in `carried` or in `fresh`, each of the old in `carried` or in `dropped`, alone
    or as part of one around it.

    Args:
      carried: states of the new chain that took over those of the old, and what is not certain about it.
      fresh: states of the new chain that stay as `init` made them, and why.
      dropped: states of the old chain that nothing took over.
    """

    carried: tuple[str, ...]
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]


def transplant(old_opt_state: PyTree, new_opt_state: PyTree) -> tuple[PyTree, TransplantReport]:
    """Moves what fits of an optimizer state into that of another chain.

    For a run that is resumed with `zclip()` where it had none before, without it, or with other settings: Adam's
    moments, counts and schedules go on. A state of the new chain takes the first state of the same type and the
    same arrays that the old chain still has, whole or not at all; what is inside of a wrapper such as `MultiSteps`
    finds its own way. Numbers kept in a state, such as those of `optax.inject_hyperparams`, are carried too.

    The statistics of a rule go on where the new rule keeps the same, inside other rules too. Where its numbers
    have become schedules, these begin at the number of norms seen so far. Another rule begins afresh, and only the
    totals of its `ClipState` are carried. Statistics of groups go to as many groups, in the same order: a state
    does not hold their names, and the report says so. Those of a `watch` go only to the same groups, by name.

    Arrays, dicts and tuples without a type of their own, as states of transformations, are carried by their
    shapes; not where these leave a choice.

    Args:
      old_opt_state: the state to carry from, restored into the structure of the old chain; an `nnx.Optimizer` or
        its `opt_state` too, but not what `nnx.state` gives, which has no types.
      new_opt_state: the state to carry into, from the new chain's `init`; or a new `nnx.Optimizer`.

    Returns:
      The new state, of the structure, shapes and dtypes of `new_opt_state`, and a `TransplantReport`.

    Raises:
      ValueError: one of the two is no optimizer state, or has lost the types of the states in it.

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
    check_tree("old_opt_state", old_opt_state)
    check_tree("new_opt_state", new_opt_state)
    old_units, new_units = list(find_units(old_opt_state)), list(find_units(new_opt_state))
    check_types("old_opt_state", old_opt_state, new_units)
    check_types("new_opt_state", new_opt_state, old_units)
    outside = (
        [x for x in units if x.around is None or not x.around.is_clip] for units in (old_units, new_units)
    )
    match(*outside)
    leaves, structure = jax.tree_util.tree_flatten_with_path(new_opt_state)
    values = dict(leaves)
    for new in new_units:
        if new.is_clip and new.partner is not None and not new.covered:
            match(new.partner.inside, new.inside)
            if not _same_rule(new):
                undo(new.inside)
    for new in new_units:
        if new.partner is not None:
            values |= {new.path + key: x for key, x in new.partner.own.items()}
        elif (clip := _schedule_in(new)) is not None:
            values |= {new.path + key: _norms_seen(clip) for key in new.own}

    held: set[int] = set()
    for path, like in leaves:
        x = values[path] if values[path] is like else _as(values[path], like)
        # One buffer in two places could not be donated.
        values[path] = x.copy() if id(x) in held and hasattr(x, "copy") else x
        held.add(id(x))
    return structure.unflatten(values.values()), _report(old_units, new_units)


def _as(x: Any, like: Any) -> Any:
    dtype = getattr(like, "dtype", jnp.result_type(like))
    return x if isinstance(x, jax.Array) and x.dtype == dtype else np.asarray(x, dtype)


def _same_rule(clip: Unit) -> bool:
    """Whether a matched clip state goes on with some of the old statistics, or neither has any."""
    rules = (clip.inside, clip.partner.inside if clip.partner is not None else [])
    new, old = ([unit for unit in rule if not unit.is_schedule] for rule in rules)
    return any(unit.partner is not None for unit in new) or not (new or old)


def _schedule_in(new: Unit) -> Unit | None:
    """The old clip state, if `new` is a schedule that its rule had not and the rule goes on."""
    clip = new.around if new.is_schedule else None
    return clip.partner if clip is not None and clip.partner is not None and _same_rule(clip) else None


def _norms_seen(clip: Unit) -> Any:
    """The norms that the rule has seen: as its schedules count, or else as it or the totals do, whichever is more."""
    in_rule = [(path_name(key[:1]), x) for unit in clip.inside for key, x in unit.own.items()]
    scheduled = [x for name, x in in_rule if name == "num_updates"]
    if scheduled:
        return scheduled[0]
    totals = {path_name(key[:1]): x for key, x in clip.own.items()}
    absorbed = [x for name, x in in_rule if name == "num_norms"]
    return functools.reduce(jnp.maximum, absorbed, totals["num_steps"] - totals["num_nonfinite"])


def _report(old_units: list[Unit], new_units: list[Unit]) -> TransplantReport:
    for unit in (*old_units, *new_units):
        if unit.partner is None and not unit.typed and any(item.partner is not None for item in unit.inside):
            unit.covered = True  # a plain tuple or dict of which each item has a line
        elif unit.partner is None and (unit.is_clip or not unit.typed):
            for part in unit.inside:
                part.covered = True
    carried, fresh = [], []
    for new in new_units:
        anew = new.is_clip and new.partner is not None and new.inside and not _same_rule(new)
        for part in new.inside if anew else ():
            part.covered = True
        if new.covered:
            continue
        if anew:
            kept = "histories and totals" if new.group_ids else "totals"
            fresh.append(f"{new.name}: the old one has other statistics, only its {kept} are carried")
        elif new.partner is not None:
            carried.append(", ".join([new.name, *_doubts(new)]))
        elif _schedule_in(new) is not None:
            carried.append(f"{new.name}, at the norms seen so far")
        else:
            fresh.append(f"{new.name}: {_why(new, old_units)}")
    dropped = (old.name for old in old_units if old.partner is None and not old.covered)
    return TransplantReport(tuple(carried), tuple(fresh), tuple(dropped))


def _why(new: Unit, old_units: list[Unit]) -> str:
    clip = new.around.partner if new.around is not None else None
    where, there = ("chain", old_units) if clip is None else ("rule", clip.inside)
    alike = [old for old in there if old.kind == new.kind]
    left = [old for old in alike if old.partner in (None, new)]
    if not left:
        return f"the old {where} has none{' left' if alike else ''}"
    if not new.typed and any(same(new, old) for old in left):
        return "not certain which of the old ones it is"
    return f"the old one holds other {'groups' if new.group_ids and new.is_clip else 'arrays'}"


def _doubts(new: Unit) -> Iterator[str]:
    parts = [new, *(part for part in new.inside if part.covered)]
    if not all(part.typed for part in parts):
        yield "by its shape, since it has no type"
    if groups := [
        n
        for part in parts
        if part.is_clip and not part.group_ids
        for n in jnp.shape(next(iter(part.own.values())))
    ]:
        yield f"provided that its {groups[0]} groups are those of the old chain"
    if any(path_name(key).startswith("hyperparams") for part in parts for key in part.own):
        yield "with the old hyperparameters"
