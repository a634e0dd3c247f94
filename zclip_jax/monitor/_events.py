"""TensorBoard's event files, written whole records at a time, by the thread that asks.

Writers of other packages queue events for a thread of their own; once that has died of a full disk, whoever logs
waits forever, or what was lost is not known.
"""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zclip_jax._extras import require


class EventFile:
    """Appends events to a new file, which sorts behind those that are in the folder already."""

    def __init__(self, folder: Path) -> None:
        self._records = _require("tensorboard.summary.writer.record_writer").RecordWriter
        self._events = _require("tensorboard.compat.proto.event_pb2")
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(name[3]) for name in _event_files(folder) if name[3].isdigit()]
        number = max(int(time.time()), *(n + 1 for n in numbers), 0)
        path = folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}"
        self._file = path.open("xb", buffering=0)
        try:
            self._write(self._event(0, file_version="brain.Event:2"))
        except BaseException:
            self._file.close()
            path.unlink()
            raise

    def write(self, step: int, scalars: Mapping[str, int | float], purge: int | None = None) -> None:
        """Writes the scalars of a step; `purge` makes readers drop earlier ones from that step on.

        Whole, or not at all and raises.
        """
        events = [self._event(step, summary={"value": [_value(*scalar) for scalar in scalars.items()]})]
        if purge is not None:
            log = {"status": self._events.SessionLog.START}
            events.insert(0, self._event(purge, session_log=log))
        self._write(*events)

    @property
    def deleted(self) -> bool:
        return os.fstat(self._file.fileno()).st_nlink == 0

    def close(self) -> None:
        self._file.close()

    def _event(self, step: int, **what: Any) -> Any:
        return self._events.Event(wall_time=time.time(), step=step, **what)

    def _write(self, *events: Any) -> None:
        buffer = io.BytesIO()
        for event in events:
            self._records(buffer).write(event.SerializeToString())
        data, written, size = buffer.getvalue(), 0, self._file.tell()
        try:
            while written < len(data):  # a disk that fills up takes a part, and then raises
                written += self._file.write(data[written:]) or 0
        except BaseException:
            # Readers stop at half a record.
            self._file.truncate(size)
            self._file.seek(size)
            raise


def _require(module: str) -> Any:
    return require(module, "monitor", "TensorBoard")


def has_events(folder: Path) -> bool:
    """Whether a folder holds event files."""
    return bool(_event_files(folder))


def _value(tag: str, x: int | float) -> dict[str, Any]:
    try:
        return {"tag": tag, "simple_value": float(x)}  # as float32, beyond which it is infinite
    except OverflowError:
        return {"tag": tag, "simple_value": float("inf") if x > 0 else float("-inf")}


def _event_files(folder: Path) -> list[list[str]]:
    if not folder.exists():
        return []
    return [name.split(".") for name in os.listdir(folder) if name.startswith("events.out.tfevents.")]
