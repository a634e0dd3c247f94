"""What our sinks share: metrax's interface, on top of whole rows."""

import abc
import threading
from typing import Any

from zclip_jax.monitor._position import Position, Row


class RowSink(abc.ABC):
    """A sink of rows that also takes scalars one by one.

    `log_scalar` and `close` are metrax's `LoggingBackend`, and `log_scalar` is a listener of
    `jax.monitoring.register_scalar_listener`. The scalars of a step are one row: it is written as the first scalar of
    another step comes, or by `flush` or `close`. A `Monitor` hands over whole rows instead, by `log_row`.
    """

    def __init__(self) -> None:
        self._gathered: Row = {}
        self._position: Position | None = None
        self._lock = threading.Lock()

    @abc.abstractmethod
    def log_row(self, row: Row) -> None:
        """Writes a row: `update`, `step`, `attempt`, and a Python number for each name."""

    def last_row(self) -> Row | None:
        """The last row of an earlier process that is in the log, if it can be read."""
        return None

    def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
        """Adds a scalar to the row of `step=`, which is that of the last scalar where it is not given."""
        with self._lock:
            if self._position is None:
                self._position = Position.after(self.last_row())
            step = kwargs.get("step")
            step = self._gathered.get("step", 0) if step is None else int(step)
            if step != self._gathered.get("step"):
                self._write_gathered()
                self._gathered = self._place(self._position, step)
            self._gathered[event.lstrip("/")] = value.item() if hasattr(value, "item") else value

    def flush(self) -> None:
        """Writes what was gathered."""
        with self._lock:
            self._write_gathered()

    def close(self) -> None:
        """Writes what was gathered, and lets go of files and connections."""
        self.flush()

    @staticmethod
    def _place(position: Position, step: int) -> Row:
        # A step that goes back tells nothing here: those who log scalars may count evaluations by themselves.
        if position.step is None or position.again or step > position.step:
            position.move(step)
        return position.row | {"step": step}

    def _write_gathered(self) -> None:
        row, self._gathered = self._gathered, {}
        if row:
            self.log_row(row)
