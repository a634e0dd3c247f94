"""What a replay says about a run and a rule, as plain numbers that JSON can hold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zclip_jax.replay._flags import find_flags
from zclip_jax.replay._outliers import OUTLIER, Hindsight, is_finite, look_back, spike_score
from zclip_jax.replay._replay import Replay, replay, sweep
from zclip_jax.replay._specs import Spec
from zclip_jax.replay._warm_up import examine
from zclip_jax.replay.readers import Recording

LARGEST = 10  # spikes listed


def make_report(recording: Recording, specs: Sequence[Spec]) -> tuple[dict[str, Any], dict[str, Replay]]:
    """What there is to say of a run under some rules, and the replays by their labels.

    The flags are about the first rule; of rules that are the same the first is kept.
    """
    distinct: dict[Any, Spec] = {}
    for spec in specs:
        distinct.setdefault((spec.name, frozenset(spec.settings.items())), spec)
    specs, value = list(distinct.values()), losses(recording)
    results = {spec.label: jax.device_get(replay(spec.rule, recording.norms, value=value)) for spec in specs}
    hindsight, first = look_back(recording.norms), specs[0]
    rules = [describe_rule(spec, recording, hindsight, results[spec.label]) for spec in specs]
    report = {
        "log": describe_log(recording, hindsight),
        "rules": rules,
        "flags": find_flags(first, recording, hindsight, results[first.label], rules[0]),
    }
    return report, results


def losses(recording: Recording) -> np.ndarray | None:
    """The losses, if each finite norm has one: a rule would take a missing one for a spike."""
    if recording.loss is None or np.isnan(recording.loss[np.isfinite(recording.norms)]).any():
        return None
    return recording.loss


def describe_log(recording: Recording, hindsight: Hindsight) -> dict[str, Any]:
    """The recorded run: its length, level and oddities."""
    finite = recording.norms[is_finite(recording.norms)]
    return to_json(
        {
            "name": recording.name,
            "format": recording.format,
            "column": recording.column,
            "num_norms": recording.norms.size,
            "first_step": recording.steps[0],
            "last_step": recording.steps[-1],
            "cadence": recording.cadence,
            "num_nonfinite": recording.norms.size - finite.size,
            "median": np.median(finite) if finite.size else None,
            "max": np.max(finite) if finite.size else None,
            "num_outliers": np.sum(hindsight.outlier),
            "num_falling": np.sum((hindsight.ratio > OUTLIER) & ~hindsight.outlier),
            "spike_score": spike_score(recording.norms),
            "loss_spike_score": None if recording.loss is None else spike_score(recording.loss),
            "notes": recording.notes,
        }
    )


def describe_rule(spec: Spec, recording: Recording, hindsight: Hindsight, replayed: Replay) -> dict[str, Any]:
    """How one rule would have acted on the run, and how that agrees with hindsight."""
    (row,) = describe_settings([spec.settings], recording, hindsight, replayed)
    scale = np.asarray(replayed.outcomes.clip_scale)
    scaled = scale[(scale < 1) & ~np.asarray(replayed.outcomes.nonfinite)]
    return {
        "rule": spec.label,
        **row,
        "num_scaled": scaled.size,
        "median_scale": float(np.median(scaled)) if scaled.size else None,
        "least_scale": float(np.min(scaled)) if scaled.size else None,
        "warm_up": to_json(examine(spec, recording, hindsight, replayed)._asdict()),
        "largest_spikes": largest_spikes(recording, hindsight, replayed),
    }


def describe_sweep(
    recording: Recording, spec: Spec, grid: Mapping[str, Sequence[int | float]]
) -> list[dict[str, Any]]:
    """How a rule would have acted with each combination of settings."""
    settings, swept = sweep(spec.factory(), recording.norms, value=losses(recording), **grid)
    return describe_settings(settings, recording, look_back(recording.norms), swept)


def describe_settings(
    settings: Sequence[Mapping[str, Any]], recording: Recording, hindsight: Hindsight, replayed: Replay
) -> list[dict[str, Any]]:
    """The same without the spikes for each setting of a sweep."""
    measured = replayed.summary | hindsight.score(np.asarray(replayed.outcomes.fired))
    columns = {name: np.broadcast_to(x, len(settings)) for name, x in measured.items()}
    rows = [{name: x[i] for name, x in columns.items()} for i in range(len(settings))]
    for row in rows:
        locked = row["locked_in_from"]
        row["locked_in_from"] = None if locked < 0 else recording.steps[locked]
    return [to_json({"settings": setting, **row}) for setting, row in zip(settings, rows, strict=True)]


def largest_spikes(recording: Recording, hindsight: Hindsight, replayed: Replay) -> list[dict[str, Any]]:
    """The steps furthest above their local median, of those that fired or are outliers."""
    fired = np.asarray(replayed.outcomes.fired)
    columns = {
        "step": recording.steps,
        "row": np.arange(recording.steps.size),
        "norm": recording.norms,
        "local_median": hindsight.median,
        "ratio": hindsight.ratio,
        "allowed": np.asarray(replayed.outcomes.threshold),
        "clip_scale": np.asarray(replayed.outcomes.clip_scale),
        "fired": fired,
    }
    rows = np.flatnonzero(fired | hindsight.outlier)
    rows = rows[np.argsort(-hindsight.ratio[rows], kind="stable")][:LARGEST]
    return [to_json({name: x[row] for name, x in columns.items()}) for row in rows]


def to_json(x: Any) -> Any:
    """`x` with NumPy's numbers as Python's, and None for those that JSON has no word for."""
    if isinstance(x, Mapping):
        return {key: to_json(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [to_json(value) for value in x]
    if isinstance(x, np.generic):
        x = x.item()
    return None if isinstance(x, float) and not math.isfinite(x) else x
