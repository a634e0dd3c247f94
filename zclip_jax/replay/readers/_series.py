"""The last stage of every reader: from columns to a `Recording`."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np

from zclip_jax.replay.readers._choice import Choice, choose_norm, main_steps
from zclip_jax.replay.readers._columns import LARGEST_STEP, Column, Columns
from zclip_jax.replay.readers._names import (
    ABOVE,
    attempt_rank,
    epoch_rank,
    loss_rank,
    run_of,
    step_rank,
    words_of,
)
from zclip_jax.replay.readers._notes import cadence_of, count, notes_on_norms, notes_on_runs
from zclip_jax.replay.readers._processes import one_process
from zclip_jax.replay.readers._recording import Recording
from zclip_jax.replay.readers._runs import Order, order_rows

MOST = 0.8  # of the rows, that a step above them must be there for
MEANS = frozenset(("mean", "avg", "average", "epoch", "summary"))  # words of rows that are about many steps


def make_recording(
    columns: Columns, form: str, notes: Iterable[str] = (), settings: dict[str, Any] | None = None
) -> Recording:
    """What was collected, with notes on what is odd in it after the `notes` given.

    Raises:
      ValueError: there is no norm.
    """
    choice = choose_norm(columns)
    series = _Series(columns, choice)
    on_commas = series.settle_commas()
    told = [series.take_one_process(), series.leave_out_unnumbered(), series.leave_out_redrawn()]
    told.append(series.leave_out_means())
    steps, on_numbering = series.number()
    order, steps = series.split(steps)
    rows, norms = series.rows, series.norms
    starts = order.starts
    on_rows = [*_on_left_out(columns, choice), *on_commas]
    on_values = [*notes_on_runs(norms, steps, starts), *notes_on_norms(norms, steps, choice.name)]
    first = []
    if len(starts) > 1:
        places = ", ".join(f"{start:,}" for start in starts[1:6])
        more = f" and {len(starts) - 6} more" if len(starts) > 6 else ""
        first.append(
            f"{len(starts)} runs stand in this log, one after the other: the first begins in row 0, "
            f"the others in {places}{more}"
        )
    loss = series.beside(loss_rank)
    return Recording(
        norms=norms,
        steps=steps,
        loss=loss[0][1].at(rows, columns.num_rows) if loss else None,
        format=form,
        column=choice.name,
        cadence=cadence_of(steps, starts),
        notes=(
            *first,
            *notes,
            *choice.notes,
            *(note for notes in told for note in notes),
            *on_rows,
            *on_numbering,
            *([order.note] if order.note else []),
            *on_values,
        ),
        settings=settings or {},
        starts=starts,
    )


def _on_left_out(columns: Columns, choice: Choice) -> list[str]:
    notes = []
    num_wrong = sum(column.num_wrong for column in choice.columns)
    if num_wrong:
        first = next(column.first_wrong for column in choice.columns if column.num_wrong)
        what = count(num_wrong, "row has", "rows have")
        notes.append(f"{what} no number for a norm, first {first!r}; left out")
    left_out = columns.num_rows - choice.rows.size - num_wrong
    if left_out > 0 and columns.unit == "row":
        notes.append(f"{count(left_out, 'row has no norm and is', 'rows have no norm and are')} left out")
    num_strings = sum(column.num_strings for column in choice.columns)
    if columns.typed and num_strings:
        notes.append(f"{count(num_strings, 'norm is a string', 'norms are strings')}, read as numbers")
    return notes


class _Series:
    """The rows that have a norm, and fewer with each rule that leaves some out."""

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

    def settle_commas(self) -> list[str]:
        """Finds whether "12,345" is twelve thousand, by the other numbers of the log."""
        mine = self.choice.columns
        if not any(column.ambiguous for column in mine):
            return []
        others = [column for column in self.columns.values() if column is not None]
        decimal = any(column.commas for column in mine)
        if not decimal and not any(column.points for column in mine):
            decimal = any(column.commas for column in others)
        certain = decimal or any(column.points for column in others)
        for column in mine:
            column.settle_commas(decimal)
        self.norms = np.concatenate([np.asarray(column.values) for column in mine])
        example = f"{self.norms[np.isfinite(self.norms)][0]:.0f}"
        return [] if certain else [f"the comma in norms is taken to divide thousands, as in {example}"]

    def take_one_process(self) -> list[str]:
        steps = self.at(self.main[1]) if self.main else None
        keep, notes = one_process(self.columns, self.rows, steps)
        self.take(keep)
        return notes

    def leave_out_unnumbered(self) -> list[str]:
        """Leaves out rows without a step where most have one: means, and lines about something else."""
        numbered = {name: column.has(self.rows) for name, column in self.steps()}
        best = max(numbered, key=lambda name: numbered[name].sum(), default=None)
        if best is None or 2 * numbered[best].sum() <= self.rows.size or numbered[best].all():
            return []
        above = best.startswith(ABOVE)  # else a step on a line above is none of this row
        keep = np.any([has for name, has in numbered.items() if above or not name.startswith(ABOVE)], axis=0)
        self.take(keep)
        missing = int((~keep).sum())
        unit = self.columns.unit
        if not missing:
            return []
        return [f"{count(missing, f'{unit} has', f'{unit}s have')} {self.choice.name} but no step; left out"]

    def leave_out_redrawn(self) -> list[str]:
        """Keeps of a bar's rows of one step the last."""
        steps = [column for _, column in self.steps()]
        if not self.columns.drawn or not steps:
            return []
        numbers = np.stack([self.at(column) for column in steps])
        same = (np.diff(numbers) == 0) | (np.isnan(numbers[:, 1:]) & np.isnan(numbers[:, :-1]))
        again = same.all(0) & ~np.isnan(numbers[:, 1:]).all(0)
        again &= np.isin(self.rows[:-1], np.asarray(self.columns.drawn))
        self.take(np.append(~again, True))
        redrawn = int(again.sum())
        if not redrawn:
            return []
        return [f"a progress bar drew {count(redrawn, 'row')} anew; of each step the last is read"]

    def leave_out_means(self) -> list[str]:
        """Leaves out rows of another kind that stand beside a row of the same step, as means of an epoch do."""
        kinds = np.asarray(self.columns.kinds, int)[self.rows]
        frequency = np.bincount(kinds)
        if (frequency > 0).sum() < 2:
            return []
        rare = (2 * frequency <= frequency.max())[kinds]
        steps = self.steps()
        if steps:
            numbers = self.at(steps[0][1])
            same = (np.diff(numbers) == 0) & (np.diff(kinds) != 0)
            mean = rare & (np.append(False, same) | np.append(same, False))
        else:
            words = [_words_of_kind(self.columns.kind(kind)) for kind in range(frequency.size)]
            usual = words[int(np.argmax(frequency))]
            mean = rare & np.asarray([not MEANS.isdisjoint(own - usual) for own in words])[kinds]
        self.take(~mean)
        left_out = int(mean.sum())
        if not left_out:
            return []
        are = count(left_out, "row of another form is", "rows of another form are")
        return [f"{are} about steps that have a row of their own, as means of an epoch are; left out"]

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

    def split(self, steps: np.ndarray | None) -> tuple[Order, np.ndarray]:
        """The runs, and the steps of the rows that count."""
        epochs, attempts = (self.fullest(rank) for rank in (epoch_rank, attempt_rank))
        goes_on = self.main is not None and words_of(self.main[0]).startswith(("global_", "total_", "_step"))
        if epochs is None and steps is None:
            steps = np.arange(self.rows.size)
        order = order_rows(steps, epochs, attempts, goes_on)
        self.take(order.keep)
        if steps is None:
            ends = (*order.starts[1:], self.rows.size)
            steps = np.concatenate([np.arange(b - a) for a, b in zip(order.starts, ends, strict=True)])
            return order, steps
        return order, steps[order.keep]


def _words_of_kind(kind: Hashable) -> set[str]:
    return {word for name in (kind if isinstance(kind, tuple) else ()) for word in words_of(name).split("_")}
