"""What reading a log may give: the series that was written, or a word on what could not be known."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.dialects import PLAIN, SPELLINGS, WRAPPED, Dialect, Row
from zclip_jax.replay.readers import read

# What notes and errors say, in whatever words.
RANKS = r"ranks?\b|process|\bhosts?\b|\bworkers?\b"
RUNS = r"\bruns?\b(?! into)"
AGAIN = r"repeat|again|resum|attempt|twice|anew"
STEPS = r"\b(no|without|unknown|unclear|shortened|rounded)(\W+\w+){0,2}\W+steps?\b"
STEPS += r"|\bsteps?(\W+\w+){0,3}\W+(unknown|unclear|shortened|rounded|not)\b"
CUT = r"\bcut\b|line end|unfinished|incomplete|damaged|no number|no JSON|runs into"
RENAMED = r"renam|column|\bnames?\b|called"


def extent(max_examples):
    """Runs a property on so many examples, the same ones each time."""

    def run(holds):
        checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
        fast = settings(
            max_examples=max_examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=set(settings.default.phases) - {Phase.explain},  # it is slow
            suppress_health_check=checks,
        )
        fast(holds)()

    return run


MANY = 5  # times as many examples in the slow part
EXTENTS = pytest.mark.parametrize("more", [1, pytest.param(MANY, marks=pytest.mark.slow)])


LATE = 1000  # no run begins with a later step, but a resumed one may


class Reading(NamedTuple):
    """Something that may be read.

    Args:
      rows: with their norms, steps and losses.
      starts: where runs begin.
      told: what notes must say, patterns of which each must be found.
      loose: the step and loss of the last row may be unknown, if that is told.
    """

    rows: list[Row]
    starts: tuple[int, ...] = (0,)
    told: tuple[str, ...] = ()
    loose: bool = False


class Log(NamedTuple):
    """A log, what may be read from it, and whether it shows steps and losses."""

    content: bytes | None  # None where it is written already
    readings: list[Reading]
    steps: bool | None = True
    loss: bool = True
    refused: str = ""
    untold: str = ""


def same(got, expected) -> bool:
    return len(got) == len(expected) and bool(
        np.allclose(np.asarray(got, float), np.asarray(expected, float), 1e-12, 0, equal_nan=True)
    )


def differences(got, log: Log, reading: Reading) -> list[str]:
    """How a recording differs from a reading."""
    notes = " / ".join(got.notes)

    def told(what: str) -> bool:
        return re.search(what, notes, re.IGNORECASE) is not None

    rows, found = reading.rows, []
    norms = [row.value for row in rows]
    if not same(got.norms, norms):
        return [f"norms {norms}"]
    found += [f"a note that says /{what}/" for what in reading.told if not told(what)]
    known = len(rows) - (reading.loose and told(CUT))
    steps = [row.step for row in rows]
    if not (log.steps is not False and same(got.steps[:known], steps[:known])):
        if log.steps:
            found.append(f"steps {steps}")
        elif not told(STEPS):
            found.append("a note on steps")
    elif log.steps and known == len(rows) and len(set(np.diff(steps))) == 1 and steps[1] > steps[0]:
        found += [f"cadence {steps[1] - steps[0]}"] if got.cadence != steps[1] - steps[0] else []
    losses = [float(row.loss) for row in rows]
    if got.loss is None:
        found += [f"losses {losses}"] if log.loss else []
    elif not same(got.loss[:known], losses[:known]) and (log.loss or not np.isnan(got.loss).all()):
        found.append(f"losses {losses}")
    starts = tuple(getattr(got, "starts", ()))
    if (starts or (0,)) != reading.starts:
        found.append(f"starts {reading.starts}")
    elif len(starts) > 1:
        ends = (*starts[1:], len(rows))
        parts = [norms[start:end] for start, end in zip(starts, ends, strict=True)]
        if len(got.runs) != len(parts) or not all(map(same, [run.norms for run in got.runs], parts)):
            found.append(f"runs {parts}")
    if log.untold and told(log.untold):
        found.append(f"no note on /{log.untold}/")
    return found


def assert_given_back_or_told(path, log: Log, **options) -> None:
    """Reads the log; an error or recording must fit one of its readings.

    Raises:
      AssertionError: nothing fits, with what was written, what was read and what the nearest reading asks for.
    """
    if log.content is not None:
        path.write_bytes(log.content)
    text = (log.content or b"").decode(errors="replace")
    try:
        got = read(path, **options)
    except ValueError as error:
        if log.refused and re.search(log.refused, str(error), re.IGNORECASE):
            return
        raise AssertionError(f"{text}\nis refused: {error}") from None
    wanted = [differences(got, log, reading) for reading in log.readings]
    if all(wanted):
        nearest = "\n or ".join(" and ".join(one) for one in wanted)
        starts = getattr(got, "starts", None)
        raise AssertionError(
            f"{text}\ngives norms {got.norms.tolist()}, steps {got.steps.tolist()}, loss {got.loss}, "
            f"starts {starts}, cadence {got.cadence}, column {got.column!r}, notes {got.notes}\nin place of {nearest}"
        )


# Series: up to five digits of which up to five behind the point, so that each spelling keeps them.
numbers = st.builds(
    lambda digits, places: Decimal(digits).scaleb(-places).quantize(Decimal(1).scaleb(-places)),
    st.integers(1, 99999),
    st.integers(0, 5),
)
large = st.builds(lambda digits: Decimal(digits).scaleb(-1), st.integers(10000, 99999999))
ODD = {"nan": math.nan, "inf": math.inf, "NaN": math.nan, "-nan": math.nan, "0.0": 0.0}


@st.composite
def numberings(draw):
    """The first step, the distance between steps, and how many make an epoch."""
    every = draw(st.sampled_from([1, 1, 5, 10, 50]))
    first = draw(st.sampled_from([0, 1, every, every, 120_001]))
    return first, every, every * draw(st.integers(5, 80))


@st.composite
def series(draw, numbering, spelling="shortest", min_size=3, max_size=7, odd=True) -> list[Row]:
    """A run."""
    first, every, per_epoch = numbering
    spell = SPELLINGS[spelling]
    kind = st.one_of(numbers, large) if spelling not in PLAIN else numbers
    norms = draw(st.lists(kind, min_size=min_size, max_size=max_size))
    if spelling == "decimal comma, three places":
        # Only a number below 1 shows that the comma is that of decimals.
        norms = [Decimal("0.312"), *(max(norm, Decimal("0.001")) for norm in norms)]
    losses = draw(st.lists(st.integers(1000, 99999), min_size=len(norms), max_size=len(norms), unique=True))
    rows = []
    for i, (norm, loss) in enumerate(zip(norms, losses, strict=True)):
        text, value = spell(norm)
        step = first + i * every
        row = Row(step, text, f"{loss / 10000:.4f}", f"{(step + every) / per_epoch:.2f}")
        rows.append(row._replace(value=float(value)))
    if odd and draw(st.integers(0, 5)) == 0:
        place, text = draw(st.integers(1, len(rows) - 1)), draw(st.sampled_from(list(ODD)))
        before, _, behind = spelling.partition("…") if spelling in WRAPPED else ("", "", "")
        rows[place] = rows[place]._replace(norm=before + text + behind, value=ODD[text])
    return rows


@st.composite
def attempts(draw, numbering, spelling="shortest") -> tuple[list[list[Row]], str]:
    """The runs in one file, and whether they are `fresh` ones or one that was `resumed`."""
    runs = [draw(series(numbering, spelling))]
    kind = draw(st.sampled_from(["fresh", "resumed"]))
    for _ in range(draw(st.integers(1, 2))):
        if kind == "fresh":
            runs.append(draw(series(numbering, spelling)))
        else:
            ahead = len(runs[-1])
            first, every, per_epoch = numbering
            back = draw(st.integers(1, ahead))
            begins = (runs[-1][0].step - first) // every + back
            runs.append(draw(series((first + begins * every, every, per_epoch), spelling)))
    return runs, kind


def joined(runs: Sequence[list[Row]], kind: str, steps: bool | None = True) -> list[Reading]:
    """What may be read of these attempts."""
    rows = [row for run in runs for row in run]
    if len(runs) == 1:
        return [Reading(rows)]
    starts = tuple(sum(map(len, runs[:i])) for i in range(len(runs)))
    split = Reading(rows, starts, (RUNS,))
    last = {row.step: row for row in rows}
    kept = [row for i, run in enumerate(runs) for row in run if not _redone(row, runs[i + 1 :])]
    said = (AGAIN,) if len(last) < len(rows) else ()
    both = _kept_at_seams(runs)  # a step twice in a row may as well be a log that has it twice
    redone = [Reading(kept, told=said), Reading([last[step] for step in sorted(last)], told=said)]
    redone += [Reading(both, told=said)] if len(both) > len(kept) else []
    readings = [split] if kind == "fresh" else redone
    if kind == "fresh" and rows[0].step > LATE:  # what begins so late may as well be resumed
        readings += redone
    if steps is None:  # in a form that a reader need not know, if it says so
        readings += [Reading(rows, told=(STEPS,)), split]
    elif not steps:  # only epochs, rounded
        back = all(float(rows[i - 1].epoch) > float(rows[i].epoch) for i in starts[1:])
        unsplit = Reading(rows, told=(f"{AGAIN}|back" if back else STEPS,))
        readings += [split, *([unsplit] if kind == "resumed" or not back else [])]
    return readings


def _redone(row: Row, later: Sequence[list[Row]]) -> bool:
    return any(row.step >= run[0].step for run in later)


def _kept_at_seams(runs: Sequence[list[Row]]) -> list[Row]:
    """The last attempt of each step, and both where one ends with the step that the next begins with."""
    rows: list[Row] = []
    for run in runs:
        if rows and rows[-1].step > run[0].step:
            rows = [row for row in rows if row.step < run[0].step]
        rows = rows + run
    return rows


def told(readings: Sequence[Reading], *what: str) -> list[Reading]:
    return [reading._replace(told=(*reading.told, *what)) for reading in readings]


def with_last_cut(runs: Sequence[list[Row]], kind: str, dialect: Dialect, *, has_norm: bool) -> list[Reading]:
    """What may be read when the last row is cut off: it is whole where it can be, or left out and that is told."""
    whole = [reading._replace(loose=True) for reading in joined(runs, kind, dialect.steps)]
    shorter = [run for run in (*runs[:-1], runs[-1][:-1]) if run]
    return whole + told(joined(shorter, kind, dialect.steps), *([f"{CUT}|but no step"] if has_norm else []))
