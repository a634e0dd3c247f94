"""JSON, CSV, Parquet and TensorBoard in every shape: `read` gives the series back or tells what it could not know."""

import gzip
import json
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import given_back
from tests.dialects import Row
from tests.dialects_records import (
    SHAPES,
    Number,
    events,
    json_lines,
    json_list,
    parquet,
    plain,
    table,
    trainer_state,
)
from tests.given_back import (
    AGAIN,
    CUT,
    EXTENTS,
    RANKS,
    RENAMED,
    RUNS,
    STEPS,
    Log,
    Reading,
    assert_given_back_or_told,
    attempts,
    extent,
    joined,
    numberings,
    series,
    told,
)
from zclip_jax.replay.readers import Recording

TABLES = [name for name, shape in SHAPES.items() if not shape.nested]
FORMATS = {
    "JSON lines": json_lines,
    "JSON lines, gzip": lambda records: gzip.compress(json_lines(records), mtime=0),
    "JSON lines, strings": lambda records: json_lines(records, as_string=True),
    "JSON list": json_list,
    "JSON list, indented": lambda records: json_list(records, 2),
    "JSON lines, Windows": lambda records: json_lines(records).replace(b"\n", b"\r\n"),
    "JSON lines, UTF-16": lambda records: json_lines(records).decode().encode("utf-16"),
    "trainer state": trainer_state,
    "trainer state on one line": lambda records: trainer_state(records, None),
}
OF_TABLES = {
    "CSV": lambda records: table(records).encode(),
    "CSV, quoted": lambda records: table(records, quoted=True).encode(),
    "CSV, BOM": lambda records: table(records).encode("utf-8-sig"),
    "CSV, UTF-16": lambda records: table(records).encode("utf-16"),
    "CSV, Windows": lambda records: table(records).replace("\n", "\r\n").encode(),
    "CSV, blanks behind commas": lambda records: table(records).replace(",", ", ").encode(),
    "semicolons": lambda records: table(records, ";").encode(),
    "tabs": lambda records: table(records, "\t").encode(),
    "Parquet": parquet,
    "Parquet, strings": lambda records: parquet(
        [
            {name: str(value) if "norm" in name else value for name, value in record.items()}
            for record in records
        ]
    ),
}
ALL = FORMATS | OF_TABLES


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("dialects") / "recorded"


def fitting(form):
    names = TABLES if form in OF_TABLES or "state" in form else list(SHAPES)
    return [name for name in names if name != "index ahead" or form in OF_TABLES]


def log_of(content, readings, shape):
    return Log(content, readings, shape.steps, shape.loss, shape.refused)


@st.composite
def shapes_of(draw, form, *, steps=False):
    """A shape that this format can have; with `steps`, one that shows them."""
    names = [name for name in fitting(form) if SHAPES[name].steps or not steps]
    return SHAPES[draw(st.sampled_from(names))]


@EXTENTS
@pytest.mark.parametrize("form", ALL)
def test_each_shape(form, more, path):
    @extent(25 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings())))
        shape = data.draw(shapes_of(form))
        content = ALL[form]([shape.record(row) for row in rows])
        assert_given_back_or_told(path, log_of(content, [Reading(rows)], shape))


@EXTENTS
@pytest.mark.parametrize("form", ["JSON lines", "CSV", "Parquet", "trainer state"])
def test_several_attempts(form, more, path):
    @extent(30 * more)
    @given(st.data())
    def holds(data):
        runs, kind = data.draw(attempts(data.draw(numberings())))
        shape = data.draw(shapes_of(form))
        records = [shape.record(row) for run in runs for row in run]
        again = form == "CSV" and data.draw(st.booleans())
        content = table(records, header_again=len(runs[0])).encode() if again else ALL[form](records)
        assert_given_back_or_told(path, log_of(content, joined(runs, kind, shape.steps), shape))


