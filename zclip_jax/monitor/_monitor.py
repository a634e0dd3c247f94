"""`Monitor`: what each training step measured, in every log, without waiting for the step."""

import atexit
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zclip_jax._alarms import ALARMS, Alarm
from zclip_jax.monitor._bell import Bell
from zclip_jax.monitor._position import OWN, Position, Row
from zclip_jax.monitor._values import fetch
from zclip_jax.monitor._worker import Worker

logger = logging.getLogger("zclip_jax.monitor")


class Monitor:
    """Takes the scalars of each training step as they are on the device, and writes them one step behind.

    `log` fetches those of the step before, while the device runs the step that it is called with: so the device never
    waits. Each sink works on a thread of its own. One that fails or hangs loses rows, which are counted in `lost` and
    told once by the logger `zclip_jax.monitor`; training goes on.

    Every row has three numbers of its own. `step` is the training step. `attempt` counts rewinds and resumes.
    `update` counts all updates, those that a rewind took back too, and never goes down: it continues from what the
    log of a resumed run holds. In a distributed run only process 0 logs; on the others `log` just counts.

    Args:
      sinks: where rows go: `JsonLines`, `TensorBoard`, `Wandb`, `Trackio`, or anything with metrax's
        `log_scalar(event, value, step=…)` and `close()`, which is called with the update as its step. They are not
        used before the first row, and closed with the monitor.
      alarms: what is looked for in the last rows; `()` for nothing.
      cooldown: updates for which an alarm is silent once it was raised.
      on_alarm: called with what an alarm found: a mapping of `update`, `step`, `attempt`, `alarm` (its name) and
        `message`. It is logged as a warning as well.
      on_row: called with each row after it is fetched: all values, arrays too, as Python numbers and NumPy arrays.
      all_processes: let every process log; each needs sinks of its own.
      timeout: seconds that the first `log`, which asks what the logs hold, and `flush` and `close` wait at most, for
        all sinks together.

    An exception in a callback is told and counted like that of a sink; to stop training, let it set a flag.

    Examples:
      >>> import jax.numpy as jnp
      >>> from zclip_jax.monitor import Monitor
      >>> rows = []
      >>> with Monitor(on_row=rows.append) as monitor:
      ...     for step in (1, 2):
      ...         _ = monitor.log(step, {"loss": jnp.float32(2.5)}, tokens_per_second=1e5)
      >>> rows[0]
      {'update': 1, 'step': 1, 'attempt': 0, 'loss': 2.5, 'tokens_per_second': 100000.0}
    """

    def __init__(
        self,
        sinks: Sequence[Any] = (),
        *,
        alarms: Sequence[Alarm] = ALARMS,
        cooldown: int = 1000,
        on_alarm: Callable[[Row], Any] | None = None,
        on_row: Callable[[Row], Any] | None = None,
        all_processes: bool = False,
        timeout: int | float = 10.0,
    ) -> None:
        if not isinstance(sinks, Sequence):
            raise ValueError(f"sinks must be a list of sinks, got {sinks!r}")
        for sink in sinks:
            if not all(callable(getattr(sink, name, None)) for name in ("log_scalar", "close")):
                raise ValueError(f"each of sinks must have log_scalar and close, got {sink!r}")
        self.sinks, self.on_alarm, self.on_row = tuple(sinks), on_alarm, on_row
        self.all_processes, self.timeout = all_processes, timeout
        self._bell = Bell(alarms, cooldown)
        self._workers: list[Worker] = []
        self._position: Position | None = None
        self._rewound: int | None = None  # before the first row
        self._closed = False
        self._pending: tuple[Row, dict[str, Any]] | None = None
        self._failed: Counter[str] = Counter()  # calls of what is the caller's
        self._unread: Counter[str] = Counter()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # else the pending step fails of the same
                raise

    @property
    def lost(self) -> dict[str, int]:
        """How many rows each sink lost, and how many calls of a callback failed; only those that did."""
        rows = {worker.name: worker.lost for worker in self._workers if worker.lost}
        return rows | dict(self._failed)

    @property
    def unread(self) -> dict[str, int]:
        """How often a value could not be read, by its name; only those that could not."""
        return dict(self._unread)

    def log(self, step: int | np.integer, scalars: Mapping[str, Any], **values: Any) -> int:
        """Logs what a step returned, and writes the row of the step before.

        Args:
          step: of training, a Python int. One below the last begins another attempt, as `rewind` does; the same one
            again adds to its row.
          scalars: by name; arrays on the device, as the jitted step returned them. Arrays that are no scalars go to
            `on_row` alone.
          **values: more of them, from the host.

        Returns:
          The update that the row has as its number; on a process that does not log, counted without the log.

        Raises:
          ValueError: `step` is no int, a name is one of the row's own, or the monitor is closed.
        """
        step = _check_step(step)
        if self._closed:
            raise ValueError(f"the monitor is closed, and step {step} can't be logged")
        given = {**scalars, **values}
        for name in OWN:
            if name in given:
                raise ValueError(f"scalars must not have {name!r}: each row has its own {', '.join(OWN)}")
        position = self._position or self._start()
        if self._pending and self._pending[0]["step"] == step:
            self._pending[1].update(given)
        else:
            pending, self._pending = self._pending, None
            position.move(step)
            if self._logs:
                self._pending = position.row, given
            self._write(pending)
        return position.update

    def rewind(self, step: int | np.integer) -> None:
        """Tells that training goes on from this step, rewound or resumed: the next row is another attempt's."""
        step = _check_step(step)
        if self._position is None:
            self._rewound = step  # sinks are not used before the first row
            return
        self._write_pending()
        self._position.rewind(step)
        self._bell.rewind(step)

    def flush(self) -> None:
        """Writes the row that is pending, and waits for the sinks; call it before a checkpoint is saved."""
        self._write_pending()
        self._wait(worker.flush() for worker in self._workers)

    def close(self) -> None:
        """Writes the row that is pending and closes the sinks, which may take `timeout`; then tells what was lost."""
        if self._closed:
            return
        try:
            self._write_pending()
        finally:
            self._closed = True
            atexit.unregister(self.close)
            self._wait(worker.close() for worker in self._workers)

    def _wait(self, waits: Iterable[Callable[[float], None]]) -> None:
        waits, deadline = list(waits), time.monotonic() + self.timeout  # they work side by side
        for wait in waits:
            wait(deadline)

    def _start(self) -> Position:
        self._logs = self.all_processes or jax.process_index() == 0
        last = None
        if self._logs:
            kinds = [type(sink).__name__ for sink in self.sinks]
            for i, (kind, sink) in enumerate(zip(kinds, self.sinks, strict=True)):
                name = kind if kinds.count(kind) == 1 else f"{kind} {kinds[: i + 1].count(kind)}"
                self._workers.append(Worker(name, sink))
            atexit.register(self.close)  # of a run that ends without it
            last = self._last_row()
        self._position = Position.after(last)
        if self._rewound is not None:
            self._position.rewind(self._rewound)
        return self._position

    def _last_row(self) -> Row | None:
        deadline = time.monotonic() + self.timeout
        rows = []
        for worker in self._workers:
            worker.wait_for_start(deadline)
            if worker.last_row is not None:
                rows.append(worker.last_row)
        return max(rows, key=lambda row: row.get("update", row["step"]), default=None)

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, None
        self._write(pending)

    def _write(self, pending: tuple[Row, dict[str, Any]] | None) -> None:
        if pending is None:
            return
        place, given = pending
        values, unread = fetch(given)
        for name, why in unread.items():
            if name not in self._unread:
                logger.warning("%r of step %d is left out: %s", name, place["step"], why)
            self._unread[name] += 1
        row = place | values
        numbers = {name: value for name, value in row.items() if not isinstance(value, np.ndarray)}
        for worker in self._workers:
            worker.log_row(numbers)
        for finding in self._bell.add(row):
            logger.warning("step %d: %s", finding["step"], finding["message"])
            for worker in self._workers:
                worker.log_alarm(finding)
            self._call("on_alarm", self.on_alarm, finding)
        self._call("on_row", self.on_row, row)

    def _call(self, name: str, function: Callable[[Row], Any] | None, row: Row) -> None:
        try:
            if function is not None:
                function(row)
        except Exception:
            if name not in self._failed:
                logger.exception("%s failed at update %d; training goes on", name, row["update"])
            self._failed[name] += 1


def _check_step(step: Any) -> int:
    # An array on the device would have to be waited for.
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise ValueError(f"step must be an int on the host, got {step!r}")
    return int(step)
