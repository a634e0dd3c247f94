"""What a replay says about a run and a rule, as plain numbers that JSON can hold."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zclip_jax._spike_score import spike_score as olmo_core_spike_score
from zclip_jax.replay._flags import find_flags
from zclip_jax.replay._json import to_json
from zclip_jax.replay._outliers import OUTLIER, Hindsight, is_finite, look_back, spike_score
from zclip_jax.replay._replay import Replay, compile_sweep
from zclip_jax.replay._runs import decide_runs, joined, replay_runs
from zclip_jax.replay._specs import Spec
from zclip_jax.replay._totals import LARGEST, add_rows, add_up, describe_scales
from zclip_jax.replay._warm_up import examine
from zclip_jax.replay.readers import Recording


def make_report(recording: Recording, specs: Sequence[Spec]) -> tuple[dict[str, Any], dict[str, Replay]]:
    """What there is to say of a log under some rules, and the replays by their labels, of all runs in a row.

    The flags are about the first rule; of rules that are the same the first is kept. `runs` holds a report on each
    run, and what stands beside it their sums; of a single run both are the same.
    """
    distinct: dict[Any, Spec] = {}
    for spec in specs:
        distinct.setdefault((spec.name, frozenset(spec.settings.items())), spec)
    specs, runs = list(distinct.values()), recording.runs
    replays = [replay_runs(spec.rule, runs) for spec in specs]
    parts = [report_run(run, specs, its) for run, its in zip(runs, zip(*replays, strict=True), strict=True)]
    results = {spec.label: joined(its) for spec, its in zip(specs, replays, strict=True)}
    whole = parts[0] if len(parts) == 1 else add_up(recording, parts, list(results.values()))
    return whole | {"runs": parts}, results


def report_run(run: Recording, specs: Sequence[Spec], replays: Sequence[Replay]) -> dict[str, Any]:
    """What there is to say of one run, whose replay with each rule is given."""
    hindsight = look_back(run.norms)
    rules = [describe_rule(spec, run, hindsight, its) for spec, its in zip(specs, replays, strict=True)]
    return {
        "log": describe_log(run, hindsight),
        "rules": rules,
        "flags": find_flags(specs[0], run, hindsight, replays[0], rules[0]),
    }


def describe_log(run: Recording, hindsight: Hindsight) -> dict[str, Any]:
    """A recorded run: its length, level and oddities."""
    finite = run.norms[is_finite(run.norms)]
    both = olmo_core_spike_score(*([run.norms] if run.loss is None else [run.norms, run.loss]))
    return to_json(
        {
            "name": run.name,
            "format": run.format,
            "column": run.column,
            "num_norms": run.norms.size,
            "first_step": run.steps[0],
            "last_step": run.steps[-1],
            "cadence": run.cadence,
            "num_nonfinite": run.norms.size - finite.size,
            "median": np.median(finite) if finite.size else None,
            "max": np.max(finite) if finite.size else None,
            "num_outliers": np.sum(hindsight.outlier),
            "num_falling": np.sum((hindsight.ratio > OUTLIER) & ~hindsight.outlier),
            "spike_score": spike_score(run.norms),
            "loss_spike_score": None if run.loss is None else spike_score(run.loss),
            "olmo_core_spike_score": both.total,
            "olmo_core_spike_score_last": both.last,
            "notes": run.notes,
        }
    )


def describe_rule(spec: Spec, run: Recording, hindsight: Hindsight, replayed: Replay) -> dict[str, Any]:
    """How one rule would have acted on a run, and how that agrees with hindsight."""
    (row,) = describe_settings([spec.settings], run, hindsight, replayed)
    return {
        "rule": spec.label,
        **row,
        **describe_scales(replayed),
        "warm_up": to_json(examine(spec, run, hindsight, replayed)._asdict()),
        "largest_spikes": largest_spikes(run, hindsight, replayed),
    }


def describe_settings(
    settings: Sequence[Mapping[str, Any]], run: Recording, hindsight: Hindsight, replayed: Replay
) -> list[dict[str, Any]]:
    """Counts and rates of what fired on a run, for each of the settings that `replayed` has along its first axis."""
    measured = replayed.summary | hindsight.score(np.asarray(replayed.outcomes.fired))
    columns = {name: np.broadcast_to(x, len(settings)) for name, x in measured.items()}
    rows = [{name: x[i] for name, x in columns.items()} for i in range(len(settings))]
    for row in rows:
        locked = row["locked_in_from"]
        row["locked_in_from"] = None if locked < 0 else run.steps[locked]
    return [to_json({"settings": setting, **row}) for setting, row in zip(settings, rows, strict=True)]


def describe_sweep(
    recording: Recording, spec: Spec, grid: Mapping[str, Sequence[int | float]]
) -> list[dict[str, Any]]:
    """How a rule would have acted on the runs of a log with each combination of settings."""
    runs = recording.runs
    settings, decide = compile_sweep(spec.factory(), grid)
    swept = decide_runs(
        lambda norms, value: decide(norms, **({} if value is None else {"value": value})), runs
    )
    rows = [
        describe_settings(settings, run, look_back(run.norms), its)
        for run, its in zip(runs, swept, strict=True)
    ]
    return rows[0] if len(runs) == 1 else [add_rows(each) for each in zip(*rows, strict=True)]


def largest_spikes(run: Recording, hindsight: Hindsight, replayed: Replay) -> list[dict[str, Any]]:
    """The steps furthest above their local median, of those that fired or are outliers."""
    fired = np.asarray(replayed.outcomes.fired)
    columns = {
        "step": run.steps,
        "row": np.arange(run.steps.size),
        "norm": run.norms,
        "local_median": hindsight.median,
        "ratio": hindsight.ratio,
        "allowed": np.asarray(replayed.outcomes.threshold),
        "clip_scale": np.asarray(replayed.outcomes.clip_scale),
        "fired": fired,
    }
    rows = np.flatnonzero(fired | hindsight.outlier)
    rows = rows[np.argsort(-hindsight.ratio[rows], kind="stable")][:LARGEST]
    return [to_json({name: x[row] for name, x in columns.items()}) for row in rows]
