"""What was added to a file since it was last read."""

import os
from pathlib import Path
from typing import Any

from zclip_jax._json import parse_lines

KNOWN = 256  # bytes at the start, and before the place read up to, by which a file is known again


class ReplacedError(Exception):
    """A file does not go on from where it was read."""


class Tail:
    """Reads the whole lines that were added to a file, and notices one that was truncated or replaced."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0
        self._node: tuple[int, int] | None = None
        self._head = self._end = b""

    def read(self, size: int) -> list[bytes]:
        """The next lines, about `size` bytes of them; none where the rest is no whole line yet.

        Raises:
          OSError: the file can't be read, or is gone.
          ReplacedError: it is another one than before, or holds something else.
        """
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            node = (status.st_dev, status.st_ino)
            if self._node is not None and (node != self._node or not self._is_known(file, status.st_size)):
                raise ReplacedError
            self._node = node
            file.seek(self.place)
            data = file.read(size)
            while data and b"\n" not in data and (more := file.read(size)):
                data += more
            data = data[: data.rfind(b"\n") + 1]
            self.place += len(data)
            self._head = (self._head + data[:KNOWN])[:KNOWN]
            self._end = (self._end + data)[-KNOWN:]
            return data.splitlines()

    def _is_known(self, file: Any, size: int) -> bool:
        if size < self.place:
            return False
        head = file.read(len(self._head))
        file.seek(self.place - len(self._end))
        return (head, file.read(len(self._end))) == (self._head, self._end)


class Objects:
    """The JSON objects on the lines of a file, as it grows; empty while there is none."""

    def __init__(self, path: Path) -> None:
        self.tail, self.objects = Tail(path), []

    def update(self) -> list[dict[str, Any]]:
        """All objects so far."""
        try:
            while lines := self.tail.read(1 << 20):
                self.objects += parse_lines(lines)
        except ReplacedError:
            self.tail, self.objects = Tail(self.tail.path), []
            return self.update()
        except FileNotFoundError:
            self.tail, self.objects = Tail(self.tail.path), []
        return self.objects
