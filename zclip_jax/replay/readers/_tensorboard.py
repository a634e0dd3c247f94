"""TensorBoard event files and folders of them, read by the tensorboard package."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zclip_jax._extras import require
from zclip_jax.replay.readers._columns import Columns
from zclip_jax.replay.readers._last_stage import make_recording
from zclip_jax.replay.readers._names import RUN
from zclip_jax.replay.readers._notes import count
from zclip_jax.replay.readers._recording import Recording

START = ""  # in place of a tag: the run is resumed
FRAME = 16  # bytes around each record: its length and two checksums


def is_events(head: bytes) -> bool:
    """Whether a file that begins so is an event file: its first record names the format's version."""
    return b"brain.Event:" in head[:64]


def read_tensorboard(path: Path, column: str | None) -> Recording:
    """The scalars of an event file, or of all below a folder, each folder with event files a run."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    found = len(files)
    files = [file for file in files if is_events(_head(file))]
    if not files:
        others = count(found, "file of another kind", "files of other kinds")
        raise ValueError(f"a folder without TensorBoard event files, but {others}")
    base = os.path.commonpath([file.parent for file in files])
    notes, columns = [], Columns(column, typed=True)
    # Each scalar is an event of its own. Those of one row share run and step, and how often it came before.
    rows: dict[tuple[str, int, int], int] = {}
    seen: dict[tuple[str, int], int] = {}
    attempts: dict[str, int] = {}  # a writer that purges what it will log again says so as it starts
    for file in files:
        run = os.path.relpath(file.parent, base)
        prefix = "" if run == "." else run + RUN
        for tag, step, value in _scalars(file, notes):
            if tag == START:
                attempts[run] = attempts.get(run, 0) + 1
                continue
            name = prefix + tag
            scalars = columns[name]
            if scalars is None:
                continue
            time = seen[name, step] = seen.get((name, step), -1) + 1
            row = rows.setdefault((run, step, time), len(rows))
            if row == columns.num_rows:
                columns.add({f"{prefix}step": step, f"{prefix}attempt": attempts.get(run)})
            scalars.append(row, value)
    return make_recording(columns, "TensorBoard", notes)


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(64)


def _scalars(file: Path, notes: list[str]) -> Iterator[tuple[str, int, float]]:
    loader = require(
        "tensorboard.backend.event_processing.event_file_loader", "replay", "reading TensorBoard"
    )
    protos = require("tensorboard.compat.proto.event_pb2", "replay", "reading TensorBoard")
    tensor_util = require("tensorboard.util.tensor_util", "replay", "reading TensorBoard")
    size = 0
    for record in loader.RawEventFileLoader(str(file)).Load():
        size += len(record) + FRAME
        event: Any = protos.Event.FromString(record)
        if event.session_log.status == protos.SessionLog.START:
            yield START, event.step, 0.0
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield value.tag, event.step, value.simple_value
            elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                number = tensor_util.make_ndarray(value.tensor)
                if number.dtype.kind == "f":
                    yield value.tag, event.step, number.item()
    if size < file.stat().st_size:  # where the loader stops without a word
        notes.append(f"{file.name} is cut off or damaged after {size:,} of {file.stat().st_size:,} bytes")