@EXTENTS
@pytest.mark.parametrize("form", ["JSON lines", "CSV", "Parquet"])
def test_a_column_that_numbers_the_ranks(form, more, path):
    @extent(30 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings())))
        shape = data.draw(shapes_of(form, steps=True))
        name = data.draw(st.sampled_from(["rank", "process_index", "global_rank", "Rank", "process"]))
        size = data.draw(st.integers(2, 4))
        by_rank = [
            [row if r == 0 else row._replace(norm=f"{r}.5", value=r + 0.5) for row in rows]
            for r in range(size)
        ]
        records = [
            {name: r} | shape.record(by_rank[r][i])
            for i in range(len(rows))
            for r in data.draw(st.permutations(range(size)))
        ]
        readings = told([Reading(rows) for rows in by_rank], RANKS)
        assert_given_back_or_told(path, log_of(ALL[form](records), readings, shape))


@EXTENTS
def test_a_rank_that_never_changes_or_changes_with_each_step_is_no_process(more, path):
    @extent(20 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings())))
        form = data.draw(st.sampled_from(["JSON lines", "CSV", "Parquet"]))
        shape = data.draw(shapes_of(form, steps=True))
        name, of = data.draw(st.sampled_from([("rank", 0), ("rank", 3), ("stable_rank", 1), ("avg_rank", 7)]))
        records = [
            shape.record(row) | {name: of if name == "rank" else of * i + 2} for i, row in enumerate(rows)
        ]
        log = log_of(ALL[form](records), [Reading(rows)], shape)
        assert_given_back_or_told(path, log._replace(untold="ranks"))


@EXTENTS
@pytest.mark.parametrize("form", ["JSON lines", "CSV", "Parquet", "trainer state"])
def test_rows_of_other_kinds_between(form, more, path):
    @extent(40 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), min_size=5))
        shape = data.draw(shapes_of(form, steps=True))
        records = []
        for row in rows:
            records.append(shape.record(row))
            other = data.draw(st.sampled_from(["", "", "evaluation", "system", "end"]))
            if other == "evaluation":
                records.append({"epoch": 1, "step": row.step, "eval_loss": 2.5, "eval_grad_norm": 7.5})
            elif other == "system":
                records.append({"gpu": 81.5, "time": "10:00:01"})
            elif other == "end":
                records.append({"step": row.step, "train_loss": 2.5, "train_runtime": 61.5, "epoch": 1})
        if form == "JSON lines" and data.draw(st.booleans()):
            config = {
                "lr": 0.1,
                "grad_norm": 1.0,
                "steps": 1000,
                "text": "x" * data.draw(st.sampled_from([9, 70000])),
            }
            records.insert(0, data.draw(st.sampled_from([{"config": config}, {"args": config}])))
        assert_given_back_or_told(path, log_of(ALL[form](records), [Reading(rows)], shape))


@EXTENTS
@pytest.mark.parametrize("form", ["JSON lines", "CSV", "Parquet"])
def test_means_of_epochs_are_no_steps(form, more, path):
    @extent(20 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), min_size=6, max_size=12))
        each = data.draw(st.integers(2, 3))
        by_name = data.draw(st.booleans())  # the mean has a name of its own, as Lightning gives it, or none
        order = data.draw(st.sampled_from([1, -1]))
        step, mean = ("grad_norm_step", "grad_norm_epoch") if by_name else ("grad_norm", "grad_norm")
        records = []
        for i, row in enumerate(rows):
            named = [("epoch", i // each), (step, Number(row.norm)), ("step", row.step)]
            records.append(dict(named[::order]))
            if i % each == each - 1:
                named = [("epoch", i // each), (mean, 0.7071)]
                named += [("step", row.step)] if by_name else []
                records.append(dict(named[::order]))
        assert_given_back_or_told(path, Log(ALL[form](records), [Reading(rows)], loss=False))


NAMES = ["norm", "grad_norm", "gnorm", "train/grad_norm", "gradient_norm", "total_norm"]


@EXTENTS
@pytest.mark.parametrize("form", ["JSON lines", "CSV", "Parquet"])
def test_a_name_that_changes_in_mid_file(form, more, path):
    @extent(20 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), min_size=6, max_size=12))
        first, second = data.draw(st.permutations(NAMES))[:2]
        change = data.draw(st.integers(2, len(rows) - 2))
        records = [
            {"step": row.step, "loss": Number(row.loss), first if i < change else second: Number(row.norm)}
            for i, row in enumerate(rows)
        ]
        assert_given_back_or_told(path, Log(ALL[form](records), [Reading(rows, told=(RENAMED,))]))


@EXTENTS
@pytest.mark.parametrize("form", ["JSON lines", "CSV", "semicolons", "CSV, quoted"])
def test_a_cut_tail(form, more, path):
    @extent(50 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings())))
        shape = data.draw(shapes_of(form, steps=True))
        whole = ALL[form]([shape.record(row) for row in rows]).decode()
        start = whole.rstrip("\n").rindex("\n") + 1
        end = data.draw(st.integers(start + 1, len(whole)))
        glue = data.draw(st.sampled_from(["", "", "Killed\n", "slurmstepd: error: CANCELLED\n"]))
        content = whole[:end] + (glue if end < len(whole) - 1 else "")
        # A table may have its norm in the last row whole while the cell behind it is cut.
        readings = [Reading(rows, loose=True), Reading(rows[:-1], told=(f"{CUT}|left out|no norm",))]
        assert_given_back_or_told(path, log_of(content.encode(), readings, shape))


