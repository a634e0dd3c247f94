"""What a watch saw, as plain data with the names of the groups: for logs, files and people."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zclip_jax._groups import Granularity, Stacked, group_names
from zclip_jax._metrics import find_states, name_states
from zclip_jax._typing import PyTree
from zclip_jax._watch_state import LARGEST_SPIKE, LAST_NONFINITE, LAST_SPIKE, name_id

MOST_NAMES = 8
# A group is named in the line for its rise from so many standard deviations, or times its own level, on.
ORDINARY = 3.0


class SpikeRecord(dict):
    """A spike or a non-finite step, as plain data that `json.dumps` takes; `str` makes a line of it.

    Numbers that are not finite are the strings `"nan"`, `"inf"` and `"-inf"`; a number that does not exist is None.

    Keys: `watch` (`"grads"` or `"updates"`, with the path behind it where there are several), `kind` (`"spike"` or
    `"nonfinite"`), `step` (updates up to this one, itself included), `norm` of all groups, its `level` before,
    `times_level` (`norm` over `level`), what the rule of the watch `allowed`, which is not what a
    clip behind it did; `share` with the `group` that has the largest part
    of the squared norm, its `share` and `norm`; `rise` with the group furthest above its own history, its `norm`,
    `times_level` and `z_score`, or None where no group has a history; `num_groups`, `num_nonfinite`, and
    `nonfinite`, the names of the groups that were NaN or infinite. On updates also `ratio`, the RMS of updates
    over that of the weights, `ratio_rise`, a multiple of its own level, and `ratio_group` with the `group` whose
    ratio is furthest above its own history, and `times_level`.
    """

    def __str__(self) -> str:
        where = "" if self["watch"] == "grads" else f" ({self['watch']})"
        head = f"step {self['step']}{where}: norm {_short(self['norm'])}"
        if self["times_level"] is not None:
            head += f", {_times(self['times_level'])} its level"
        if self["kind"] == "spike" and not isinstance(self["allowed"], str):
            head += f", allowed {_short(self['allowed'])}"
        parts = [head]
        if self["kind"] == "nonfinite":
            parts.append(self._nonfinite())
        parts += self._groups()
        if self["kind"] == "spike" and self.get("ratio_rise"):
            parts.append(
                f"updates {_short(self['ratio'])} of the weights, {_times(self['ratio_rise'])} their level"
            )
        return " · ".join(parts)

    def _groups(self) -> list[str]:
        share, rise = self["share"], self["rise"]
        if rise is not None and max(float(rise["z_score"]), float(rise["times_level"])) < ORDINARY:
            rise = None  # what spiked may have no history: an ordinary group would be named in its place
        if self["kind"] == "nonfinite" and rise is None:
            return []
        parts = []
        if share is not None:
            of = "it" if self["kind"] == "spike" else "what is finite"
            parts.append(f"{share['group']}: {_percent(share['share'])} of {of}")
        if rise is not None:
            own = f"{_times(rise['times_level'])} its own level"
            if share is not None and share["group"] == rise["group"]:
                parts[-1] += f", {own}"
            else:
                parts.append(f"{rise['group']}: {own}")
        return parts

    def _nonfinite(self) -> str:
        names, number = self["nonfinite"], self["num_nonfinite"]
        if number == 0:
            return f"all {self['num_groups']} groups finite: the sum of their squares overflows"
        listed = ", ".join(names[:MOST_NAMES])
        more = f" and {number - MOST_NAMES} more" if number > MOST_NAMES else ""
        return f"{number} of {self['num_groups']} groups not finite: {listed}{more}"


def step_record(values: Mapping[str, Any], names: Sequence[str], what: str = "grads") -> SpikeRecord | None:
    """The record of one step, from its metrics, if it was a spike or not finite.

    For loops that fetch the metrics of each step. `spikes` reads records out of the optimizer state.

    Args:
      values: what `metrics` returned after that step, with others beside it; on the device or the host.
      names: of the groups, as `group_names` gives them for the same granularity.
      what: which watch: `"grads"` or `"updates"`; with several the path behind it, as in the metrics.

    Returns:
      A `SpikeRecord`, or None if the step neither fired nor was non-finite.

    Raises:
      ValueError: `values` has no metrics of that watch, or of another number of groups.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from zclip_jax import group_names, metrics, step_record, watch
      >>> tx, params = watch("grads"), {"a": jnp.ones(2), "b": jnp.ones(1)}
      >>> state = tx.init(params)
      >>> for size in [1.0, 1.0, 1.0, 40.0]:
      ...     _, state = tx.update({"a": jnp.asarray([3.0, 4.0]), "b": jnp.asarray([size])}, state)
      >>> print(step_record(metrics(state), group_names(params)))
      step 4: norm 40.3, 7.9x its level, allowed 5.65 · b: 98 % of it, 40x its own level
    """
    prefix = f"watch/{what}/"
    found = {key.removeprefix(prefix): x for key, x in values.items() if key.startswith(prefix)}
    if "fired" not in found:
        known = ", ".join(sorted({key.rpartition("/")[0] for key in values if key.startswith("watch/")}))
        raise ValueError(
            f"what must name a watch whose metrics are in values, got {what!r}; values has {known or 'none'}"
        )
    if np.ndim(found["fired"]):
        raise ValueError(
            f"values must be of one step of one run, got a watch on {what} of shape {np.shape(found['fired'])}"
        )
    if not (bool(found["fired"]) or bool(found["nonfinite"])):
        return None
    if "nonfinite_groups" not in found:
        raise ValueError(
            f"values must have {prefix}nonfinite_groups beside the scalars, got {', '.join(values)}"
        )
    found = {name: np.asarray(float(x) if isinstance(x, str) else x) for name, x in found.items()}
    if found["nonfinite_groups"].shape != (len(names),):
        raise ValueError(
            f"names must be those of the {found['nonfinite_groups'].size} groups of this watch, got {len(names)}: "
            "group_names takes the granularity and stacked that watch was given"
        )
    return _record(what, found, int(found["num_steps"]), names, found["nonfinite_groups"])


def spikes(
    opt_state: PyTree, params: PyTree, *, granularity: Granularity = "leaf", stacked: Stacked = None
) -> list[SpikeRecord]:
    """What the watches in an optimizer state remember: of each the last spike, the largest, the last non-finite step.

    Fetches the state from the device, so call it now and then and not on every step.

    Args:
      opt_state: as `metrics` takes it.
      params: the parameters of the whole optimizer, for the names of the groups.
      granularity: as in `watch`.
      stacked: as in `watch`.

    Returns:
      Records in the order of their steps, each step once for each watch; none where nothing happened.

    Raises:
      ValueError: there is no watch in `opt_state`, or its groups are not among those of `params`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from zclip_jax import spikes, watch
      >>> tx, params = optax.chain(watch("grads"), optax.sgd(1.0)), {"a": jnp.ones(2), "b": jnp.ones(1)}
      >>> state = tx.init(params)
      >>> for size in [1.0, 1.0, 1.0, jnp.nan]:
      ...     _, state = tx.update({"a": jnp.asarray([3.0, 4.0]), "b": jnp.asarray([size])}, state)
      >>> print(*spikes(state, params))
      step 4: norm nan · 1 of 2 groups not finite: b
    """
    watches = [x for x in name_states(find_states(opt_state)) if x[0].startswith("watch/")]
    if not watches:
        raise ValueError(
            f"no watch in this {type(opt_state).__name__}: put watch(...) into the optimizer's chain, and pass the "
            "state that its init or update returned"
        )
    names = dict.fromkeys(
        (*group_names(params, granularity, stacked), *group_names(params), "global", "none")
    )
    records = []
    for prefix, node in watches:
        what = prefix.removeprefix("watch/")
        # An nnx.Optimizer wraps each array into a variable.
        ids, bad, moments = jax.device_get(
            jax.tree.map(
                lambda x: jax.tree.leaves(x)[0],
                [node["group_ids"], node["nonfinite_groups"], dict(node["moments"])],
                is_leaf=lambda x: len(jax.tree.leaves(x)) == 1,
            )
        )
        own = _names_of(ids, tuple(names), what)
        of_ratios = what.startswith("updates")
        steps = {}
        for moment in (LAST_SPIKE, LARGEST_SPIKE, LAST_NONFINITE):
            found = {name: x[moment] for name, x in moments.items() if of_ratios or "ratio" not in name}
            mask = bad if moment == LAST_NONFINITE else np.zeros_like(bad)
            if found["step"] > 0:
                steps[int(found["step"])] = _record(what, found, int(found["step"]), own, mask)
        records += steps.values()
    return sorted(records, key=lambda record: record["step"])


def _names_of(ids: np.ndarray, names: tuple[str, ...], what: str) -> tuple[str, ...]:
    """The names with these checksums."""
    if ids.ndim != 1:
        raise ValueError(
            f"opt_state must be that of one device and one run, got a watch on {what} of shape {ids.shape[:-1]}"
        )
    by_id: dict[int, list[str]] = {}
    for name in names:
        by_id.setdefault(name_id(name), []).append(name)
    found = [by_id.get(int(i), []) for i in ids]
    if any(len(candidates) != 1 for candidates in found):
        missing = sum(not candidates for candidates in found)
        raise ValueError(
            f"params must be those that the watch on {what} saw, with its granularity and stacked: {missing} of its "
            f"{len(ids)} groups are not among {', '.join(names[:4])}, …"
        )
    return tuple(candidates[0] for candidates in found)


def _record(
    what: str, values: Mapping[str, Any], step: int, names: Sequence[str], bad: np.ndarray
) -> SpikeRecord:
    norm, level = float(values["norm"]), float(values["level"])
    share, rise = float(values["share"]), float(values["rise"])
    record = SpikeRecord(
        watch=what,
        kind="spike" if bool(values["fired"]) else "nonfinite",
        step=step,
        norm=_plain(values["norm"]),
        level=_plain(values["level"]),
        times_level=_plain(np.float32(norm / level)) if level > 0 and math.isfinite(norm) else None,
        allowed=_plain(values["allowed"]),
        share={
            "group": names[int(values["share_group"])],
            "share": _plain(values["share"]),
            "norm": _plain(values["share_norm"]),
        }
        if share > 0
        else None,
        rise={
            "group": names[int(values["rise_group"])],
            "norm": _plain(values["rise_norm"]),
            "times_level": _plain(values["rise"]),
            "z_score": _plain(values["rise_z"]),
        }
        if rise > 0
        else None,
        num_groups=len(names),
        num_nonfinite=int(values["num_nonfinite_groups"]),
        nonfinite=[name for name, is_bad in zip(names, bad, strict=True) if is_bad],
    )
    if "ratio" in values:
        group_rise = float(values["ratio_group_rise"])
        record["ratio"] = _plain(values["ratio"])
        record["ratio_rise"] = _plain(values["ratio_rise"]) if float(values["ratio_rise"]) > 0 else None
        record["ratio_group"] = (
            {"group": names[int(values["ratio_group"])], "times_level": _plain(values["ratio_group_rise"])}
            if group_rise > 0
            else None
        )
    return record


def _plain(x: Any) -> float | str:
    """`x` as a float of its own precision's digits, or the word for it."""
    return float(str(np.asarray(x))) if np.isfinite(x) else str(float(x))


def _short(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.3g}"


def _times(x: float | str) -> str:
    return f"{x}x" if isinstance(x, str) else f"{x:.0f}x" if 9.95 <= x < 1e6 else f"{x:.2g}x"


def _percent(share: float | str) -> str:
    return f"{100 * float(share):.0f} %"
