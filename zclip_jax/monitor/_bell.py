"""Alarms over the rows of a run that is under way."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zclip_jax._alarms import Alarm, Columns
from zclip_jax.monitor._position import OWN, Row

logger = logging.getLogger("zclip_jax.monitor")


class Bell:
    """Keeps the columns that alarms read, of as many rows as they look back on.

    Each clip state and each watch has its own. The norms and spikes of `watch("grads")` stand in for those of a clip
    where there is none.

    Args:
      alarms: each with a name of its own.
      cooldown: updates for which an alarm is silent once it was raised.
    """

    def __init__(self, alarms: Sequence[Alarm], cooldown: int) -> None:
        self.alarms, self.cooldown = alarms, cooldown
        self.names = {name for alarm in alarms for name in alarm.reads}
        self.recent: dict[tuple[str, str], _Recent] = {}
        self.raised: dict[tuple[str, str], int] = {}  # at which update

    def rewind(self, step: int) -> None:
        """Forgets the rows of steps above this one."""
        for recent in self.recent.values():
            recent.rewind(step)

    def add(self, row: Row) -> list[Row]:
        """Takes a row whose values may be arrays `[groups]`, and returns what the alarms find in the last ones.

        An alarm sees the rows that have all that it reads.
        """
        found = []
        sources = self._sources(row)
        for source, values in sources.items():
            for alarm in self.alarms:
                if not all(name in values for name in alarm.reads):
                    continue
                which = source, alarm.name
                recent = self.recent.get(which)
                if recent is None:
                    recent = self.recent[which] = _Recent(("step", *alarm.reads), alarm.window)
                recent.add([values[name] for name in recent.names])
                last = self.raised.get(which)
                if last is not None and row["update"] < last + self.cooldown:
                    continue
                message = self._message(alarm, recent.columns())
                if message is not None:
                    self.raised[which] = row["update"]
                    whose = f"{source}: " if source and len(sources) > 1 else ""
                    place = {name: row[name] for name in OWN}
                    found.append(place | {"alarm": alarm.name, "message": whose + message})
        return found

    def _message(self, alarm: Alarm, columns: Columns) -> str | None:
        try:
            return alarm.say(columns) if alarm.holds(columns)[-1] else None
        except Exception:
            self.alarms = [other for other in self.alarms if other is not alarm]
            logger.exception("the alarm %r failed, and is off from now on", alarm.name)
            return None

    def _sources(self, row: Row) -> dict[str, dict[str, float]]:
        sources: dict[str, dict[str, float]] = {}
        for key, value in row.items():
            source, _, name = key.rpartition("/")
            if source.startswith("watch/grads") and name == "norm":
                name = "grad_norm"
            if name in self.names:
                sources.setdefault(source, {"step": float(row["step"])})[name] = _one(name, value)
        if any(source.startswith("zclip") for source in sources):
            sources = {name: its for name, its in sources.items() if not name.startswith("watch/grads")}
        return sources


class _Recent:
    """The last rows of some columns, in an array twice as long as needed, so that they are moved seldom."""

    def __init__(self, names: tuple[str, ...], window: int) -> None:
        self.names, self.window, self.end = names, window, 0
        self.data = np.zeros((len(names), 2 * window))

    def add(self, values: list[float]) -> None:
        if self.end == 2 * self.window:
            self.data[:, : self.window] = self.data[:, self.window :]
            self.end = self.window
        self.data[:, self.end] = values
        self.end += 1

    def rewind(self, step: int) -> None:
        steps = self.data[self.names.index("step"), : self.end]
        self.end = int((steps <= step).sum())

    def columns(self) -> Mapping[str, np.ndarray]:
        rows = slice(max(self.end - self.window, 0), self.end)
        return {name: column[rows] for name, column in zip(self.names, self.data, strict=True)}


def _one(name: str, value: Any) -> float:
    """One number for all groups: a share of flags, and of norms one that is finite if any is."""
    if np.ndim(value) == 0:
        return float(value)
    groups = np.asarray(value, float)
    if not groups.size:
        return float("nan")
    if name != "grad_norm":
        return float(groups.mean())
    finite = groups[np.isfinite(groups)]
    return float(finite.max()) if finite.size else float("nan")
