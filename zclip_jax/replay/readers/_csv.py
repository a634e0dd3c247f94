"""CSV and TSV, exports of W&B among them."""

import csv
import itertools
from collections.abc import Iterable, Iterator

from zclip_jax.replay.readers._columns import Columns
from zclip_jax.replay.readers._last_stage import make_recording
from zclip_jax.replay.readers._names import norm_rank
from zclip_jax.replay.readers._numbers import parse_number
from zclip_jax.replay.readers._recording import Recording

BLOCK = 1 << 8  # rows that are converted at once
NO_NAME = frozenset("<>{}=|\x1b")  # what stands in no name of a column, but in bars and what else is printed


def find_delimiter(lines: list[str]) -> str | None:
    """What divides the cells of the table that begins with these lines; None if they are no table."""
    for delimiter in ",;\t":
        try:
            rows = list(csv.reader(lines[:2], delimiter=delimiter))
        except csv.Error:
            continue
        if len(rows) < 2 or len(rows[0]) != len(rows[1]):
            continue
        header, row = rows
        if any(NO_NAME.intersection(cell) for cell in header):
            continue
        is_table = len(header) > 1 or (len(header) == 1 and norm_rank(header[0]) is not None)
        if is_table and not any(map(parse_number, header)) and any(map(parse_number, row)):
            return delimiter
    return None


def read_csv(lines: Iterable[str], column: str | None, delimiter: str) -> Recording:
    """A header and rows of cells."""
    columns = Columns(column)
    unfinished: list[str] = []
    reader = csv.reader(_without_cut_cell(lines, delimiter, unfinished), delimiter=delimiter)
    row: list[str] = []
    try:
        header, notes = _names(next(row for row in reader if row), columns)
        places = [place for place, name in enumerate(header) if columns[name] is not None]
        names = [header[place] for place in places]
        block: list[list[str]] = []  # rows with the same cells blank
        filled: tuple[bool, ...] = ()
        for row in reader:
            if not row:
                continue
            cells = [row[place] if place < len(row) else "" for place in places]
            there = tuple(map(bool, cells))
            if block and (there != filled or len(block) == BLOCK):
                columns.extend(names, block, tuple(itertools.compress(names, filled)))
                block = []
            filled = there
            block.append(cells)
        if block:
            columns.extend(names, block, tuple(itertools.compress(names, filled)))
    except csv.Error as error:
        raise ValueError(f"CSV that is damaged in line {reader.line_num}: {error}") from None
    if unfinished and (len(row) < len(header) or columns[header[-1]] is not None):
        notes.append(f"the last line has no line end, so {unfinished[0]!r} may be cut off and is left out")
    return make_recording(columns, "CSV", notes)


def _names(header: list[str], columns: Columns) -> tuple[list[str], list[str]]:
    """The names of the columns, each another, and a note on those that were there twice."""
    names: list[str] = []
    notes = []
    for name in map(str.strip, header):
        times = 1 + sum(other == name or other.startswith(f"{name} (") for other in names)
        if times == 2 and columns[name] is not None:
            notes.append(
                f"several columns are called {name}: the first is read, and the next called {name} (2)"
            )
        names.append(name if times == 1 else f"{name} ({times})")
    return names, notes


def _without_cut_cell(lines: Iterable[str], delimiter: str, unfinished: list[str]) -> Iterator[str]:
    """The lines; where the last has no line end, its last cell may be half a number and is blanked."""
    for line in lines:
        if line.endswith(("\n", "\r", '"', delimiter)):
            yield line
        else:
            start = line.rfind(delimiter) + 1
            unfinished.append(line[start:])
            yield line[:start]
