"""Sums over the runs of a log: counts add up, statistics of a level don't."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from zclip_jax.replay._replay import Replay
from zclip_jax.replay._runs import gather
from zclip_jax.replay.readers import Recording

LARGEST = 10  # spikes listed
# What only a run of its own has.
ONE_RUNS = ("first_step", "last_step", "cadence", "median", "spike_score", "loss_spike_score")
ONE_RUNS += ("olmo_core_spike_score", "olmo_core_spike_score_last")


def add_up(
    recording: Recording, parts: Sequence[dict[str, Any]], results: Sequence[Replay]
) -> dict[str, Any]:
    """The report on all runs of a log, from the reports on each; `results` are the rules' replays of all runs."""
    rules = [
        {
            "rule": same[0]["rule"],
            **add_rows(same),
            **describe_scales(replayed),
            "largest_spikes": _largest([one["largest_spikes"] for one in same]),
        }
        for same, replayed in zip(zip(*(part["rules"] for part in parts), strict=True), results, strict=True)
    ]
    return {
        "log": _add_logs(recording, [part["log"] for part in parts]),
        "rules": rules,
        "flags": gather([part["flags"] for part in parts]),
    }


def _add_logs(recording: Recording, logs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    largest = [log["max"] for log in logs if log["max"] is not None]
    shared = set(recording.notes)
    own = gather([[note for note in log["notes"] if note not in shared] for log in logs])
    sums = {name: sum(log[name] for log in logs) for name in logs[0] if name.startswith("num_")}
    return {
        **logs[0],
        **sums,
        **dict.fromkeys(ONE_RUNS),
        "max": max(largest, default=None),
        "notes": [*recording.notes, *own],
    }


def add_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the same settings on each run, added; instead of where a run locks in, how many runs do."""
    total: dict[str, Any] = {"settings": rows[0]["settings"]}
    counted = [name for name in rows[0] if name.startswith("num_")]
    total |= {name: sum(row[name] for row in rows) for name in counted}
    for name in ("fired", "bound", "capped"):
        total[f"{name}_rate"] = total[f"num_{name}"] / max(total["num_steps"], 1)
    total["longest_run"] = max(row["longest_run"] for row in rows)
    total["num_locked_in"] = sum(row["locked_in_from"] is not None for row in rows)
    return total


def describe_scales(replayed: Replay) -> dict[str, Any]:
    """How many steps were scaled down, and how far."""
    scale = np.asarray(replayed.outcomes.clip_scale)
    scaled = scale[(scale < 1) & ~np.asarray(replayed.outcomes.nonfinite)]
    return {
        "num_scaled": scaled.size,
        "median_scale": float(np.median(scaled)) if scaled.size else None,
        "least_scale": float(np.min(scaled)) if scaled.size else None,
    }


def _largest(spikes: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Those of all runs that are furthest above the local median of their run, with the run's number."""
    numbered = [{"run": number} | spike for number, its in enumerate(spikes, 1) for spike in its]
    return sorted(numbered, key=lambda spike: -spike["ratio"])[:LARGEST]
