"""A sink on a thread of its own: it may fail or hang, and nobody waits for it."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from zclip_jax.monitor._position import Row
from zclip_jax.monitor._tracker import tracked

LIMIT = 1000  # rows that may wait for a sink

logger = logging.getLogger("zclip_jax.monitor")


class Worker:
    """Hands rows to a sink, in order, on a daemon thread. What fails is counted, and the first time told.

    Args:
      name: of the sink, in messages.
      sink: with `log_row`, or with metrax's `log_scalar`; and with `close`.

    Attributes:
      lost: rows that the sink failed on, that found no room before a slow one, or that a hanging one left behind.
      last_row: what the log held before, if the sink has told in time.
    """

    def __init__(self, name: str, sink: Any) -> None:
        self.name, self.sink = name, sink
        self.lost = 0
        self.last_row: Row | None = None
        self._given = self._done = 0  # rows
        self._told = False
        self._late = False  # it did not answer in time, and has not since
        self._jobs: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()  # the last one returns False
        self._started = threading.Event()
        threading.Thread(target=self._run, name=f"zclip_jax.monitor {name}", daemon=True).start()

    def wait_for_start(self, deadline: float) -> None:
        """Until `last_row` is known."""
        self._wait(self._started, deadline)

    def log_row(self, row: Row) -> None:
        """Never waits."""

        def job() -> bool:
            try:
                _log(self.sink, row)
            except BaseException as error:
                self.lost += 1
                self._tell(f"lost the row of update {row['update']}", error)
            self._done += 1
            return True

        if self._given - self._done < LIMIT:
            self._given += 1
            self._jobs.put(job)
        else:
            self.lost += 1
            self._tell(f"is {LIMIT} rows behind and loses rows")

    def log_alarm(self, finding: Row) -> None:
        """Never waits; for sinks that have `log_alarm`."""

        def job() -> bool:
            self._try("log_alarm", finding)
            return True

        if self._given - self._done < LIMIT:
            self._jobs.put(job)
        else:
            self._tell(f"is {LIMIT} rows behind and loses an alarm, {finding['alarm']}")

    def flush(self) -> Callable[[float], None]:
        """Flushes the sink once it has what it was given; returns how to wait for that until a deadline."""
        return self._ask("flush") if not self._late else lambda deadline: None

    def close(self) -> Callable[[float], None]:
        """Closes the sink; where that takes longer than it is waited for, what is still to be written is lost."""
        wait = self._ask("close")

        def waited(deadline: float) -> None:
            try:
                wait(deadline)
            finally:
                self.lost += self._given - self._done
            if self.lost:
                logger.warning("%s lost %d rows", self.name, self.lost)

        return waited

    def _ask(self, method: str) -> Callable[[float], None]:
        finished = threading.Event()

        def job() -> bool:
            self._try(method)
            self._late = False
            finished.set()
            return method != "close"

        self._jobs.put(job)
        return lambda deadline: self._wait(finished, deadline)

    def _wait(self, event: threading.Event, deadline: float) -> None:
        if not event.wait(max(deadline - time.monotonic(), 0)):
            self._late = True
            self._tell("does not answer, and is waited for no more")

    def _run(self) -> None:
        self.last_row = self._try("last_row")
        self._started.set()
        while self._jobs.get()():
            pass

    def _try(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the sink, if it has that."""
        try:
            return getattr(self.sink, method, lambda *_: None)(*arguments)
        except BaseException as error:
            self._tell(f"failed in {method}", error)

    def _tell(self, what: str, error: BaseException | None = None) -> None:
        if not self._told:
            self._told = True
            why = "" if error is None else f": {type(error).__name__}: {error}"
            logger.warning("%s %s%s; training goes on, Monitor.lost counts", self.name, what, why)


def _log(sink: Any, row: Row) -> None:
    if hasattr(sink, "log_row"):
        sink.log_row(row)
        return
    failed = None
    for name, value in tracked(row).items():
        try:
            sink.log_scalar(name, int(value) if isinstance(value, bool) else value, step=row["update"])
        except Exception as error:
            failed = error
    if failed is not None:
        raise failed
