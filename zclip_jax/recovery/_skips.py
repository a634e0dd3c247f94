"""Which batches training leaves out, as ranges of absolute data indices."""

import json
import os
from bisect import bisect_right
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SkipRanges:
    """Data indices to leave out: half-open ranges, sorted, disjoint and never empty.

    A data index is the place of a batch in the uninterrupted pipeline, counted from 0. It is not the step: the
    two differ as soon as one batch was left out. Ranges that overlap or touch become one, so that two sets of
    the same indices are equal.

    Args:
      ranges: pairs `(start, stop)` with `0 <= start <= stop`, in any order; empty ones are dropped.

    Raises:
      ValueError: `ranges` holds anything else.

    Examples:
      >>> skips = SkipRanges([(10, 12), (3, 5)]) | SkipRanges([(5, 7)])
      >>> skips.ranges, 6 in skips, 7 in skips
      (((3, 7), (10, 12)), True, False)
      >>> (skips - SkipRanges([(4, 11)])).ranges, skips.after(3)
      (((3, 4), (11, 12)), 7)
    """

    ranges: Any = ()

    def __post_init__(self):
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(_pair(pair) for pair in self.ranges):
            if start == stop:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        object.__setattr__(self, "ranges", tuple(merged))

    def __contains__(self, data_index: int) -> bool:
        return self.after(data_index) != data_index

    def __or__(self, other: "SkipRanges") -> "SkipRanges":
        return SkipRanges((*self.ranges, *other.ranges))

    def __sub__(self, other: "SkipRanges") -> "SkipRanges":
        left = list(self.ranges)
        for start, stop in other.ranges:
            left = [
                (low, high)
                for first, last in left
                for low, high in ((first, min(last, start)), (max(first, stop), last))
                if low < high
            ]
        return SkipRanges(left)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        """How many batches are left out."""
        return sum(stop - start for start, stop in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"[{start}, {stop})" for start, stop in self.ranges) or "none"

    def after(self, data_index: int) -> int:
        """The first index from `data_index` on that is not left out."""
        place = bisect_right(self.ranges, data_index, key=lambda pair: pair[0]) - 1
        return max(data_index, self.ranges[place][1]) if place >= 0 else data_index

    def to_json(self) -> list[list[int]]:
        """The ranges as lists, for `json.dumps`."""
        return [list(pair) for pair in self.ranges]

    @classmethod
    def from_json(cls, value: Any) -> "SkipRanges":
        """The reverse of `to_json`."""
        return cls(value)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the ranges to a JSON file, which is whole at any time: the old one or the new one."""
        path = Path(path)
        beside = path.with_name(path.name + ".new")
        with open(beside, "w") as file:
            json.dump({"skip": self.to_json()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "SkipRanges":
        """Reads what `save` wrote, or no ranges where there is no such file.

        Raises:
          ValueError: the file holds anything else.
        """
        try:
            text = Path(path).read_text()
        except FileNotFoundError:
            return cls()
        try:
            return cls.from_json(json.loads(text)["skip"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} must hold skip ranges: {error}") from error


def _pair(value: Any) -> tuple[int, int]:
    try:
        start, stop = map(index, value)
    except (TypeError, ValueError):
        start, stop = -1, -1
    if not 0 <= start <= stop:
        raise ValueError(f"a skip range must be two integers 0 <= start <= stop, got {value!r}")
    return start, stop
