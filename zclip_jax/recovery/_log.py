"""recovery.jsonl: one decision a line, with its evidence; only ever appended to."""

import json
import os
from pathlib import Path
from typing import Any

from zclip_jax._json import finite_json, parse_lines


class RecoveryLog:
    """A file of JSON lines that survives a crash in the middle of a line.

    Each entry is on the disk when `append` returns. A last line that was cut off is passed over by `read`, and
    ended before the next entry is written.

    Args:
      path: the file; it is made with the first entry.

    Examples:
      >>> import tempfile, pathlib
      >>> from zclip_jax.recovery import RecoveryLog
      >>> log = RecoveryLog(pathlib.Path(tempfile.mkdtemp()) / "recovery.jsonl")
      >>> log.append({"event": "rewind", "to": 100, "loss": float("nan")})
      >>> log.read()
      [{'event': 'rewind', 'to': 100, 'loss': 'nan'}]
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one entry; numbers that are not finite become "nan", "inf" and "-inf"."""
        line = json.dumps(finite_json(entry), allow_nan=False).encode() + b"\n"
        with open(self.path, "ab+") as file:
            if file.tell() and _last_byte(file) != b"\n":
                line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All whole entries, oldest first; none where there is no file."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return parse_lines(lines)


def _last_byte(file: Any) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
