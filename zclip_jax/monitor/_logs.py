"""Logs as they grow: the package's own rows line by line, any other log by `replay.read`."""

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from zclip_jax._json import parse_lines
from zclip_jax.monitor._run import COLUMNS, Columns, Run, make_records
from zclip_jax.monitor._tail import Objects, ReplacedError, Tail

CHUNK = 1 << 20  # bytes that are read at a time
NORM, NONFINITE = COLUMNS.index("grad_norm"), COLUMNS.index("nonfinite")
WHOLE = ("step", "update", "loss", "val_loss")  # columns that are called so in rows
#: By column, what it is called behind the prefix of a clip, and of a watch where no norm of a clip is logged.
OF_CLIP = {name: name for name in ("grad_norm", "trigger", "clip_scale", "fired", "bound", "capped")}
OF_CLIP |= {"nonfinite": "nonfinite", "skipped": "skip_run", "alarm": "alarm"}
OF_WATCH = {"grad_norm": "norm", "trigger": "trigger", "fired": "fired", "nonfinite": "nonfinite"}


def open_log(path: Path) -> "RunLog | OtherLog":
    """What reads the log of a run, or the run in a folder.

    Raises:
      OSError: there is none.
      ValueError: there is nothing in it yet.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if file.is_file():
        with file.open("rb") as opened:
            head = opened.readlines(1 << 16)
        objects = parse_lines(head)
        rows = [row for row in objects if "step" in row]
        if any(map(find_names, rows)):
            return RunLog(file, path)
        if not rows and len(objects) == len(head):
            raise ValueError(f"{path}: no rows yet")
        return OtherLog(file)
    return OtherLog(path)


def find_names(row: dict[str, Any]) -> dict[str, str]:
    """The keys of the columns in a row of this package's own; empty for any other."""
    clips = [key.rpartition("/")[0] for key in row if key.startswith("zclip") and key.endswith("/grad_norm")]
    watches = [
        key.rpartition("/")[0] for key in row if key.startswith("watch/grads") and key.endswith("/norm")
    ]
    if not clips and not watches:
        return {}
    (source, *_), called = (clips, OF_CLIP) if clips else (watches, OF_WATCH)
    names = {name: name for name in WHOLE} | {name: f"{source}/{key}" for name, key in called.items()}
    rise = [key for key in row if key.startswith("watch/updates") and key.endswith("/ratio_rise")]
    return names | ({"ratio_rise": rise[0]} if rise else {})


class RunLog:
    """A log that `JsonLines` writes, read as far as it has grown, with records and alarms beside it.

    A row takes back earlier ones of its step and later steps, unless it is of the same update: then it adds to it.
    """

    def __init__(self, file: Path, path: Path) -> None:
        stem = "" if file.stem == "metrics" else f"{file.stem}."
        self.tail, self.path = Tail(file), path
        self.spikes = Objects(file.with_name(f"{stem}spikes.jsonl"))
        self.alarms = Objects(file.with_name(f"{stem}alarms.jsonl"))
        self.names = {name: name for name in WHOLE}
        self.num_rows, self.rows = 0, np.empty((len(COLUMNS), 1024))

    def update(self, seconds: float | None = None) -> bool:
        """Reads what is new, for so long at most; True where there is more.

        Raises:
          OSError: the file is gone or can't be read.
          ReplacedError: it is another one.
        """
        start = time.monotonic()
        while lines := self.tail.read(CHUNK):
            for row in parse_lines(lines):
                if _number(row.get("step")).is_integer():
                    self._add(row)
            if seconds is not None and time.monotonic() - start > seconds:
                return True
        return False

    def run(self) -> Run:
        """The run as read so far; its columns are good until the next `update`."""
        columns = dict(zip(COLUMNS, self.rows[:, : self.num_rows], strict=True))
        columns["skipped"] = np.where(np.isnan(columns["skipped"]), np.nan, columns["skipped"] > 0)
        alarms = [one for one in self.alarms.update() if {"step", "message"} <= one.keys()]
        return Run(_name(self.path), columns, make_records(self.spikes.update()), alarms or None)

    def _add(self, row: dict[str, Any]) -> None:
        if "grad_norm" not in self.names:
            self.names = find_names(row) or self.names
        values = np.asarray([_number(row.get(self.names.get(name, ""))) for name in COLUMNS])
        if np.isnan(values[NONFINITE]) and self.names.get("grad_norm") in row:
            values[NONFINITE] = not np.isfinite(values[NORM])
        last = self.rows[:, self.num_rows - 1]
        if self.num_rows and np.array_equal(last[:2], values[:2], equal_nan=True):  # more of the same row
            last[:] = np.where(np.isnan(values), last, values)
            return
        while self.num_rows and self.rows[0, self.num_rows - 1] >= values[0]:
            self.num_rows -= 1
        if self.num_rows == self.rows.shape[1]:
            self.rows = np.concatenate([self.rows, np.empty_like(self.rows)], axis=1)
        self.rows[:, self.num_rows] = values
        self.num_rows += 1


