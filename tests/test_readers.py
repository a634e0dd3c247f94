"""Readers of recorded runs: every format, and what is odd in the wild, on small made-up files."""

import gzip
import json
import math
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorboardX
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.util import tensor_util

from zclip_jax.replay.readers import Recording, read
from zclip_jax.replay.readers._names import loss_rank, norm_rank, step_rank

NAN, INF = math.nan, math.inf
ROWS = [
    {"step": 1, "loss": 3.5, "grad_norm": 0.5},
    {"step": 2, "loss": 3.0, "grad_norm": 0.25},
    {"step": 3, "loss": 2.5, "grad_norm": 0.75},
]


def check(recording, norms, steps, notes=(), loss=None, **fields):
    assert (recording.norms.dtype, recording.steps.dtype) == (np.float64, np.int64)
    np.testing.assert_array_equal(recording.norms, np.asarray(norms, float))
    np.testing.assert_array_equal(recording.steps, steps)
    assert recording.notes == tuple(notes)
    if loss is not None:
        np.testing.assert_array_equal(recording.loss, loss)
    for name, value in fields.items():
        assert getattr(recording, name) == value


@pytest.fixture
def read_text(tmp_path):
    """Reads a file with this content, whose name says nothing about its format."""

    def read_content(content, **options):
        path = tmp_path / "recorded"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read(path, **options)

    return read_content


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


