"""CSV and TSV, exports of W&B among them."""

import csv
from collections.abc import Iterable, Iterator

from zclip_jax.replay.readers._columns import Columns
from zclip_jax.replay.readers._names import norm_rank
from zclip_jax.replay.readers._recording import Recording


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
        is_table = len(header) > 1 or (len(header) == 1 and norm_rank(header[0]) is not None)
        if is_table and not any(map(_is_number, header)) and any(map(_is_number, row)):
            return delimiter
    return None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def read_csv(lines: Iterable[str], column: str | None, delimiter: str) -> Recording:
    """A header and rows of cells."""
    columns = Columns(column)
    unfinished: list[str] = []
    reader = csv.reader(_without_cut_cell(lines, delimiter, unfinished), delimiter=delimiter)
    row: list[str] = []
    try:
        header = next(row for row in reader if row)
        places = [(name, place) for place, name in enumerate(header) if columns[name]]
        for row in reader:
            if row:
                columns.add({name: row[place] for name, place in places if place < len(row)})
    except csv.Error as error:
        raise ValueError(f"CSV that is damaged in line {reader.line_num}: {error}") from None
    notes = []
    if unfinished and (len(row) < len(header) or columns[header[-1]]):
        notes.append(f"the last line has no line end, so {unfinished[0]!r} may be cut off and is left out")
    return columns.recording("CSV", notes)


def _without_cut_cell(lines: Iterable[str], delimiter: str, unfinished: list[str]) -> Iterator[str]:
    """The lines; where the last has no line end, its last cell may be half a number and is blanked."""
    for line in lines:
        if line.endswith(("\n", "\r", '"', delimiter)):
            yield line
        else:
            start = line.rfind(delimiter) + 1
            unfinished.append(line[start:])
            yield line[:start]
