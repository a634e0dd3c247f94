"""Readers of CSV, JSON, JSON lines and gzipped files, on small made-up ones."""

import gzip
import json
import math

import pytest

from tests.reading import NO_STEPS, ROWS, check, jsonl, read_text
from zclip_jax.replay import read

NAN, INF = math.nan, math.inf
__all__ = ["read_text"]  # a fixture


TABLES = {
    "commas": ("step,loss,grad_norm\n1,3.5,0.5\n2,3.0,0.25\n", [0.5, 0.25], [1, 2], []),
    "decimal commas": ("step;grad_norm\n1;0,5\n2;0,25\n", [0.5, 0.25], [1, 2], []),
    "semicolons, quoted": ('"step";"grad_norm"\n"1";"0.5"\n"2";"0.25"', [0.5, 0.25], [1, 2], []),
    "tabs, BOM": ("\ufeffgrad_norm\tstep\n0.5\t1\n0.25\t2\n", [0.5, 0.25], [1, 2], []),
    "Windows": ("step,grad_norm\r\n1,0.5\r\n\r\n2,0.25\r\n", [0.5, 0.25], [1, 2], []),
    "one column": ("grad_norm\n0.5\n0.25\n", [0.5, 0.25], [0, 1], [NO_STEPS]),
    "blanks": (
        "loss,grad_norm,step,eval_loss\n3.5,0.5,20,\n,,20,2.0\n3.0, ,40,\n3.0,0.25,60.0,\n",
        [0.5, 0.25],
        [20, 60],
        ["2 rows have no norm and are left out", "every 40th step is logged"],
    ),
    "NaN, Inf, header again": (
        "step,grad_norm\n1,nan\n2,-Inf\nstep,grad_norm\n2,inf\n",
        [NAN, -INF, INF],
        [1, 2, 2],
        [
            "1 row has no number for a norm, first 'grad_norm'; left out",
            "1 row repeats an earlier step, first 2; kept in file order",
            "3 norms are not finite, first at step 1",
            "1 norm is negative, first at step 2",
        ],
    ),
    "a norm cut at the end": (
        "step,grad_norm\n1,0.5\n2,0.25\n3,0.1",
        [0.5, 0.25],
        [1, 2],
        [
            "the last line has no line end, so '0.1' may be cut off and is left out",
            "1 row has no norm and is left out",
        ],
    ),
    "another column at the end": ("grad_norm,step,lr\n0.5,1,0.1\n0.25,2,0.1", [0.5, 0.25], [1, 2], []),
    "W&B": (
        '"Step","my, run - train/grad_norm","my, run - train/grad_norm__MIN","my, run - train/grad_norm__MAX"\n'
        '"10","0.5","0.4","0.6"\n"20","0.25","0.2","0.3"\n',
        [0.5, 0.25],
        [10, 20],
        ["every 10th step is logged"],
    ),
    "W&B, several runs": (
        '"Step","a-clip - train/grad_norm","a-clip - train/grad_norm__MIN","b - train/grad_norm"\n'
        "1,0.5,0.5,0.75\n2,,,0.8\n3,0.25,0.25,0.9\n",
        [0.5, 0.25],
        [1, 3],
        [
            "2 norm columns: a-clip - train/grad_norm (read), b - train/grad_norm; choose with --column",
            "1 row has no norm and is left out",
            "every 2nd step is logged",
        ],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_csv(name, read_text):
    content, norms, steps, notes = TABLES[name]
    check(read_text(content), norms, steps, notes, format="CSV")


def test_a_loss_of_another_run_is_not_this_ones(read_text):
    table = '"Step","a - loss","b - grad_norm","b - loss"\n1,9,0.5,3.5\n2,9,0.25,3.0\n'
    check(read_text(table), [0.5, 0.25], [1, 2], loss=[3.5, 3.0])


def test_json_lines_of_every_sort(read_text):
    content = (
        "\ufeff"
        + jsonl(ROWS[:1])
        + "\nnot JSON\n[1]\n"
        + '{"step": 2, "loss": 3.0, "grad_norm": "0.25"}\n{"step": 2, "eval_loss": 3.0}\n'
        + '{"step": 3, "loss": null, "grad_norm": "nan"}\n{"step": 4, "grad_norm": null}\n'
        + '{"step": 5, "grad_norm": "-inf"}\n{"step": 6, "grad_norm": "?"}\n{"step": 6, "grad_norm": true}\n'
        + '{"step": 7, "grad_norm": NaN}\n{"step": 8, "grad_n'
    )
    check(
        read_text(content),
        [0.5, 0.25, NAN, -INF, NAN],
        [1, 2, 3, 5, 7],
        [
            "the last line is cut off and left out",
            "2 lines are no JSON objects and are left out, first 'not JSON'",
            "2 rows have no number for a norm, first '?'; left out",
            "2 rows have no norm and are left out",
            "1 norm is a string, read as numbers",
            "2 steps are missing in 2 gaps, the first after step 3",
            "3 norms are not finite, first at step 3",
            "1 norm is negative, first at step 5",
        ],
        loss=[3.5, 3.0, NAN, NAN, NAN],
        format="JSON lines",
    )


def test_the_last_of_json_lines_needs_no_line_end(read_text):
    check(read_text(jsonl(ROWS).rstrip()), [0.5, 0.25, 0.75], [1, 2, 3], loss=[3.5, 3.0, 2.5])


def test_history_of_wandb(read_text):
    rows = [
        {"_step": 2 * i, "_timestamp": 1.7e9 + i, "train/grad_norm": norm, "train/loss": 3.0}
        for i, norm in enumerate([0.5, 0.25, 0.75])
    ]
    rows.insert(1, {"_step": 1, "_timestamp": 1.7e9, "eval/loss": 2.0})
    notes = ["1 row has no norm and is left out", "every 2nd step is logged"]
    check(read_text(jsonl(rows)), [0.5, 0.25, 0.75], [0, 2, 4], notes, column="train/grad_norm", cadence=2)


def test_a_step_that_does_not_restart_is_preferred(read_text):
    rows = [{"step": i % 3, "_step": i, "grad_norm": 0.5 + i} for i in range(6)]
    notes = ["step goes backwards 1 time and repeats in 3 rows; _step is read in its place"]
    check(read_text(jsonl(rows)), [0.5, 1.5, 2.5, 3.5, 4.5, 5.5], range(6), notes)
    for row in rows:
        del row["_step"]
    notes = [
        "2 runs stand in this log, one after the other: the first begins in row 0, the others in 3",
    ]
    recording = read_text(jsonl(rows))
    check(recording, [0.5, 1.5, 2.5, 3.5, 4.5, 5.5], [0, 1, 2, 0, 1, 2], notes, starts=(0, 3))


def test_of_a_resumed_run_the_last_attempt_counts(read_text):
    steps = [10, 20, 30, 40, 30, 40, 70, 80]
    rows = [{"step": step, "grad_norm": float(i)} for i, step in enumerate(steps)]
    notes = [
        "the run was resumed 1 time, first from step 40 to 30: the last attempt counts, 2 earlier rows are left out",
        "every 10th step is logged",
        "2 steps are missing in 1 gap, the first after step 40",
        "1 norm is zero, first at step 10",
    ]
    check(
        read_text(jsonl(rows)), [0, 1, 4, 5, 6, 7], [10, 20, 30, 40, 70, 80], notes, cadence=10, starts=(0,)
    )


@pytest.mark.parametrize("first", [0, None])
def test_the_last_step_alone_again_is_another_attempt(read_text, first):
    """A log that tells of attempts from its first resume on only, too."""
    places = [(1, first), (2, first), (3, first), (3, 1), (4, 1), (4, 2), (1, 3), (2, 3)]
    rows = [
        {"step": step, "attempt": attempt, "grad_norm": i + 1.0} for i, (step, attempt) in enumerate(places)
    ]
    rows = [{name: x for name, x in row.items() if x is not None} for row in rows]
    for end, norms in ((5, [1, 2, 4, 5]), (6, [1, 2, 4, 6]), (8, [7, 8])):
        recording = read_text(jsonl(rows[:end]))
        assert recording.norms.tolist() == norms
        assert recording.starts == (0,)
    # Without attempts, a step may have several rows.
    assert read_text(jsonl([{"step": s, "grad_norm": 1.0} for s in (1, 2, 3, 3, 4)])).norms.size == 5


def test_rows_without_a_step_count_on(read_text):
    rows = [
        {"grad_norm": 1.0},
        {"step": 7, "grad_norm": 2.0},
        {"grad_norm": 3.0},
        {"step": 1e300, "grad_norm": 4.0},
    ]
    notes = [
        "3 rows have no step and count on from the row before",
        "6 steps are missing in 1 gap, the first after step 0",
    ]
    check(read_text(jsonl(rows)), [1, 2, 3, 4], [0, 7, 8, 9], notes)
    check(read_text(jsonl([{"grad_norm": 1.0}, {"grad_norm": 2.0}])), [1, 2], [0, 1], [NO_STEPS])
    rows = [{"step": step, "grad_norm": 1.0} for step in (1e308, -1e308)]
    check(read_text(jsonl(rows)), [1, 1], [0, 1], ["2 rows have no step and count on from the row before"])


@pytest.mark.parametrize(
    ("number", "expected"), [("10", "10th"), ("11", "11th"), ("2", "2nd"), ("3", "3rd"), ("21", "21st")]
)
def test_cadence(number, expected, read_text):
    rows = [{"step": int(number) * i, "grad_norm": 0.5} for i in range(4)]
    check(
        read_text(jsonl(rows)),
        [0.5] * 4,
        range(0, 4 * int(number), int(number)),
        [f"every {expected} step is logged"],
    )


def test_our_own_metrics(read_text):
    config = {
        "run_dir": "runs/a",
        "steps": 3,
        "warmup": 40,
        "clip": "zclip",
        "max_grad_norm": None,
        "z_thresh": 3.0,
    }
    config |= {"clip_warmup": 10, "alpha": 0.9, "patience": None}
    rows = [
        {"step": i, "loss": 3.0, "zclip/grad_norm": norm, "zclip/threshold": "inf", "zclip/clip_scale": 1.0}
        for i, norm in enumerate([0.5, "nan", 0.25], 1)
    ]
    recording = read_text(jsonl([{"config": config}, *rows]))
    check(recording, [0.5, NAN, 0.25], [1, 2, 3], ["1 norm is not finite, first at step 2"], [3.0] * 3)
    assert recording.column == "zclip/grad_norm"
    assert recording.settings == {
        "max_grad_norm": None,
        "z_thresh": 3.0,
        "warmup_steps": 10,
        "alpha": 0.9,
        "patience": None,
    }


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_trainer_states(indent, whole, read_text):
    history = [
        *ROWS[:2],
        {"step": 2, "eval_loss": 2.0},
        ROWS[2] | {"grad_norm": NAN},
        {"step": 4, "grad_norm": None},
    ]
    document = {"best_metric": None, "log_history": history, "max_steps": 4} if whole else history
    notes = ["2 rows have no norm and are left out", "1 norm is not finite, first at step 3"]
    form = "Hugging Face trainer state" if whole else "JSON list"
    recording = read_text(json.dumps(document, indent=indent))
    check(recording, [0.5, 0.25, NAN], [1, 2, 3], notes, [3.5, 3.0, 2.5], format=form, column="grad_norm")


def test_a_list_with_a_row_on_each_line(read_text):
    lines = ",\n".join(map(json.dumps, ROWS))
    check(read_text(f"[\n{lines}\n]\n"), [0.5, 0.25, 0.75], [1, 2, 3])
    check(
        read_text(f"[\n{lines},\n7\n]\n"), [0.5, 0.25, 0.75], [1, 2, 3], ["1 entry is no row and is left out"]
    )


def test_gzip(read_text):
    packed = gzip.compress(jsonl(ROWS).encode())
    check(read_text(packed), [0.5, 0.25, 0.75], [1, 2, 3])
    with pytest.raises(ValueError, match="end-of-stream"):
        read_text(packed[:-9])


def test_the_column_may_be_chosen(read_text):
    table = "step,attack_grad_norm,defend_grad_norm,reward\n1,0.5,0.25,7\n2,1.5,1.25,8\n"
    notes = ["2 norm columns: attack_grad_norm (read), defend_grad_norm; choose with --column"]
    check(read_text(table), [0.5, 1.5], [1, 2], notes)
    check(read_text(table, column="defend_grad_norm"), [0.25, 1.25], [1, 2])
    check(read_text(table, column="reward"), [7, 8], [1, 2])
    log = "step 1 norm 0.5 param_norm 9.5\nstep 2 norm 0.25 param_norm 9.5\n"
    check(read_text(log, column="param_norm"), [9.5, 9.5], [1, 2])


@pytest.mark.parametrize("form", ["lines", "list", "trainer state"])
def test_a_name_that_stands_twice_in_an_object(tmp_path, form):
    rows = [f'{{"step": {i}, "grad_norm": 0.5, "loss": 2.0, "grad_norm": {i}.25}}' for i in (1, 2)]
    whole = "[" + ",".join(rows) + "]"
    text = {"lines": "\n".join(rows) + "\n", "list": whole, "trainer state": f'{{"log_history": {whole}}}'}
    path = tmp_path / "log.json"
    path.write_text(text[form])
    recording = read(path)
    assert recording.norms.tolist() == [1.25, 2.25]
    assert recording.notes == ("grad_norm stands twice in a row: the last value is read",)