# Text, norms, steps and notes; the last column is the name of the norm.
NO_STEPS = "no step found: rows are numbered from 0, and how often it was logged is unknown"
TEXT = {
    "llm.c, compact": (
        "s:0 tel:11.0\ns:0 trl:10.5 lr:0.001 norm:14.5\ns:1 trl:10.4 lr:0.002 norm:0.27\ns:2 tel:3.0\ns:2 eval:0.3\n",
        [14.5, 0.27],
        [0, 1],
        [],
        "norm",
    ),
    "llm.c, z-scores in parentheses": (
        "| train data pattern | fineweb_*.bin |\n"
        "step    1/100 | loss 11.01 (+nanz)| norm 15.07 (+nanz)| lr 8.6e-07 | 3613.42 ms\n"
        "Once upon the norm 3 came\n"
        "step    2/100 | loss 10.95 (-1.5z)| norm 0.2241 (-0.23z)| lr 1.7e-06 | 3620.10 ms\n",
        [15.07, 0.2241],
        [1, 2],
        ["1 line has norm but no step; left out"],
        "norm",
    ),
    "nanoGPT": (
        "validation loss: 10.9\n"
        "step     0 | loss: 10.955010 | lr 6.0000e-04 | norm: 15.3420 | dt: 19152.47ms | tok/sec: 27374.43\n"
        "rank 1 sample 2: Hello, I'm a language model, and the norm 5 of it\n"
        "step     1 | loss: 10.014891 | lr 6.0000e-04 | norm: 3.8393 | dt: 394.95ms | tok/sec: 1327465.30\n",
        [15.342, 3.8393],
        [0, 1],
        ["1 line has norm but no step; left out"],
        "norm",
    ),
    "Megatron-LM": (
        " [2024-05-01 10:00:01] iteration       10/     100 | consumed samples:   640 | elapsed time per iteration"
        " (ms): 1234.5 | lm loss: 1.2E+00 | loss scale: 1.0 | grad norm: 1.234 | params norm: 812.5 | number of"
        " skipped iterations:   0 |\n"
        " [2024-05-01 10:00:09] iteration       20/     100 | consumed samples:  1280 | elapsed time per iteration"
        " (ms): 1234.5 | lm loss: 1.1E+00 | loss scale: 1.0 | grad norm: 0.9E+01 | params norm: 813.5 | number of"
        " skipped iterations:   0 |\n",
        [1.234, 9.0],
        [10, 20],
        ["every 10th step is logged"],
        "grad norm",
    ),
    "torchtitan, coloured": (
        "[rank0]:2024-05-01 10:00:01 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1  \x1b[33mgrad_norm:  1.2  "
        "\x1b[36mtps: 2,345\x1b[39m\n"
        "[rank0]:2024-05-01 10:00:02 - root - INFO - \x1b[31mstep:  2  \x1b[32mloss:  8.0  \x1b[33mgrad_norm:  1.1  "
        "\x1b[36mtps: 2,346\x1b[39m\n",
        [1.2, 1.1],
        [1, 2],
        [],
        "grad_norm",
    ),
    "Hugging Face, dicts between redrawn bars": (
        "  1%|#         | 1/100 [00:01<01:39, 1.0s/it]\r{'loss': 1.2, 'grad_norm': 0.5, 'learning_rate': 1e-05}\n"
        "  2%|#         | 2/100 [00:02<01:38, 1.0s/it]\r{'loss': '1.1', 'grad_norm': 'nan', 'learning_rate': 1e-05}\n"
        "{'eval_loss': 1.0, 'epoch': 1.0}\n",
        [0.5, NAN],
        [0, 1],
        [NO_STEPS, "1 norm is not finite, first at step 1"],
        "grad_norm",
    ),
    "tqdm, redrawn": (
        "\r  0%|          | 0/3 [00:00<?, ?it/s]"
        "\r 33%|###       | 1/3 [00:01<00:02,  1.0it/s, loss=3, grad_norm=9]"
        "\r 33%|###       | 1/3 [00:01<00:02,  1.0it/s, loss=3, grad_norm=0.5]"
        "\r 67%|######    | 2/3 [00:02<00:01,  1.0it/s, loss=3, grad_norm=0.5]"
        "\r 67%|######    | 2/3 [00:02<00:01,  1.0it/s, loss=2, grad_norm=0.25]\n",
        [0.5, 0.25],
        [1, 2],
        ["a progress bar drew 2 rows anew; of each step the last is read"],
        "grad_norm",
    ),
    "Windows line ends are no redrawing": (
        "step=1 grad_norm=0.5\r\nstep=1 grad_norm=0.25\r\nstep=2 grad_norm=0.125\r\n",
        [0.5, 0.25, 0.125],
        [1, 1, 2],
        ["1 row repeats an earlier step, first 1; kept in file order"],
        "grad_norm",
    ),
    "ranks interleaved": (
        "[rank1]: step 1 loss 3.0 grad_norm 0.5\n[rank0]: step 1 loss 3.1 grad_norm 0.4\n"
        "[rank1]: step 2 loss 2.0 grad_norm 0.3\n[rank0]: step 2 loss 2.1 grad_norm 0.2\n",
        [0.5, 0.3],
        [1, 2],
        ["2 ranks log their rows; those of rank 1 are read"],
        "grad_norm",
    ),
    "loguru, and other norms first": (
        "10:00:00.123 | INFO     | train:main:12 - step=7, param_norm=80.5, weight norm: 9.5, grad_norm=0.5\n"
        "10:00:00.456 | INFO     | train:main:12 - step=8, param_norm=80.6, weight norm: 9.4, grad_norm=-inf\n",
        [0.5, -INF],
        [7, 8],
        ["1 norm is not finite, first at step 8", "1 norm is negative, first at step 8"],
        "grad_norm",
    ),
    "a bare norm beside that of the weights": (
        "step 1 weight norm: 9.5 norm: 0.5\nstep 2 weight norm: 9.5 norm: 0.4\n",
        [0.5, 0.4],
        [1, 2],
        [],
        "norm",
    ),
    "losses of both kinds": (
        "iter 5 val loss 9.0 train loss 3.0 norm nan\niter 6 val loss 9.0 train loss nan norm 0.5\n",
        [NAN, 0.5],
        [5, 6],
        ["1 norm is not finite, first at step 5"],
        "norm",
    ),
    "a global step beside one that restarts": (
        "".join(
            f"epoch {e} step {s} global_step {2 * e + s} gnorm {e + s + 1}.5\n"
            for e in (0, 1)
            for s in (0, 1)
        ),
        [1.5, 2.5, 2.5, 3.5],
        [0, 1, 2, 3],
        ["step goes backwards 1 time and repeats in 2 rows; global_step is read in its place"],
        "gnorm",
    ),
    "tensors": (
        "step: 1 total grad norm: tensor(0.5, device='cuda')\nstep: 2 total grad norm: tensor(0.25, device='cuda')\n",
        [0.5, 0.25],
        [1, 2],
        [],
        "grad norm",
    ),
    "JSON within prefixes": (
        'INFO {"step": 1, "grad/norm/total": 0.5, "params/norm/total": 80.0}\n'
        'INFO {"step": 2, "grad/norm/total": NaN, "params/norm/total": 81.0}\n',
        [0.5, NAN],
        [1, 2],
        ["1 norm is not finite, first at step 2"],
        "grad/norm/total",
    ),
    "a norm cut at the end of the file": (
        "step 1 norm 0.5\nstep 2 norm 0.25\nstep 3 norm 0.1",
        [0.5, 0.25],
        [1, 2],
        ["the last line has no line end, so its norm 0.1 may be cut off and is left out"],
        "norm",
    ),
    "a line cut behind its norm": (
        "step 1 | norm 0.5 | 3.1 ms\nstep 2 | norm 0.25 | 3.",
        [0.5, 0.25],
        [1, 2],
        ["the last line is cut off or runs into other text: 'step 2 | norm 0.25 | 3.'"],
        "norm",
    ),
    "a line cut ahead of its norm": (
        "step 1 | loss 3.5 | norm 0.5\nstep 2 | loss 3.5 | norm 0.25\nstep 3 | lo",
        [0.5, 0.25],
        [1, 2],
        ["the last line is cut off or runs into other text: 'step 3 | lo'"],
        "norm",
    ),
    "another message glued behind": (
        "step 1 | norm 0.5 | 3.1 ms\nstep 2 | norm 0.25 | 3.error: job CANCELLED\n",
        [0.5, 0.25],
        [1, 2],
        ["the last line is cut off or runs into other text: 'step 2 | norm 0.25 | 3.error: job CANCELLED'"],
        "norm",
    ),
    "another message glued onto the number": (
        "step 1 | norm 0.5\nstep 2 | norm 0.2error: job CANCELLED\nstep 3 | norm 0.125\n",
        [0.5, 0.125],
        [1, 3],
        ["1 row has no number for a norm, first '0.2error'; left out", "every 2nd step is logged"],
        "norm",
    ),
    "a norm in a line without a step": (
        "step 1 grad_norm 0.5\nfinal grad_norm 0.4\nstep 2 grad_norm 0.25\n",
        [0.5, 0.25],
        [1, 2],
        ["1 line has grad_norm but no step; left out"],
        "grad_norm",
    ),
    "bytes that are no text": (
        b"step 1 norm 0.5 \xff\xfe\nstep 2 norm 0.25 \x00\n",
        [0.5, 0.25],
        [1, 2],
        [],
        "norm",
    ),
}


