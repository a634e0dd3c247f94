"""What all readers collect into: the columns of a log that matter."""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from zclip_jax.replay.readers._names import loss_rank, norm_rank, run_of, step_rank
from zclip_jax.replay.readers._notes import (
    cadence_of,
    count,
    listing,
    notes_on_norms,
    notes_on_steps,
    shorten,
)
from zclip_jax.replay.readers._recording import Recording

LOOKED_FOR = "looked for a name like grad_norm, train/grad_norm or norm; choose another with --column"
LARGEST_STEP = 2.0**53  # above, float64 has no integers of its own


class Column:
    """The numbers under one name, and in which rows they stand."""

    def __init__(self) -> None:
        self.rows, self.values = array("q"), array("d")
        self.num_strings = self.num_wrong = 0
        self.first_wrong = ""  # what is there, but no number

    def append(self, row: int, value: Any) -> None:
        if type(value) is float:
            number = value
        elif value is None or value == "":
            return
        else:
            try:
                number = float(str(value) if isinstance(value, bool) else value)
            except (TypeError, ValueError):
                if told := str(value).strip():
                    self.num_wrong += 1
                    self.first_wrong = self.first_wrong or shorten(told, 30)
                return
            except OverflowError:  # an integer of more than 308 digits
                number = math.inf
            self.num_strings += type(value) is str and math.isfinite(number)
        self.rows.append(row)
        self.values.append(number)

    def at(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """The numbers in these rows, NaN where there is none."""
        full = np.full(num_rows, np.nan)
        full[np.asarray(self.rows, int)] = self.values
        return full[rows]


class Columns(dict[str, Column | None]):
    """Collects the norms, steps and losses of a log, row by row, and makes a `Recording` of them.

    It maps each name to its column, or to None where the name doesn't matter.

    Args:
      wanted: the name of the norm; None for the one that fits best.
      typed: numbers have a type of their own in this format, so that those in strings are odd.
    """

    def __init__(self, wanted: str | None, *, typed: bool = False) -> None:
        self.wanted, self.typed = wanted, typed
        self.num_rows = 0

    def __missing__(self, name: str) -> Column | None:
        matters = name == self.wanted or any(
            rank(name) is not None for rank in (norm_rank, step_rank, loss_rank)
        )
        self[name] = column = Column() if matters else None
        return column

    def add(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            column = self[name]
            if column is not None:
                column.append(self.num_rows, value)
        self.num_rows += 1

    def ranked(self, rank: Callable[[str], int | None]) -> list[tuple[int, str, Column]]:
        """The columns with numbers that have a rank, best first and then as they came."""
        found = [
            (place, name, column)
            for name, column in self.items()
            if column is not None and column.values and (place := rank(name)) is not None
        ]
        return sorted(found, key=lambda one: one[0])

    def norm(self) -> tuple[str, Column, list[str]]:
        """The name and numbers of the norm, and a note if others fit as well.

        Raises:
          ValueError: there is none.
        """
        ranked = self.ranked(
            norm_rank if self.wanted is None else lambda name: 0 if name == self.wanted else None
        )
        if not ranked:
            wrong = [c.first_wrong for n, c in self.items() if c and c.num_wrong and norm_rank(n) is not None]
            found = f"found {listing(list(self))}" if self else "found no names at all"
            found += f", with {wrong[0]!r} for a norm" if wrong else ""
            what = "gradient norm" if self.wanted is None else f"number under {self.wanted!r}"
            raise ValueError(f"no {what}: {found};\n{LOOKED_FOR}")
        best, name, column = ranked[0]
        equal = [other for rank, other, _ in ranked[1:] if rank == best]
        notes = []
        if equal:
            notes.append(
                f"{1 + len(equal)} norm columns: {name} (read), {listing(equal, 4)}; choose with --column"
            )
        return name, column, notes

    def recording(
        self, form: str, notes: Iterable[str] = (), settings: dict[str, Any] | None = None
    ) -> Recording:
        """What was collected, with notes on what is odd in it after the `notes` given."""
        name, norm, several = self.norm()
        rows = np.asarray(norm.rows, int)
        norms = np.asarray(norm.values)
        steps, on_numbering = self._steps(rows, run_of(name))
        cadence = cadence_of(steps)
        on_rows = []
        if norm.num_wrong:
            what = count(norm.num_wrong, "row has", "rows have")
            on_rows.append(f"{what} no number for a norm, first {norm.first_wrong!r}; left out")
        left_out = self.num_rows - rows.size - norm.num_wrong
        if left_out:
            on_rows.append(
                f"{count(left_out, 'row has no norm and is', 'rows have no norm and are')} left out"
            )
        if self.typed and norm.num_strings:
            on_rows.append(
                f"{count(norm.num_strings, 'norm is a string', 'norms are strings')}, read as numbers"
            )
        on_values = notes_on_steps(steps, cadence) + notes_on_norms(norms, steps)
        return Recording(
            norms=norms,
            steps=steps,
            loss=self._loss(rows, run_of(name)),
            format=form,
            column=name,
            cadence=cadence,
            notes=(*notes, *several, *on_rows, *on_numbering, *on_values),
            settings=settings or {},
        )

    def _beside(self, rank: Callable, rows: np.ndarray, run: str) -> list[tuple[str, np.ndarray]]:
        """The columns of that kind that have numbers in these rows, best first; none of other runs."""
        ranked = [(name, column) for _, name, column in self.ranked(rank) if run_of(name) in ("", run)]
        return [
            (name, column.at(rows, self.num_rows))
            for name, column in ranked
            if np.isin(rows, np.asarray(column.rows)).any()
        ]

    def _steps(self, rows: np.ndarray, run: str) -> tuple[np.ndarray, list[str]]:
        candidates = self._beside(step_rank, rows, run)
        numbered = {name: x[np.abs(x) < LARGEST_STEP] for name, x in candidates}
        restarts = {name: int((np.diff(x) < 0).sum()) for name, x in numbered.items()}
        # A step that starts anew each epoch is often beside one that doesn't.
        candidates.sort(key=lambda candidate: restarts[candidate[0]] > 0)
        if not candidates:
            return np.arange(rows.size), [
                "no steps in the log: rows are numbered from 0, and how often it was logged is unknown"
            ]
        name, numbers = candidates[0]
        notes = []
        for other, _ in candidates[1:]:
            if restarts[other] and not restarts[name]:
                back = count(restarts[other], "time")
                again = count(numbered[other].size - np.unique(numbered[other]).size, "row")
                notes.append(
                    f"{other} goes backwards {back} and repeats in {again}; {name} is read in its place"
                )
        known = np.abs(numbers) < LARGEST_STEP
        if not known.all():
            unnumbered = count(int((~known).sum()), "row has", "rows have")
            notes.append(f"{unnumbered} no step and count on from the row before")
        places = np.arange(rows.size)
        last_known = np.maximum.accumulate(np.where(known, places, 0))
        steps = np.where(known, numbers, 0).astype(int)
        return steps[last_known] + places - last_known, notes

    def _loss(self, rows: np.ndarray, run: str) -> np.ndarray | None:
        candidates = self._beside(loss_rank, rows, run)
        return candidates[0][1] if candidates else None
