"""What our sinks share: metrax's interface, on top of whole rows."""

import abc
import threading
from typing import Any

import numpy as np

from zclip_jax.monitor._position import OWN, Position, Row, as_count
from zclip_jax.monitor._values import as_number


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
        name, number = (
            event.lstrip("/"),
            as_number(np.asarray(value).reshape(()) if np.size(value) == 1 else value),
        )
        if name in OWN:
            raise ValueError(f"event must not be {event!r}: each row has its own {', '.join(OWN)}")
        if number is None or isinstance(number, np.ndarray):
            raise ValueError(f"value must be a real number, got {value!r} for {event!r}")
        with self._lock:
            if self._position is None:
                self._position = Position.after(self.last_row())
            step = kwargs.get("step")
            step = self._gathered.get("step", 0) if step is None else _whole(step)
            if step != self._gathered.get("step"):
                self._write_gathered()
                self._gathered = self._place(self._position, step)
            self._gathered[name] = number

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


def _whole(step: Any) -> int:
    if isinstance(step, str) and step.isdecimal():
        step = int(step)
    number = as_count(step.item() if hasattr(step, "item") else step)
    if number is None:
        raise ValueError(f"step must be a whole number, got {step!r}")
    return number