@pytest.mark.parametrize("name", TEXT)
def test_text(name, read_text):
    content, norms, steps, notes, column = TEXT[name]
    check(read_text(content), norms, steps, notes, format="text log", column=column)


def test_losses_of_text_are_those_of_training(read_text):
    assert read_text(TEXT["losses of both kinds"][0]).loss.tolist() == pytest.approx([3.0, NAN], nan_ok=True)
    assert read_text(TEXT["llm.c, compact"][0]).loss.tolist() == [10.5, 10.4]
    assert read_text(TEXT["Megatron-LM"][0]).loss.tolist() == [1.2, 1.1]
    assert read_text(TEXT["loguru, and other norms first"][0]).loss is None


def test_names_are_learned_however_late_the_rows_begin(read_text):
    header = "(ln_1): LayerNorm((768,), eps=1e-05)\nmax_grad_norm: 1.0\n" * 5000
    check(read_text(header + "step 4 grad_norm 0.5\nstep 5 grad_norm 0.25\n"), [0.5, 0.25], [4, 5])


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


def test_parquet(tmp_path):
    path = tmp_path / "recorded"
    table = {
        "step": [1, 2, 3, 4],
        "text": list("abcd"),
        "grad_norm": [0.5, None, NAN, 0.25],
        "loss": [3.5, 3, 2, 1.0],
    }
    pa.parquet.write_table(pa.table(table), path)
    notes = ["1 row has no norm and is left out", "1 step is missing in 1 gap, the first after step 1"]
    notes.append("1 norm is not finite, first at step 3")
    check(read(path), [0.5, NAN, 0.25], [1, 3, 4], notes, [3.5, 2, 1], format="Parquet", column="grad_norm")
    check(read(path, column="loss"), [3.5, 3, 2, 1], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="no number under 'text': found step, text, grad_norm, loss"):
        read(path, column="text")


def write_events(folder, scalars, start=0, **options):
    with tensorboardX.SummaryWriter(str(folder), **options) as writer:
        for i, values in enumerate(scalars):
            for tag, value in values.items():
                writer.add_scalar(tag, value, start + i)


def test_tensorboard(tmp_path, capfd):
    rows = [{"train/loss": 3.5, "train/grad_norm": i + 0.5, "lr": 0.1} for i in range(2500)]
    write_events(tmp_path / "logs" / "version_0", rows)
    norms = np.arange(2500) + 0.5
    fields = {"format": "TensorBoard", "column": "train/grad_norm"}
    check(read(tmp_path), norms, range(2500), loss=[3.5] * 2500, **fields)
    (file,) = (tmp_path / "logs" / "version_0").iterdir()
    check(read(file.rename(tmp_path / "recorded")), norms, range(2500), loss=[3.5] * 2500, **fields)
    check(read(tmp_path, column="lr"), [float(np.float32(0.1))] * 2500, range(2500))
    assert capfd.readouterr() == ("", "")


