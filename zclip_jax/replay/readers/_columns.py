"""What all readers collect into: the columns of a log that matter."""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zclip_jax.replay.readers._names import (
    attempt_rank,
    epoch_rank,
    matters,
    process_rank,
    step_rank,
)
from zclip_jax.replay.readers._notes import shorten
from zclip_jax.replay.readers._numbers import parse_number

LARGEST_STEP = 2.0**53  # above, float64 has no integers of its own


class Column:
    """The numbers under one name, and in which rows they stand.

    Args:
      whole: they count something, so that a number which is rounded is none; of "10/600" the 10 is read.
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self.rows, self.values = array("q"), array("d")
        self.num_strings = self.num_wrong = 0
        self.first_wrong = ""  # what is there, but no number
        self.first_rounded = ""
        self.num_several = 0  # that others follow
        self.first_several = ""
        self.ambiguous = array("q")  # places of "12,345", which may be 12.345
        self.points = self.commas = False  # whether decimals follow a point, and a comma

    def append(self, row: int, value: Any) -> None:
        if type(value) is str:
            number = self._parse(value)
        elif type(value) is float:
            number = value
        elif value is None:
            return
        else:
            number = self._convert(value)
        if number is not None:
            self.rows.append(row)
            self.values.append(number)

    def _convert(self, value: Any) -> float | None:
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        try:
            return float(str(value) if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            return self._parse(str(value))
        except OverflowError:  # an integer of more than 308 digits
            return math.inf

    def extend(self, first_row: int, texts: Sequence[str]) -> None:
        """Appends a number to each of the next rows."""
        try:
            if self.whole and "e" in "".join(texts).lower():
                raise ValueError("perhaps rounded")
            self.values.extend(map(float, texts))
        except ValueError:
            del self.values[len(self.rows) :]
            for row, text in enumerate(texts, first_row):
                self.append(row, text)
            return
        self.rows.extend(range(first_row, first_row + len(texts)))
        self.num_strings += len(texts)
        self.points = self.points or "." in texts[0]

    def _parse(self, text: str) -> float | None:
        try:
            number = float(text)  # most are, and this is 10 times faster
        except ValueError:
            number = self._parse_odd(text)
        else:
            self.points = self.points or "." in text
            if self.whole and "e" in text.lower():
                number = self._parse_odd(text)
        self.num_strings += number is not None and math.isfinite(number)
        return number

    def _parse_odd(self, text: str) -> float | None:
        if self.whole and "/" in text:
            done, _, total = text.partition("/")
            text = done if parse_number(total) else text
        read = parse_number(text)
        if read is None:
            told = shorten(text.strip(), 30)
            self.num_wrong += bool(told)
            self.first_wrong = self.first_wrong or told
            return None
        if self.whole and read.rounded:
            self.first_rounded = self.first_rounded or text.strip()
            return math.nan
        if read.comma == "either" and not self.whole:
            self.ambiguous.append(len(self.rows))
        self.commas = self.commas or read.comma == "decimal"
        self.points = self.points or (not read.comma and "." in text)
        return read.value

    def note_several(self, text: str) -> None:
        self.num_several += 1
        self.first_several = self.first_several or shorten(text, 60)

    def settle_commas(self, decimal: bool) -> None:
        """Divides what was read as thousands, where commas are for decimals."""
        if decimal:
            for place in self.ambiguous:
                self.values[place] /= 1000

    def at(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """The numbers in these rows, NaN where there is none."""
        full = np.full(num_rows, np.nan)
        full[np.asarray(self.rows, int)] = self.values
        return full[rows]

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Which of these rows have one, be it rounded."""
        mine = np.asarray(self.rows, int)
        there = np.zeros(1 + max(mine.max(initial=0), rows.max(initial=0)), bool)
        there[mine] = True
        return there[rows]


class Labels(Column):
    """What tells processes apart: any text, each numbered as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[str, int] = {}

    def append(self, row: int, value: Any) -> None:
        if value is None or value == "":
            return
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        self.rows.append(row)
        self.values.append(self.labels.setdefault(shorten(str(value), 40), len(self.labels)))

    def extend(self, first_row: int, texts: Sequence[str]) -> None:
        for row, text in enumerate(texts, first_row):
            self.append(row, text)


class Columns(dict[str, Column | None]):
    """Collects the norms, steps and losses of a log, row by row.

    It maps each name to its column, or to None where the name doesn't matter.

    Args:
      wanted: the name of the norm; None for the one that fits best.
      typed: numbers have a type of their own in this format, so that those in strings are odd.
      unit: what a row is called in notes; a "line" without a norm is not worth one.
    """

    def __init__(self, wanted: str | None, *, typed: bool = False, unit: str = "row") -> None:
        self.wanted, self.typed, self.unit = wanted, typed, unit
        self.num_rows = 0
        self.drawn = array("q")  # rows that a progress bar may draw anew
        self.kinds = array("q")  # of each row, what it has
        self._kinds: dict[tuple[str, ...], int] = {}

    def __missing__(self, name: str) -> Column | None:
        column: Column | None = None
        if self.is_wanted(name):
            column = Column()
        elif process_rank(name) is not None:
            column = Labels()
        elif matters(name):
            column = Column(
                whole=any(rank(name) is not None for rank in (step_rank, epoch_rank, attempt_rank))
            )
        self[name] = column
        return column

    def is_wanted(self, name: str) -> bool:
        """Whether it is the name asked for, also with points between its parts, or a part below it."""
        if self.wanted is None:
            return False
        return f"{_dotted(name)}.".startswith(f"{_dotted(self.wanted)}.")

    def add(self, row: Mapping[str, Any], kind: tuple[str, ...] = ()) -> None:
        """Takes a row; rows of one `kind` have the same names."""
        for name, value in row.items():
            column = self[name]
            if column is not None:
                column.append(self.num_rows, value)
        self.end_row(kind)

    def end_row(self, kind: tuple[str, ...] = ()) -> None:
        self.kinds.append(self._kinds.setdefault(kind, len(self._kinds)))
        self.num_rows += 1

    def extend(self, names: Sequence[str], rows: Sequence[Sequence[str]], kind: tuple[str, ...]) -> None:
        """Takes rows that have something under the same of these names, and "" under the others."""
        for name, texts in zip(names, zip(*rows, strict=True), strict=True):
            column = self[name]
            if column is not None and texts[0]:
                column.extend(self.num_rows, texts)
        number = self._kinds.setdefault(kind, len(self._kinds))
        self.kinds.extend([number] * len(rows))
        self.num_rows += len(rows)

    def kind(self, number: int) -> tuple[str, ...]:
        return next(kind for kind, place in self._kinds.items() if place == number)

    def ranked(self, rank: Callable[[str], int | None]) -> list[tuple[int, str, Column]]:
        """The columns with numbers that have a rank, best first and then as they came."""
        found = [
            (place, name, column)
            for name, column in self.items()
            if column is not None and column.values and (place := rank(name)) is not None
        ]
        return sorted(found, key=lambda one: one[0])


def flatten(row: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    """The names and values of a row, with what is nested named as "train/grad_norm"."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value


def _dotted(name: str) -> str:
    return name.replace("/", ".")
