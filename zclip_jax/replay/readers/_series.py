"""The rows of a log that have a norm, and fewer with each rule that leaves some out."""

from collections.abc import Callable

import numpy as np

from zclip_jax.replay.readers._choice import MOST, Choice, main_steps
from zclip_jax.replay.readers._columns import LARGEST_STEP, Column, Columns
from zclip_jax.replay.readers._names import ABOVE, attempt_rank, run_of, step_rank
from zclip_jax.replay.readers._notes import count


class Series:
    """The norms of a log, row by row, with the columns beside them.

    Args:
      columns: all that was collected.
      choice: which of it is the norm.
    """

    def __init__(self, columns: Columns, choice: Choice) -> None:
        self.columns, self.choice = columns, choice
        self.rows, self.norms = choice.rows, choice.norms
        self.run = run_of(choice.name)
        self.main = main_steps(columns, self.run)

    def take(self, keep: np.ndarray) -> None:
        if not keep.all():
            self.rows, self.norms = self.rows[keep], self.norms[keep]

    def at(self, column: Column) -> np.ndarray:
        return column.at(self.rows, self.columns.num_rows)

    def beside(self, rank: Callable[[str], int | None]) -> list[tuple[str, Column]]:
        """The columns of that kind that have numbers in these rows, best first; none of other runs."""
        ranked = [
            (name, column) for _, name, column in self.columns.ranked(rank) if run_of(name) in ("", self.run)
        ]
        has = {name: column.has(self.rows) for name, column in ranked}
        return [
            (name, column)
            for name, column in ranked
            if (has[name].mean() >= MOST if name.startswith(ABOVE) else has[name].any())
        ]

    def steps(self) -> list[tuple[str, Column]]:
        """The columns of steps, without those that say one number, as that of all steps."""
        found = self.beside(step_rank)
        # A step is a whole number, and changes.
        found = [(name, column) for name, column in found if _are_whole(self.at(column))]
        changing = [(name, column) for name, column in found if np.unique(self.at(column)).size > 1]
        found = changing or found
        most = max((column.has(self.rows).sum() for _, column in found), default=0)
        return [
            (name, column)
            for name, column in found
            if column.has(self.rows).sum() == most or np.unique(self.at(column)).size > 2
        ]

    def fullest(self, rank: Callable[[str], int | None]) -> np.ndarray | None:
        """The numbers of that kind that most rows have."""
        found = [self.at(column) for _, column in self.beside(rank)]
        return max(found, key=lambda x: np.isfinite(x).sum(), default=None)

    def number(self) -> tuple[np.ndarray | None, list[str]]:
        """The step of each row, None if the log has none, and notes on how it was found."""
        candidates = [(name, self.at(column), column) for name, column in self.steps()]
        rounded = [column.first_rounded for _, _, column in candidates if column.first_rounded]
        candidates = [one for one in candidates if np.isfinite(one[1]).any()]
        filled = max((int(np.isfinite(x).sum()) for _, x, _ in candidates), default=0)
        candidates = [one for one in candidates if 2 * np.isfinite(one[1]).sum() >= filled]
        numbered = {name: x[np.abs(x) < LARGEST_STEP] for name, x, _ in candidates}
        restarts = {name: int((np.diff(x) < 0).sum()) for name, x in numbered.items()}
        if not self.beside(attempt_rank):
            # A step that starts anew each epoch is often beside one that doesn't.
            candidates.sort(key=lambda one: (bool(one[2].first_rounded), restarts[one[0]] > 0))
        if not candidates:
            why = f"steps are rounded, as {rounded[0]!r} is" if rounded else "no step found"
            return None, [f"{why}: rows are numbered from 0, and how often it was logged is unknown"]
        name, numbers, _ = candidates[0]
        notes = []
        for other, _, _ in candidates[1:]:
            if restarts[other] and not restarts[name]:
                back = count(restarts[other], "time")
                again = count(numbered[other].size - np.unique(numbered[other]).size, "row")
                notes.append(
                    f"{other} goes backwards {back} and repeats in {again}; {name or 'the bar'} is read in its place"
                )
        self.main = (name, candidates[0][2])
        known = np.abs(numbers) < LARGEST_STEP
        for other, x, _ in candidates[1:]:
            both = known & np.isfinite(x)
            if not known.all() and (numbers[both] == x[both]).all():  # the same, or renamed in mid file
                notes += [] if both.any() else [f"{name} and {other} are read as one"]
                numbers = np.where(known, numbers, x)
                known = np.abs(numbers) < LARGEST_STEP
        if not known.all():
            unnumbered = count(int((~known).sum()), "row has", "rows have")
            notes.append(f"{unnumbered} no step and count on from the row before")
        places = np.arange(self.rows.size)
        last_known = np.maximum.accumulate(np.where(known, places, 0))
        steps = np.where(known, numbers, 0).astype(int)
        return steps[last_known] + places - last_known, notes


def _are_whole(x: np.ndarray) -> bool:
    return not (x[np.isfinite(x)] % 1).any()
