"""`TensorBoard`: scalars in event files."""

import os
from pathlib import Path

from zclip_jax.monitor._events import EventFile, has_events, scalars, start
from zclip_jax.monitor._position import Row
from zclip_jax.monitor._row_sink import RowSink


class TensorBoard(RowSink):
    """Writes rows to TensorBoard event files; it needs no package.

    Scalars are at their training step. After a rewind or a resume TensorBoard drops what it has of the steps that
    come again, as `purge_step` makes it do in other writers: it shows the last attempt alone. Each process writes a
    file of its own. Values are float32, as TensorBoard keeps them, NaN and infinity too.

    Args:
      folder: on a local disk; made with the first row. For one in a bucket (`gs://`), give the `Monitor` metrax's
        `TensorboardBackend` instead.

    Examples:
      >>> import tempfile
      >>> from zclip_jax.monitor import TensorBoard
      >>> log = TensorBoard(tempfile.mkdtemp())
      >>> log.log_scalar("loss", 2.5, step=1)
      >>> log.close()
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        if "://" in os.fspath(folder):
            raise ValueError(f"folder must be on a local disk, got {os.fspath(folder)!r}")
        self.folder = Path(folder)
        self._file: EventFile | None = None
        self._attempt: int | None = None
        self._purge: int | None = None  # the step that another attempt began at, until that is written

    def log_row(self, row: Row) -> None:
        """Writes the scalars of a row as one event."""
        if row["attempt"] != self._attempt:
            if self._attempt is not None or has_events(self.folder):
                self._purge = row["step"]
            self._attempt = row["attempt"]
        if self._file is not None and self._file.deleted:
            self._file.close()
            self._file = None
        if self._file is None:
            self._file = EventFile(self.folder)
        before = [] if self._purge is None else [start(self._purge)]
        values = {name: value for name, value in row.items() if name != "step"}
        self._file.write(*before, scalars(row["step"], values))
        self._purge = None

    def close(self) -> None:
        """Writes what was gathered, and closes the file."""
        try:
            super().close()
        finally:
            if self._file is not None:
                self._file.close()
            self._file = self._attempt = None