def test_tensorboard_resumed_nested_and_cut(tmp_path):
    rows = [{"loss": i + 3.0, "grad_norm": i + 0.5} for i in range(4)]
    write_events(tmp_path, rows, filename_suffix=".first")
    write_events(tmp_path, rows[::-1], start=2, filename_suffix=".second")
    first, second = sorted(tmp_path.iterdir())
    second.write_bytes(second.read_bytes()[:-3])
    size = len(second.read_bytes())
    recording = read(tmp_path)
    # The last attempt of a step counts, with its own loss; the one cut off has no norm.
    check(recording, [0.5, 1.5, 3.5, 2.5, 1.5], [0, 1, 2, 3, 4], recording.notes)
    np.testing.assert_array_equal(recording.loss, [3, 4, 6, 5, 4])
    cut, *others = recording.notes
    assert cut.startswith(f"{second.name} is cut off or damaged after ")
    assert cut.endswith(f" of {size:,} bytes")
    assert others == [
        "1 row has no norm and is left out",
        "the run was resumed 1 time, first from step 3 to 2: the last attempt counts, 2 earlier rows are left out",
    ]


def test_tensorboard_of_several_runs(tmp_path):
    write_events(tmp_path / "a-clip", [{"grad_norm": 0.5, "loss": 3.5}])
    write_events(tmp_path / "b" / "c", [{"grad_norm": 0.25, "loss": 3.0}])
    notes = ["2 norm columns: a-clip - grad_norm (read), b/c - grad_norm; choose with --column"]
    check(read(tmp_path), [0.5], [0], [*notes, "1 row has no norm and is left out"], [3.5])
    check(read(tmp_path, column="b/c - grad_norm"), [0.25], [0], ["1 row has no norm and is left out"], [3.0])


def test_tensorboard_scalars_that_are_tensors(tmp_path):
    write_events(tmp_path, [])
    (file,) = tmp_path.iterdir()
    writer = tensorboardX.record_writer.RecordWriter(str(file))
    for step, norm in enumerate([0.5, NAN]):
        event = event_pb2.Event(step=step, wall_time=1.0)
        tensors = {"grad_norm": np.float32(norm), "loss": np.float64(3.5), "norm/text": np.asarray(b"7")}
        tensors["grad_norm/histogram"] = np.ones((2, 3), np.float32)
        for tag, value in tensors.items():
            event.summary.value.append(
                summary_pb2.Summary.Value(tag=tag, tensor=tensor_util.make_tensor_proto(value))
            )
        writer.write(event.SerializeToString())
    writer.close()
    events = file.read_bytes()
    version = event_pb2.Event(file_version="brain.Event:2").SerializeToString()
    file.unlink()
    writer = tensorboardX.record_writer.RecordWriter(str(file))
    writer.write(version)
    writer.close()
    file.write_bytes(file.read_bytes() + events)
    check(read(file), [0.5, NAN], [0, 1], ["1 norm is not finite, first at step 1"], [3.5, 3.5])


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


ERRORS = {
    "empty": ("", "an empty file"),
    "blank": (" \n\n", "an empty file"),
    "binary": (bytes(range(256)) * 9, "binary data that is neither Parquet nor TensorBoard events"),
    "prose": (
        "Once upon a time\n",
        "no gradient norm in this text: found no named numbers, in lines like 'Once upon",
    ),
    "MaxText": (
        "hello\ncompleted step: 5, seconds: 1.1, TFLOP/s/device: 2.2, loss: 9.1\n",
        "found step, seconds, TFLOP/s/device, loss, in lines like 'completed step: 5, seconds",
    ),
    "only other norms": (
        "step 1 param_norm: 3.5 max_grad_norm=1.0 layer norm 2.0\n",
        "no gradient norm in this text",
    ),
    "table": (
        "step,loss,weight_norm\n1,2,3\n",
        "no gradient norm: found step, loss, weight_norm;\nlooked for",
    ),
    "blank column": ("step,grad_norm\n1,\n2,\n", "no gradient norm: found step, grad_norm;"),
    "no numbers": ("step;grad_norm\n1;0.5x\n", "found step, grad_norm, with '0.5x' for a norm;"),
    "stray quote": ('step,grad_norm\n1,0.5\n"2,0.5\n' + "3,0.5\n" * 30_000, "CSV that is damaged in line"),
    "clipped norms": (
        jsonl([{"clipped_grad_norm": 1.0, "grad_norm_after_clip": 1.0}]),
        "found clipped_grad_norm, gr",
    ),
    "many keys": (jsonl([{f"key{i}": i for i in range(12)}]), "found key0, .*, key7 and 4 more;"),
    "no rows": ('{"log_history": []}', "no gradient norm: found no names at all"),
    "another document": (
        '{\n"a": 1,\n"b": [{"grad_norm": 1.0}]\n}',
        "JSON without a list of rows, found a, b;",
    ),
    "cut document": (json.dumps({"log_history": ROWS}, indent=1)[:-20], "JSON that is cut off or damaged: "),
    "deep document": ('[{"a":\n' + "[" * 200_000, "JSON that is nested too deeply"),
    "deep line": (jsonl([{"a": 1}, {"b": 1}]) + "[" * 200_000, "no gradient norm: found a, b"),
    "cut Parquet": (b"PAR1" + b"x" * 40, "Parquet that is cut off or damaged: "),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_found(name, read_text, tmp_path):
    content, message = ERRORS[name]
    with pytest.raises(ValueError, match=message) as caught:
        read_text(content)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / 'recorded'}: ")
    assert told.count("\n") <= 1
    assert len(told) < 700


