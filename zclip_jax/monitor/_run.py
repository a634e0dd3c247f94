"""A run as it is looked at: columns of its log, records of its spikes, alarms."""

from typing import Any, NamedTuple

import numpy as np

from zclip_jax._alarms import ALARMS
from zclip_jax._spikes import SpikeRecord

Columns = dict[str, np.ndarray]

FLAGS = ("fired", "bound", "capped", "nonfinite", "skipped")
#: What is kept of each row; NaN where it has no such number.
COLUMNS = (
    "step",
    "update",
    "loss",
    "val_loss",
    "grad_norm",
    "trigger",
    "clip_scale",
    *FLAGS,
    "ratio_rise",
    "alarm",
)
RECORD = {"watch", "kind", "step", "norm", "times_level", "allowed", "share", "rise"}
RECORD |= {"num_groups", "num_nonfinite", "nonfinite"}
RECENT = 1000  # steps in which an alarm is news
MARGIN = 100  # rows that alarms look back on


class Run(NamedTuple):
    """A run up to now.

    Args:
      name: of its folder or file.
      columns: `COLUMNS`, float64 `[steps]` each, in the order of the steps.
      records: of its spikes, those of earlier attempts included.
      alarms: that were raised while it ran; None where that is not known.
      rule: the one that was replayed, where the log does not tell what was clipped.
      notes: what is odd about the log.
    """

    name: str
    columns: Columns
    records: list[SpikeRecord]
    alarms: list[dict[str, Any]] | None = None
    rule: str = ""
    notes: tuple[str, ...] = ()

    @property
    def scaled(self) -> np.ndarray:
        """The steps that were scaled down, by rule or cap."""
        return (self.columns["bound"] > 0) | (self.columns["capped"] > 0)

    @property
    def allowed(self) -> np.ndarray:
        """What a step was scaled down to; of any other step the norm up to which it would have been left alone."""
        return np.where(self.scaled, self._scaled_norm, np.fmin(self.columns["trigger"], self.cap))

    @property
    def cap(self) -> np.ndarray:
        """The cap, as the last capped step shows it, or the first that does; NaN where no step was capped."""
        columns, rows = self.columns, np.arange(self.columns["step"].size)
        capped = np.flatnonzero(columns["capped"] > 0)
        if not capped.size:
            return np.full(rows.shape, np.nan)
        last = capped[np.maximum(np.searchsorted(capped, rows, side="right") - 1, 0)]
        return self._scaled_norm[last]

    @property
    def _scaled_norm(self) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # an infinite norm is scaled by zero
            return self.columns["grad_norm"] * self.columns["clip_scale"]

    def current_records(self) -> list[SpikeRecord]:
        """Those of steps that no later attempt took back."""
        steps, kept = self.columns["step"], []
        for record in self.records:
            row = np.searchsorted(steps, record["step"])
            if row < steps.size and steps[row] == record["step"]:
                update = self.columns["update"][row]
                if np.isnan(update) or record.get("update", update) == update:
                    kept.append(record)
        return kept

    def find_alarms(self) -> list[str]:
        """A sentence for each alarm raised, or holding, in the last 1,000 steps; the latest last."""
        steps = self.columns["step"]
        if not steps.size:
            return []
        if self.alarms is not None:
            since = steps[-min(RECENT, steps.size)]
            return [
                f"step {alarm['step']:,}: {alarm['message']}"
                for alarm in self.alarms
                if alarm["step"] >= since
            ]
        rows = {name: x[-(RECENT + MARGIN) :] for name, x in self.columns.items()}
        has_norm = ~np.isnan(rows["grad_norm"]) | (rows["nonfinite"] > 0)
        rows = {name: x[has_norm] for name, x in rows.items()}
        rows["grad_norm"] = np.where(rows["nonfinite"] > 0, np.nan, rows["grad_norm"])
        found = []
        for alarm in ALARMS:
            known = [name for name in alarm.reads if name == "grad_norm" or not np.isnan(rows[name]).all()]
            if len(known) < len(alarm.reads):
                continue
            columns = {name: rows[name] for name in ("step", *alarm.reads)}
            held = np.flatnonzero(alarm.holds(columns))
            held = held[held >= rows["step"].size - RECENT]
            if held.size:
                at, end = held[0], held[-1] + 1
                window = {name: x[max(end - alarm.window, 0) : end] for name, x in columns.items()}
                times = f", and at {held.size - 1:,} more" if held.size > 1 else ""
                found.append((end, f"step {rows['step'][at]:,.0f}{times}: {alarm.say(window)}"))
        return [sentence for _, sentence in sorted(found)]


def make_records(objects: list[dict[str, Any]]) -> list[SpikeRecord]:
    """The records among the objects of a `spikes.jsonl`."""
    return [SpikeRecord(one) for one in objects if one.keys() >= RECORD and isinstance(one["step"], int)]