@EXTENTS
@pytest.mark.parametrize("spelling", ["decimal comma", "thousands", "EXPONENT", "signed", "np.float64(…)"])
def test_spellings_in_tables(spelling, more, path):
    @extent(15 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), spelling))
        quoted = data.draw(st.booleans())
        delimiter = data.draw(st.sampled_from([",", ";", "\t"]))
        records = [{"step": row.step, "grad_norm": row.norm, "loss": row.loss} for row in rows]
        content = table(records, delimiter, quoted).encode()
        readable = [row for row in rows if can_be_read(row.norm)]
        said = r"no number|comma|separator|not read"
        readings = [Reading(rows), Reading(readable, told=(said,))]
        assert_given_back_or_told(path, Log(content, readings, refused=said))


def can_be_read(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


@EXTENTS
def test_two_columns_of_one_name(more, path):
    @extent(20 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), odd=False))
        lines = ["step,grad_norm,loss,grad_norm", *(f"{r.step},{r.norm},{r.loss},7.5" for r in rows)]
        others = [row._replace(value=7.5) for row in rows]
        twice = (r"(2|two|several) .*columns|several columns|twice|same name|duplicate",)
        content = "".join(line + "\n" for line in lines).encode()
        assert_given_back_or_told(
            path, Log(content, [Reading(rows, told=twice), Reading(others, told=twice)])
        )


@EXTENTS
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.string(), pa.decimal128(20, 6), "struct"])
def test_types_of_parquet(kind, more, path):
    @extent(10 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), odd=False))
        if kind == pa.float32():
            rows = [row._replace(value=float(np.float32(row.value))) for row in rows]
        records = [{"step": row.step, "grad_norm": row.norm} for row in rows]
        if kind == pa.string():
            content = parquet(records)
        elif kind == "struct":
            content = parquet([{"step": row.step, "train": {"grad_norm": float(row.value)}} for row in rows])
        elif pa.types.is_decimal(kind):
            content = parquet([{"step": r.step, "grad_norm": Decimal(r.norm)} for r in rows], kind)
        else:
            content = parquet([{"step": r.step, "grad_norm": float(r.value)} for r in rows], kind)
        assert_given_back_or_told(path, Log(content, [Reading(rows)], loss=False))


@EXTENTS
def test_tensorboard(more, tmp_path):
    count = iter(range(10**9))

    @extent(25 * more)
    @given(st.data())
    def holds(data):
        numbering = data.draw(numberings())
        runs, kind = [data.draw(series(numbering))], "fresh"
        if data.draw(st.booleans()):
            runs, kind = data.draw(attempts(numbering))
        runs = [
            [
                row._replace(value=float(np.float32(row.value)), loss=repr(float(np.float32(row.loss))))
                for row in run
            ]
            for run in runs
        ]
        folder = Path(tmp_path, str(next(count)))
        folder.mkdir()
        purges = kind == "resumed" and data.draw(st.booleans())
        norm = data.draw(st.sampled_from(["train/grad_norm", "grad_norm", "grad_norm_step", "gradient_norm"]))
        for i, run in enumerate(runs):
            purged = run[0].step if purges and i else None
            events(str(folder / f"events.out.tfevents.{1000 + i}.host"), run, norm, "train/loss", purged)
        readings = joined(runs, kind)
        if purges:
            readings = [reading._replace(told=()) for reading in readings[:1]]
        assert_given_back_or_told(folder, Log(None, readings))


