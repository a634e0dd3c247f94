"""Which rows of a log are left out: of other processes, without a step, drawn anew, about many steps."""

import numpy as np

from zclip_jax.replay.readers._names import ABOVE, words_of
from zclip_jax.replay.readers._notes import count
from zclip_jax.replay.readers._processes import one_process
from zclip_jax.replay.readers._series import Series

MEANS = frozenset(("mean", "avg", "average", "epoch", "summary"))  # words of rows that are about many steps


def leave_out(series: Series) -> list[str]:
    """Leaves out what is none of the series, and tells it."""
    return [note for rule in (_of_other_processes, _unnumbered, _redrawn, _means) for note in rule(series)]


def _of_other_processes(series: Series) -> list[str]:
    steps = series.at(series.main[1]) if series.main else None
    keep, notes = one_process(series.columns, series.rows, steps)
    series.take(keep)
    return notes


def _unnumbered(series: Series) -> list[str]:
    """Rows without a step where most have one: means, and lines about something else."""
    numbered = {name: column.has(series.rows) for name, column in series.steps()}
    best = max(numbered, key=lambda name: numbered[name].sum(), default=None)
    if best is None or 2 * numbered[best].sum() <= series.rows.size or numbered[best].all():
        return []
    above = best.startswith(ABOVE)  # else a step on a line above is none of this row
    keep = np.any([has for name, has in numbered.items() if above or not name.startswith(ABOVE)], axis=0)
    series.take(keep)
    missing = int((~keep).sum())
    unit = series.columns.unit
    if not missing:
        return []
    return [f"{count(missing, f'{unit} has', f'{unit}s have')} {series.choice.name} but no step; left out"]


def _redrawn(series: Series) -> list[str]:
    """Rows of a bar that the next one replaces."""
    steps = [column for _, column in series.steps()]
    if not series.columns.drawn or not steps:
        return []
    numbers = np.stack([series.at(column) for column in steps])
    same = (np.diff(numbers) == 0) | (np.isnan(numbers[:, 1:]) & np.isnan(numbers[:, :-1]))
    again = same.all(0) & ~np.isnan(numbers[:, 1:]).all(0)
    again &= np.isin(series.rows[:-1], np.asarray(series.columns.drawn))
    series.take(np.append(~again, True))
    redrawn = int(again.sum())
    if not redrawn:
        return []
    return [f"a progress bar drew {count(redrawn, 'row')} anew; of each step the last is read"]


def _means(series: Series) -> list[str]:
    """Rows of another kind that stand beside a row of the same step, as means of an epoch do."""
    kinds = np.asarray(series.columns.kinds, int)[series.rows]
    frequency = np.bincount(kinds)
    if (frequency > 0).sum() < 2:
        return []
    rare = (2 * frequency <= frequency.max())[kinds]
    steps = series.steps()
    if steps:
        numbers = series.at(steps[0][1])
        same = (np.diff(numbers) == 0) & (np.diff(kinds) != 0)
        mean = rare & (np.append(False, same) | np.append(same, False))
    else:
        words = [_words_of_kind(series.columns.kind(kind)) for kind in range(frequency.size)]
        usual = words[int(np.argmax(frequency))]
        mean = rare & np.asarray([not MEANS.isdisjoint(own - usual) for own in words])[kinds]
    series.take(~mean)
    left_out = int(mean.sum())
    if not left_out:
        return []
    are = count(left_out, "row of another form is", "rows of another form are")
    return [f"{are} about steps that have a row of their own, as means of an epoch are; left out"]


def _words_of_kind(kind: tuple[str, ...]) -> set[str]:
    return {word for name in kind for word in words_of(name).split("_")}
