"""`JsonLines`: a row on each line of a file."""

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zclip_jax._json import finite_json, parse_lines
from zclip_jax.monitor._position import Row, as_count
from zclip_jax.monitor._row_sink import RowSink

TAIL = 2**16  # bytes from the end of a file, in which its last row is looked for first


class JsonLines(RowSink):
    """Appends rows to a file, each a JSON object on a line: `{"update": 7, "step": 7, "attempt": 0, "loss": 2.5, …}`.

    JSON has no infinity and no NaN: they are the strings `"inf"`, `"-inf"` and `"nan"`, which `float` reads. The file
    is never rewritten: a process that goes on with it appends, and its rows have another `attempt`. Readers take the
    last attempt of each step, as `zclip_jax.replay` does. What alarms find goes to `alarms.jsonl` beside
    `metrics.jsonl`, and beside another `NAME.jsonl` to `NAME.alarms.jsonl`.

    The file and its folder are made with the first row. Each row is one write, so that a killed process leaves all
    rows before it; a line that was cut short is ended before the next.

    Args:
      path: the file.
      config: of the run, in what JSON can hold; `{"config": config}` is the first line of a file that is new.

    Examples:
      >>> import tempfile, pathlib
      >>> from zclip_jax.monitor import JsonLines
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> log = JsonLines(path)
      >>> log.log_scalar("loss", 2.5, step=1)
      >>> log.log_scalar("loss", float("nan"), step=2)
      >>> log.close()
      >>> print(path.read_text(), end="")
      {"update": 1, "step": 1, "attempt": 0, "loss": 2.5}
      {"update": 2, "step": 2, "attempt": 0, "loss": "nan"}
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        stem = "" if self.path.stem == "metrics" else f"{self.path.stem}."
        first = None if config is None else _dumps({"config": config})  # complains of it right away
        self._rows = _Lines(self.path, first)
        self._alarms = _Lines(self.path.with_name(f"{stem}alarms.jsonl"))

    def log_row(self, row: Row) -> None:
        """Appends a row."""
        self._rows.append(_dumps(row))

    def log_alarm(self, finding: Row) -> None:
        """Appends what an alarm found to the file of alarms."""
        self._alarms.append(_dumps(finding))

    def last_row(self) -> Row | None:
        """The last whole row in the file; None where there is none."""
        return _last_row(self.path)

    def close(self) -> None:
        """Writes what was gathered, and closes the files."""
        try:
            super().close()
        finally:
            self._rows.close()
            self._alarms.close()


class _Lines:
    """A file that whole lines are appended to."""

    def __init__(self, path: Path, first: str | None = None) -> None:
        self.path, self.first = path, first
        self._file: io.FileIO | None = None

    def append(self, line: str) -> None:
        lines = [line]
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:  # somebody deleted it
            self.close()
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(size - 1, 0))
            if size == 0 and self.first is not None:
                lines = [self.first, line]
            elif self._file.read(1) not in (b"", b"\n"):  # cut short
                lines = ["", line]
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            while data:  # a disk that fills up takes a part, and then raises
                data = data[self._file.write(data) or 0 :]
        except BaseException:
            self.close()  # so that its end is looked at again
            raise

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def _dumps(x: Mapping[str, Any]) -> str:
    return json.dumps(finite_json(x), allow_nan=False)


def _last_row(path: Path) -> Row | None:
    """The last line that is a row with a step, of a file that may end in half a line."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        size, length = file.seek(0, os.SEEK_END), TAIL
        while True:
            start = max(size - length, 0)
            file.seek(start)
            lines = file.read(size - start).split(b"\n")
            rows = parse_lines(lines if start == 0 else lines[1:])  # whose first may lack its beginning
            for row in reversed(rows):
                if as_count(row.get("step")) is not None:
                    return row
            if start == 0:
                return None
            length *= 4