@pytest.mark.parametrize(
    "content",
    ["step,grad_norm\n1,0.5\n", jsonl(ROWS), json.dumps({"log_history": ROWS}), "step 1 grad_norm 0.5\n"],
)
def test_a_column_that_is_not_there(content, read_text):
    with pytest.raises(ValueError, match=r"no number (under|after) 'gnorm'.*: found step,.*grad_norm"):
        read_text(content, column="gnorm")


def test_what_is_no_log(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")
    (tmp_path / "notes.txt").write_text("grad_norm 0.5")
    with pytest.raises(
        ValueError, match="a folder without TensorBoard event files, but 1 file of another kind"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow.parquet", "pyarrow"), ("tensorboard", "tensorboard")]
)
def test_missing_packages_are_named(package, name, tmp_path, monkeypatch):
    if package == "tensorboard":
        write_events(tmp_path, [{"grad_norm": 0.5}])
        package = "tensorboard.backend.event_processing.event_file_loader"
        (path,) = tmp_path.iterdir()
    else:
        path = tmp_path / "recorded"
        path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {name}: pip install 'zclip-jax\[replay\]'"):
        read(path)


# From the best fitting to the worst.
FITTING = [
    ["raw_grad_norm", "learning/raw_grad_norm", "grad_norm_before_clip", "train/grad_norm_unclipped"],
    [
        "grad_norm",
        "train/grad_norm",
        "gradient_norm",
        "zclip/grad_norm",
        "global_grad_norm",
        "gradnorm",
        "Grad Norm",
        "optim/total_grad_norm",
        "train/gradients/global_norm",
        "grad/norm/total",
        "gnorm",
        "my-clip - grad_norm",
    ],
    ["defend_grad_norm", "actor/grad_norm"],
    ["norm", "total_norm", "train/norm"],
    ["grad_norm/layer_3", "gradients/mlp/norm"],
]
UNFIT = [
    "param_norm",
    "weight_norm",
    "update_norm",
    "layer_norm",
    "LayerNorm",
    "norm_eps",
    "max_grad_norm",
    "loss",
]
UNFIT += [
    "clip_grad_norm",
    "grad_norm_clip",
    "clipped_grad_norm",
    "zclip/threshold",
    "eval/grad_norm",
    "grad_norm_std",
]
UNFIT += [
    "grad_norm__MIN",
    "a - grad_norm__MAX",
    "rms_norm",
    "grad_norm_ratio",
    "the norm",
    "normal",
    "q_norm",
]


def test_names_of_norms():
    assert [{norm_rank(name) for name in names} for names in FITTING] == [{0}, {1}, {2}, {3}, {4}]
    assert {norm_rank(name) for name in UNFIT} == {None}


def test_names_of_steps_and_losses():
    steps = ["train/global_step", "Step", "iteration", "my run - _step"]
    assert sorted(steps, key=step_rank) == steps
    losses = ["loss", "train/loss", "lm loss", "trl"]
    assert sorted(losses, key=loss_rank) == losses
    assert {step_rank(name) for name in ("epoch", "steps_per_second", "num_steps")} == {None}
    assert {loss_rank(name) for name in ("eval_loss", "val/loss", "loss scale", "tel")} == {None}


def test_defaults_of_a_recording_are_shared_and_cannot_change():
    recording = Recording(np.zeros(1), np.zeros(1, int), None, "CSV", "norm")
    with pytest.raises(TypeError):
        recording.settings["alpha"] = 0.5