class OtherLog:
    """Any log that `replay.read` knows, read again as a whole when it has changed, but not too often."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: Run | Exception = ValueError(f"{path} was not read yet")
        self._seen: Any = None
        self._next = 0.0  # when it may be read again

    def update(self, seconds: float | None = None) -> bool:
        """Reads the log if it has changed; where reading takes long, after ten times as long.

        Raises:
          OSError: it is gone or can't be read.
          ValueError: it holds no norms.
          ReplacedError: it is one that `RunLog` reads by now.
        """
        seen, now = _state_of(self.path), time.monotonic()
        if seen != self._seen and isinstance(open_log(self.path), RunLog):
            raise ReplacedError
        if seen != self._seen and (seconds is None or now >= self._next):
            self._seen = seen
            try:
                self._made = _read_other(self.path)
            except (OSError, ValueError) as error:
                self._made = error
            self._next = time.monotonic() + 10 * (time.monotonic() - now)
        self.run()
        return False

    def run(self) -> Run:
        """The run as last read, or what kept it from being read."""
        if isinstance(self._made, Exception):
            raise self._made
        return self._made


def _read_other(path: Path) -> Run:
    from zclip_jax.replay._runs import replay_runs
    from zclip_jax.replay._specs import parse_spec
    from zclip_jax.replay.readers import read

    try:
        recording = read(path)
    except ValueError as error:
        raise ValueError(f"{error}, and no metrics.jsonl" if path.is_dir() else str(error)) from None
    *before, run = recording.runs
    spec = parse_spec("zclip")
    outcomes = replay_runs(spec.rule, [run])[0].outcomes
    columns: Columns = {name: np.full(run.norms.shape, np.nan) for name in COLUMNS}
    columns |= {"step": run.steps.astype(float), "grad_norm": run.norms}
    columns |= {} if run.loss is None else {"loss": run.loss}
    for name in ("trigger", "clip_scale", "fired", "bound", "capped", "nonfinite"):
        columns[name] = np.asarray(getattr(outcomes, name), float)
    notes = (f"the last of {len(before) + 1} runs in it",) if before else ()
    return Run(_name(path), columns, [], None, spec.label, notes)


def empty_run(path: Path) -> Run:
    """A run of which nothing is known."""
    return Run(_name(path), {name: np.empty(0) for name in COLUMNS}, [])


def read_run(path: str | os.PathLike[str]) -> Run:
    """Reads a run as it is now, for `plot_runs` or for numbers of your own.

    Args:
      path: a folder with the `metrics.jsonl` of a `JsonLines` sink, such a file, or any log that `replay.read` takes.

    Raises:
      OSError: there is no such log.
      ValueError: it holds no norms.

    Examples:
      >>> import pathlib, tempfile
      >>> from zclip_jax.monitor import JsonLines, Monitor, read_run
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> with Monitor([JsonLines(path)]) as monitor:
      ...     for step in (1, 2):
      ...         _ = monitor.log(step, {"loss": 3.0 - step, "zclip/grad_norm": 0.5})
      >>> read_run(path).columns["loss"].tolist()
      [2.0, 1.0]
    """
    log = open_log(Path(path))
    log.update()
    return log.run()


def _state_of(path: Path) -> Any:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [(str(file), (status := file.stat()).st_ino, status.st_size, status.st_mtime_ns) for file in files]


def _name(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if path.name == "metrics.jsonl" else path.name


def _number(value: Any) -> float:
    """A number, or a string that JSON has in place of one; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
