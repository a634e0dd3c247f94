"""Tells formats apart by what a file holds, whatever it is called."""

import functools
import gzip
import os
import re
import zlib
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from zclip_jax.replay.readers._csv import find_delimiter, read_csv
from zclip_jax.replay.readers._json import parse_object, read_document, read_lines
from zclip_jax.replay.readers._lines import open_text
from zclip_jax.replay.readers._parquet import read_parquet
from zclip_jax.replay.readers._recording import Recording
from zclip_jax.replay.readers._tensorboard import is_events, read_tensorboard
from zclip_jax.replay.readers._text import read_text

HEAD = 1 << 16  # bytes and characters, at least, that tell the format


def read(path: str | os.PathLike[str], *, column: str | None = None) -> Recording:
    r"""Reads the gradient norms of a recorded run.

    The format is found by content: trainer states of Hugging Face, JSON, JSON lines, CSV and TSV, Parquet,
    TensorBoard event files, exports of W&B, and what trainers print; text may be gzipped. Of several processes one is
    read, and of a resumed run the last attempt at each step. Otherwise norms stay in the order of the file, and what
    is odd is told in `notes`. Several runs in one file stand one after the other; `runs` of the result divides them.

    Args:
      path: a file, or a folder with TensorBoard event files in it or below.
      column: the name of the norm: a column, key or tag, or the words before it in text. None for the one whose
        name is nearest to the usual ones, norms before clipping first.

    Returns:
      A `Recording`. Rows without a norm are left out; NaN and infinite norms stay.

    Raises:
      ValueError: the file holds no norms, with what it does hold, or is damaged.
      OSError: it can't be opened, for example because there is none.
      ImportError: the format's package is not installed; `pip install 'zclip-jax[replay]'` has all.

    Examples:
      >>> import pathlib, tempfile
      >>> from zclip_jax.replay import read
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "train.log")
      ...     size = path.write_text("step 1 | loss 3.1 | norm 0.5\nstep 3 | loss 2.9 | norm 0.4\n")
      ...     recording = read(path)
      >>> recording.norms.tolist(), recording.steps.tolist(), recording.column
      ([0.5, 0.4], [1, 3], 'norm')
      >>> recording.notes
      ('every 2nd step is logged',)
    """
    try:
        return _read(Path(path), column)._replace(name=Path(path).resolve().name)
    # All but the first: a cut or damaged gzip.
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: {error}") from None


def _read(path: Path, column: str | None) -> Recording:
    if path.is_dir():
        return read_tensorboard(path, column)
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"PAR1"):
        return read_parquet(path, column)
    if is_events(head):
        return read_tensorboard(path, column)
    with open_text(path) as file:
        start = _start(file)
        file.seek(0)
        return _reader(start)(file, column)


def _start(file: TextIOWrapper) -> str:
    """The first lines, at least two, each whole."""
    start = file.read(HEAD)
    if start.count("\0") + start.count("\ufffd") > len(start) / 10:
        raise ValueError("binary data that is neither Parquet nor TensorBoard events")
    while start and len(_lines(start)) < 3 and (line := file.readline()):
        start += line
    return start + file.readline()


def _lines(text: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def _reader(start: str) -> Callable[[TextIOWrapper, str | None], Recording]:
    """What reads text that starts so."""
    lines = _lines(start)
    if not lines:
        raise ValueError("an empty file")
    num_objects = sum(parse_object(line) is not None for line in lines)
    if re.match(r'\s*(\{\s*["}]|\[\s*[{\]])', start) and (
        2 * num_objects < len(lines) or '"log_history"' in lines[0]
    ):
        return read_document
    if 2 * num_objects >= len(lines):
        return read_lines
    if delimiter := find_delimiter(lines):
        return functools.partial(read_csv, delimiter=delimiter)
    return read_text