@EXTENTS
def test_a_config_inside_the_first_row_is_no_norm(more, path):
    @extent(15 * more)
    @given(st.data())
    def holds(data):
        rows = data.draw(series(data.draw(numberings()), odd=False))
        limits = data.draw(
            st.sampled_from([{"grad_norm": 1.0}, {"max_grad_norm": 1.0}, {"clip": {"grad_norm": 1.0}}])
        )
        key = data.draw(st.sampled_from(["config", "args", "hparams", "settings"]))
        first = {key: {"steps": 400000, "optimizer": limits}}
        records = [
            plain({"step": r.step, "loss": Number(r.loss), "train": {"grad_norm": Number(r.norm)}})
            for r in rows
        ]
        content = "".join(json.dumps(one) + "\n" for one in [first, *records]).encode()
        assert_given_back_or_told(path, Log(content, [Reading(rows)]))


ROWS = [Row(10 * i, str(norm), value=norm) for i, norm in enumerate([0.5, 0.25, 2.5], 1)]
READ = Recording(np.array([0.5, 0.25, 2.5]), np.array([10, 20, 30]), np.full(3, 2.5), "text log", "norm", 10)
WRONG = {
    "norm": {"norms": np.array([0.5, 0.25, 2.501])},
    "norm, with a note on something else": {
        "norms": np.array([0.5, 0.25, 2.501]),
        "notes": ("every 10th step is logged", "1 norm is zero, first at step 3"),
    },
    "norms left out": {"norms": np.array([0.5, 0.25]), "steps": np.array([10, 20]), "loss": np.full(2, 2.5)},
    "step": {"steps": np.array([10, 20, 31])},
    "loss": {"loss": np.array([2.5, 2.5, 2.0])},
    "no loss": {"loss": None},
    "cadence": {"cadence": 1},
    "told falsely": {"notes": ("the last line is cut off",)},
}


def read_as(path, monkeypatch, log, **fields):
    monkeypatch.setattr(given_back, "read", lambda path: READ._replace(**fields))
    assert_given_back_or_told(path, log)


def test_the_right_recording_is_accepted(path, monkeypatch):
    read_as(path, monkeypatch, Log(b"", [Reading(ROWS)], untold="cut off"))
    cut = Log(b"", [Reading(ROWS[:2], told=(CUT,))])
    two = {"norms": READ.norms[:2], "steps": READ.steps[:2], "loss": READ.loss[:2]}
    read_as(path, monkeypatch, cut, notes=("the last line is cut off",), **two)
    with pytest.raises(AssertionError, match="a note that says"):
        read_as(path, monkeypatch, cut, notes=("every 10th step is logged",), **two)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_recording_is_not_accepted(what, path, monkeypatch):
    with pytest.raises(AssertionError, match="in place of"):
        read_as(path, monkeypatch, Log(b"", [Reading(ROWS)], untold="cut off"), **WRONG[what])


TOLD = {
    STEPS: ["no steps in the log: rows are numbered from 0", "the bar's steps are rounded"],
    RUNS: ["3 runs in one file"],
    AGAIN: ["2 rows repeat an earlier step", "resumed at step 30"],
    CUT: ["the last line is cut off", "1 line is no JSON object"],
    RANKS: ["2 ranks log their rows"],
}


def test_what_tells_something_tells_nothing_else():
    others = ["every 2nd step is logged", "3 norms are not finite, first at step 4", "2 rows have no norm"]
    for what, notes in TOLD.items():
        assert all(re.search(what, note) for note in notes)
        strangers = others + [note for other, notes in TOLD.items() if other != what for note in notes]
        assert [note for note in strangers if re.search(what, note)] == []
