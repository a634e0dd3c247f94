"""Which column is the norm: by what its name means, how many values it has, and whether it is of the whole."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from zclip_jax.replay.readers._columns import Column, Columns
from zclip_jax.replay.readers._names import ABOVE, MEAN, PART, is_clipped, norm_rank, run_of, step_rank
from zclip_jax.replay.readers._notes import count, listing

LOOKED_FOR = "looked for a name like grad_norm, train/grad_norm or norm; choose another with --column"
MOST = 0.8  # of the rows, that a step above them must be there for
SEVERAL = 3  # rows of a name that make it more than a setting


class Choice(NamedTuple):
    """The norms of a log.

    Args:
      name: the name under which they are, or most of them.
      columns: where they stand; several if the name changed.
      notes: what else there was to choose from.
    """

    name: str
    columns: tuple[Column, ...]
    notes: list[str]

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate([np.asarray(column.rows, int) for column in self.columns])

    @property
    def norms(self) -> np.ndarray:
        return np.concatenate([np.asarray(column.values) for column in self.columns])


class _Candidate(NamedTuple):
    rank: int
    name: str
    columns: tuple[Column, ...]
    note: str = ""

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate([np.asarray(column.rows, int) for column in self.columns])


def choose_norm(columns: Columns) -> Choice:
    """The column that is the norm, or was asked for.

    Raises:
      ValueError: there is none.
    """
    candidates = [
        _Candidate(rank, name, (column,)) for rank, name, column in columns.ranked(_rank_in(columns))
    ]
    if not candidates:
        raise ValueError(_nothing(columns))
    if columns.wanted is None:
        candidates = _join_renamed(candidates, columns)
    numbered = [_num_numbered(one, main_steps(columns, run_of(one.name))) for one in candidates]
    whole = [n for one, n in zip(candidates, numbered, strict=True) if one.rank < PART]
    enough = max(whole, default=0) / 2
    fitting = [
        one
        for one, n in zip(candidates, numbered, strict=True)
        if not whole or (one.rank < PART and n >= enough)
    ]
    best = min(fitting, key=lambda one: one.rank)
    notes = [best.note] if best.note else []
    equal = [one.name for one in fitting if one.rank == best.rank and one is not best]
    above = best.name.rpartition("/")[0]
    if equal and norm_rank(above) is not None and all(name.startswith(f"{above}/") for name in equal):
        notes.append(
            f"{above} has several numbers: {best.name} (read), {listing(equal, 4)}; choose with --column"
        )
    elif equal:
        notes.append(
            f"{1 + len(equal)} norm columns: {best.name} (read), {listing(equal, 4)}; choose with --column"
        )
    elif best.rank == PART:
        notes.append(f"{best.name} looks like the norm of a part, and there is none of the whole")
    elif best.rank == MEAN:
        notes.append(f"{best.name} looks like a mean over several steps, and there is no norm of each step")
    fewer = [one for one in candidates if one.rank < best.rank and one not in fitting]
    for one in fewer:
        notes.append(
            f"{one.name} has only {count(one.rows.size, 'value')} and is passed over for {best.name}, "
            f"which has {best.rows.size:,}"
        )
    if columns.wanted is not None and is_clipped(best.name):
        notes.append(f"{best.name} is a norm after clipping by its name, and a rule judges norms before")
    return Choice(best.name, best.columns, notes)


def main_steps(columns: Columns, run: str) -> tuple[str, Column] | None:
    """The column that numbers the steps of most rows of a run, and its name; None if there is none."""
    ranked = [one for one in columns.ranked(step_rank) if run_of(one[1]) in ("", run)]
    ranked = [
        one for one in ranked if not one[1].startswith(ABOVE) or len(one[2].rows) >= MOST * columns.num_rows
    ]
    ranked.sort(key=lambda one: bool(one[2].first_rounded))
    most = max((len(column.rows) for _, _, column in ranked), default=0)
    return next(((name, column) for _, name, column in ranked if 2 * len(column.rows) >= most), None)


def _rank_in(columns: Columns) -> Callable[[str], int | None]:
    wanted = columns.wanted
    if wanted is None:
        return norm_rank
    exact = [name for name in columns if name == wanted and _filled(columns[name])]
    dotted = [
        name
        for name in columns
        if name.replace("/", ".") == wanted.replace("/", ".") and _filled(columns[name])
    ]
    names = exact or dotted or [name for name in columns if columns.is_wanted(name)]
    return lambda name: 0 if name in names else None


def _filled(column: Column | None) -> bool:
    return column is not None and len(column.values) > 0


def _num_numbered(one: _Candidate, steps: tuple[str, Column] | None) -> int:
    """How many of its rows have a step, or, without steps, how many there are."""
    return one.rows.size if steps is None else int(steps[1].has(one.rows).sum())


def _join_renamed(candidates: list[_Candidate], columns: Columns) -> list[_Candidate]:
    """Makes one of those that follow each other: the same norm under another name."""
    joined: list[_Candidate] = []
    for one in sorted(candidates, key=lambda one: one.columns[0].rows[0]):
        steps = main_steps(columns, run_of(one.name))
        before = next(
            (other for other in reversed(joined) if _goes_on(other, one, steps, columns.num_rows)), None
        )
        if before is None:
            joined.append(one)
            continue
        larger = max(before, one, key=lambda part: part.rows.size)
        where = "" if steps is None else f" from step {steps[1].at(one.rows[:1], columns.num_rows)[0]:.0f} on"
        note = f"{before.name} is called {one.name}{where}; both are read as one"
        joined[joined.index(before)] = _Candidate(
            min(before.rank, one.rank),
            larger.name,
            (*before.columns, *one.columns),
            f"{before.note}; {note}" if before.note else note,
        )
    places = {id(one.columns[0]): place for place, one in enumerate(candidates)}
    return sorted(joined, key=lambda one: (one.rank, places[id(one.columns[0])]))


def _goes_on(before: _Candidate, after: _Candidate, steps: tuple[str, Column] | None, num_rows: int) -> bool:
    if {before.rank, after.rank} - {0, 1, 3} or run_of(before.name) != run_of(after.name):
        return False
    if before.rows[-1] >= after.rows[0]:
        return False
    if steps is None:
        return min(before.rows.size, after.rows.size) >= SEVERAL
    last, first = steps[1].at(np.asarray([before.rows[-1], after.rows[0]]), num_rows)
    if not np.isfinite([last, first]).all():
        return False
    return bool(last <= first) or min(before.rows.size, after.rows.size) >= SEVERAL


def _nothing(columns: Columns) -> str:
    found = f"found {listing(list(columns))}" if columns else "found no names at all"
    wrong = [c.first_wrong for n, c in columns.items() if c and c.num_wrong and norm_rank(n) is not None]
    found += f", with {wrong[0]!r} for a norm" if wrong else ""
    clipped = [name for name in columns if is_clipped(name)]
    found += f"; {clipped[0]} is none before clipping" if clipped else ""
    what = "gradient norm" if columns.wanted is None else f"number under {columns.wanted!r}"
    return f"no {what}: {found};\n{LOOKED_FOR}"
