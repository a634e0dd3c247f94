"""Logs of several processes: one is enough, since all log the same norm."""

import re

import numpy as np

from zclip_jax.replay.readers._columns import Columns, Labels
from zclip_jax.replay.readers._names import LAUNCHER, process_rank, words_of
from zclip_jax.replay.readers._notes import count

BALANCED = 0.1  # by how much processes differ in their number of rows


def one_process(columns: Columns, rows: np.ndarray, steps: np.ndarray | None) -> tuple[np.ndarray, list[str]]:
    """Which of the rows to read, as a mask, and a note if several processes log theirs.

    A process logs the same steps as the others, beside them. What changes from step to step is none.

    Args:
      columns: where the labels are.
      rows: those with a norm, ascending.
      steps: their steps, NaN where there is none; None if the log has no steps.
    """
    keep, notes = np.ones(rows.size, bool), []
    for _, name, column in columns.ranked(process_rank):
        if not isinstance(column, Labels) or len(column.labels) < 2:
            continue
        labels = np.nan_to_num(column.at(rows[keep], columns.num_rows), nan=-1).astype(int)
        at = None if steps is None else steps[keep]
        if np.unique(labels).size < 2 or not _are_processes(
            labels, at, name == LAUNCHER, _are_counted(column)
        ):
            continue
        values, first, sizes = np.unique(labels, return_index=True, return_counts=True)
        most = sizes.max()
        read = values[np.argmin(np.where(sizes == most, first, rows.size))]
        label = next((label for label, code in column.labels.items() if code == read), "none")
        keep[np.flatnonzero(keep)[labels != read]] = False
        kind = words_of(name) if words_of(name) in ("rank", "worker", "process", "run", "host") else ""
        what = f"{values.size} {kind}s log" if kind else f"{count(values.size, 'value')} of {name} log"
        of = f"{kind or name} {label}"
        notes.append(f"{what} their rows; those of {of} are read")
    return keep, notes


def _are_processes(labels: np.ndarray, steps: np.ndarray | None, launched: bool, counted: bool) -> bool:
    values, sizes = np.unique(labels, return_counts=True)
    if steps is None or not np.isfinite(steps).any():
        if launched and 2 * values.size <= labels.size:
            return bool((np.diff(labels) != 0).sum() >= values.size)
        balanced = sizes.max() - sizes.min() <= max(1, BALANCED * sizes.max())
        return bool(2 * values.size <= labels.size and balanced and (np.diff(labels) != 0).mean() > 0.5)
    # Beside which rows there is another of the same step and another label.
    order = np.lexsort((np.arange(labels.size), np.nan_to_num(steps, nan=-1.0, posinf=-1.0, neginf=-1.0)))
    same = (np.diff(steps[order]) == 0) & (np.diff(labels[order]) != 0)
    if not launched:
        same &= np.diff(order) <= 4 * values.size
    beside = np.zeros(labels.size, bool)
    beside[order[1:][same]] = beside[order[:-1][same]] = True
    others = labels != values[np.argmax(sizes)]
    changes = (np.diff(labels) != 0).sum()
    if changes < values.size and not counted:  # one after the other: it may be the same run, started again
        return False
    if beside[others].mean() >= 0.5:
        return True
    return bool(changes < values.size and _overlap(labels, steps, values))


def _overlap(labels: np.ndarray, steps: np.ndarray, values: np.ndarray) -> bool:
    """Whether blocks of rows, one a label, are of the same steps."""
    first = set(steps[labels == values[0]].tolist())
    shared = [len(first & set(steps[labels == value].tolist())) for value in values[1:]]
    return min(shared) >= 0.9 * len(first)


def _are_counted(column: Labels) -> bool:
    """Whether labels end in small numbers, which a process keeps when it is started again."""
    numbers = [re.fullmatch(r"(?:[A-Za-z_.:-]|\d+,)*?(\d{1,4})", label) for label in column.labels]
    return all(numbers) and max(int(found[1]) for found in numbers if found) < 10 * len(numbers)
