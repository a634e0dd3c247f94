"""Trackers of experiments: runs that a package of their own keeps, on a server or on disk."""

import abc
from typing import Any

from zclip_jax.monitor._position import OWN, Row
from zclip_jax.monitor._row_sink import RowSink


class Tracker(RowSink):
    """A sink whose run is started when it is first needed. One that can't be started is not tried again."""

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None
        self._error: Exception | None = None

    @abc.abstractmethod
    def _start(self) -> Any:
        """Returns a run, which has `finish`."""

    @property
    def run(self) -> Any:
        """The run, started by now."""
        if self._error is not None:
            raise self._error
        if self._run is None:
            try:
                self._run = self._start()
            except Exception as error:
                self._error = error
                raise
        return self._run

    def close(self) -> None:
        """Writes what was gathered, and finishes the run."""
        try:
            super().close()
        finally:
            if self._run is not None:
                self._run.finish()


def tracked(row: Row) -> Row:
    """A row for what has steps of its own: the numbers that place it are below `train/`."""
    return {f"train/{name}" if name in OWN else name: value for name, value in row.items()}
