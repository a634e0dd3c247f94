"""Logs that the first version misread: each test bears the number of its fault, and prints what it reads now."""

import json

import numpy as np
import pytest
import tensorboardX

from tests.reading import jsonl, reads, same, told
from zclip_jax.replay.readers import read

__all__ = ["reads"]  # a fixture


def bar(step, total, **values):
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{step}/{total} [00:01<00:09, 9.0it/s, {shown}]\r"


def test_17_a_bar_that_shortens_its_steps(reads):
    norms = [0.5, 4.0, 0.5]
    content = "".join(
        bar(step, 300000, global_step="1.2e+5", gradient_norm=norm)
        for step, norm in zip(range(120001, 120004), norms, strict=True)
    )
    same(reads(17, content), norms, [120001, 120002, 120003], notes=())


@pytest.mark.parametrize("short", ["1.2e+5", "120K", "0.12M", "1.2E5"])
def test_17_a_rounded_step_is_none(short, reads):
    content = "".join(f"global_step={short}, gradient_norm={norm}\r" for norm in (0.5, 4.0, 0.5))
    recording = reads(17, content)
    same(recording, [0.5, 4.0, 0.5], [0, 1, 2])
    told(recording, "rounded", short)


def test_18_separators(reads):
    same(reads(18, "step 2 | loss 3.1 | grad norm 12,345\n"), [12345.0], [2])
    same(reads(18, "step 2 | loss 3.1 | grad norm 0,27\n"), [0.27], [2])
    same(reads(18, "step 1,234 | loss 3.1 | grad norm 0.5\n"), [0.5], [1234])
    # A comma for decimals makes that of all others.
    same(reads(18, "step 1 norm 0,5\nstep 2 norm 1,234\nstep 3 norm 0,271\n"), [0.5, 1.234, 0.271])
    recording = reads(18, "step 1 norm 1,234\nstep 2 norm 5,271\n")
    same(recording, [1234.0, 5271.0])
    told(recording, "comma", "thousands")


def test_18_separators_in_tables(reads):
    same(reads(18, 'step,grad_norm,loss\n1,"12,345",3.1\n2,"1,000",3.2\n'), [12345.0, 1000.0], [1, 2])
    same(reads(18, "step;grad_norm\n1;0,5\n2;12,25\n"), [0.5, 12.25], [1, 2])
    same(reads(18, jsonl([{"step": "1,200", "grad_norm": "12,345.5"}])), [12345.5], [1200])


@pytest.mark.parametrize(
    "line",
    [
        "clipped norm 1.0 unclipped norm {}",
        "clipped grad norm 1.0 | grad norm {}",
        "post-clip norm 1 | pre-clip norm {}",
        "pre-clip norm {} | post-clip norm 1",
        "grad_norm_clipped=1.0, grad_norm={}",
        "grad norm (clipped): 1.0, grad norm (raw): {}",
        "norm after clipping 1.0 | norm before clipping {}",
        "grad norm 1.0 | raw grad norm {}",
        "max norm 1.0 | norm {}",
        "param norm 1.0 norm {}",
    ],
)
def test_19_the_norm_before_clipping(line, reads):
    content = "".join(f"step {i} | {line.format(i + 4.5)}\n" for i in range(3))
    same(reads(19, content), [4.5, 5.5, 6.5], [0, 1, 2])


@pytest.mark.parametrize(
    "name", ["clipped norm", "post-clip norm", "grad norm after clipping", "clipped_grad_norm"]
)
def test_19_only_norms_after_clipping(name, reads):
    content = "".join(f"step {i} | {name} 1.0\n" for i in range(9))
    with pytest.raises(ValueError, match=rf"no gradient norm.*{name}"):
        reads(19, content)
    told(reads(19, content, column=name), "after clipping")


def test_19_equal_norms(reads):
    recording = reads(19, "".join(f"step {i} | norm 1.0\n" for i in range(9)))
    same(recording, [1.0] * 9)
    told(recording, "all 9 norms are 1", "after clipping")


RANKS = {
    "torchrun": "[default{rank}]:step {step} | loss 3.1 | norm {norm}\n",
    "rank": "[rank{rank}]: step {step} | loss 3.1 | norm {norm}\n",
    "srun": "{rank}: step {step} | loss 3.1 | norm {norm}\n",
    "Ray": "(Worker pid=10{rank}, ip=10.0.0.1) step {step} | loss 3.1 | norm {norm}\n",
    "pdsh": "worker-{rank}: step {step} | loss 3.1 | norm {norm}\n",
    "mpirun": "[1,{rank}]<stdout>:step {step} | loss 3.1 | norm {norm}\n",
    "in words": "2024-05-01 10:00:01 [Rank {rank}] step {step} | loss 3.1 | norm {norm}\n",
    "as a number": "step {step} | rank {rank} | loss 3.1 | norm {norm}\n",
    "JSON": '{{"step": {step}, "rank": {rank}, "grad_norm": {norm}}}\n',
    "JSON, hosts": '{{"step": {step}, "host": "node-{rank}", "grad_norm": {norm}}}\n',
    "CSV": "{step},{rank},{norm}\n",
}


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("order", ["interleaved", "swapped", "one after the other"])
def test_20_ranks(name, order, reads):
    rows = [(step, rank) for step in range(9) for rank in range(4)]
    if order == "swapped":
        rows = [(step, (rank + step) % 4) for step, rank in rows]
    elif order == "one after the other":
        rows.sort(key=lambda row: row[1])
    content = "step,rank,grad_norm\n" if name == "CSV" else ""
    content += "".join(RANKS[name].format(step=step, rank=rank, norm=step + rank / 8) for step, rank in rows)
    recording = reads(20, content)
    if order == "one after the other" and name == "Ray":  # these may be the same process, started again
        same(recording, [step + rank / 8 for step, rank in rows], starts=(0, 9, 18, 27))
        return
    same(recording, np.arange(9.0) + recording.norms[0], range(9), starts=(0,))
    told(recording, "log their rows; those of")


@pytest.mark.parametrize("what", ["stable rank", "avg rank", "rank", "mean_rank", "worker", "device"])
def test_20_what_changes_from_step_to_step_is_no_process(what, reads):
    content = "".join(f"step {i} | norm {i}.5 | {what} {90 - i // 3}\n" for i in range(30))
    same(reads(20, content), np.arange(30) + 0.5, range(30), notes=())
    rows = [{"step": i, "grad_norm": i + 0.5, what: 9 - i % 4} for i in range(30)]
    same(reads(20, jsonl(rows)), np.arange(30) + 0.5, range(30), notes=())


def test_21_wrapped_numbers(reads):
    content = "".join(f"step={i} grad_norm=np.float64({i}.4) lr=0.1\n" for i in range(3))
    same(reads(21, content), [0.4, 1.4, 2.4], [0, 1, 2])
    same(reads(21, content, column="grad_norm"), [0.4, 1.4, 2.4], [0, 1, 2])
    rows = [{"step": i, "grad_norm": f"np.float64({i / 8})"} for i in range(4)]
    same(reads(21, jsonl(rows)), np.arange(4) / 8, range(4))
    content = "step,grad_norm\n" + "".join(f'{i},"tensor({i / 8}, device=0)"\n' for i in range(4))
    same(reads(21, content), np.arange(4) / 8, range(4))


def test_21_a_function_is_no_wrapper(reads):
    content = "step 1 grad_norm 0.5\nstep 2 grad_norm log10(0.5)\nstep 3 grad_norm 0.25\n"
    same(reads(21, content), [0.5, 0.25], [1, 3])


def test_21_a_dict_of_parts(reads):
    content = "".join(
        f"loss=3.1, grad_norm={{'0_default': {i}.4, '1_fp32': 0.0}}, step={i}, lr=0.1\n" for i in range(3)
    )
    same(reads(21, content), [0.4, 1.4, 2.4], [0, 1, 2])
    recording = reads(21, content, column="grad_norm")
    same(recording, [0.4, 1.4, 2.4], [0, 1, 2])
    told(recording, "0_default", "1_fp32")
    rows = [{"step": i, "grad_norm": {"0_default": i + 0.5, "1_fp32": 0.0}} for i in range(3)]
    same(reads(21, jsonl(rows)), [0.5, 1.5, 2.5], [0, 1, 2])
    same(reads(21, jsonl(rows), column="grad_norm/1_fp32"), [0, 0, 0], [0, 1, 2])


EPOCHS = [0.5, 1.0, 1.5]


@pytest.mark.parametrize("form", ["printed", "JSON lines", "JSON", "CSV"])
def test_22_runs_told_by_their_epochs(form, reads):
    rows = [
        {"loss": 3.0 - epoch, "grad_norm": 10.0 * run + epoch, "epoch": epoch}
        for run in range(3)
        for epoch in EPOCHS
    ]
    if form == "printed":
        content = "".join(f"{row}\n" for row in rows)
    elif form == "CSV":
        content = "loss,grad_norm,epoch\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows)
    else:
        content = jsonl(rows) if form == "JSON lines" else json.dumps(rows)
    recording = reads(22, content)
    same(recording, [row["grad_norm"] for row in rows], [0, 1, 2] * 3, starts=(0, 3, 6))
    assert recording.notes[0].startswith("3 runs ")
    for run, part in enumerate(recording.runs):
        same(part, [10.0 * run + epoch for epoch in EPOCHS], [0, 1, 2], starts=(0,), column="grad_norm")
        np.testing.assert_array_equal(part.loss, [2.5, 2.0, 1.5])


def test_22_runs_told_by_their_steps(reads):
    steps = [*range(10), *range(7), *range(12)]
    content = "".join(f"step {step} | norm {row}.5\n" for row, step in enumerate(steps))
    recording = reads(22, content)
    same(recording, np.arange(29) + 0.5, steps, starts=(0, 10, 17))
    assert [part.steps.size for part in recording.runs] == [10, 7, 12]
    assert all(part.runs[0] is part and len(part.runs) == 1 for part in recording.runs)


def test_22_what_is_one_run(reads):
    steps = [(epoch, step) for epoch in range(3) for step in range(5)]
    content = "".join(f"epoch {e} step {s} norm {5 * e + s}.5\n" for e, s in steps)
    same(reads(22, content), np.arange(15) + 0.5, list(range(5)) * 3, starts=(0,))
    rows = [{"global_step": 5 * e + s, "step": s, "grad_norm": 0.5 + s} for e, s in steps]
    same(reads(22, jsonl(rows)), [0.5 + s for _, s in steps], range(15), starts=(0,))
    content = "".join((f"Epoch {e}\n" if s == 0 else "") + f"step {s} norm {5 * e + s}.5\n" for e, s in steps)
    same(reads(22, content), np.arange(15) + 0.5, starts=(0,))


def test_22_a_resumed_run(reads):
    steps = [*range(1, 61), *range(51, 101)]
    rows = [{"step": step, "grad_norm": row + 0.5} for row, step in enumerate(steps)]
    recording = reads(22, jsonl(rows))
    same(recording, [*np.arange(50) + 0.5, *np.arange(60, 110) + 0.5], range(1, 101), starts=(0,))
    told(recording, "resumed 1 time", "60 to 51", "10 earlier rows")


def test_22_attempts(reads):
    rows, update = [], 0
    for attempt, steps in ((1, range(8)), (2, range(5, 9)), (3, range(12))):
        for step in steps:
            rows.append(
                {"update": update, "step": step, "attempt": attempt, "grad_norm": attempt + step / 16}
            )
            update += 1
    recording = reads(22, jsonl(rows))
    same(recording, 3 + np.arange(12) / 16, range(12), starts=(0,))
    told(recording, "resumed 2 times")


def test_23_by_how_many_values_there_are(reads):
    rows = ["epoch,grad_norm_epoch,grad_norm_step,step"]
    for epoch in range(3):
        rows += [f"{epoch},,{4 * epoch + i + 0.5},{4 * epoch + i}" for i in range(4)]
        rows.append(f"{epoch},{4 * epoch + 2.0},,{4 * epoch + 3}")
    recording = reads(23, "\n".join(rows) + "\n")
    same(recording, np.arange(12) + 0.5, range(12), column="grad_norm_step")


@pytest.mark.parametrize(
    "first",
    [
        "config: lr=0.0003 grad_norm=1.0 steps=1000",
        "trainer.grad_norm = 1.0",
        "Namespace(grad_norm=1.0, lr=0.1)",
        "clip grad norm 1.0",
        "{'grad_norm': 1.0}",
    ],
)
@pytest.mark.parametrize("name", ["gnorm", "norm", "grad_norm", "total_norm"])
def test_23_settings_are_no_norms(first, name, reads):
    content = f"{first}\n" + "".join(f"step {i} | loss 3.1 | {name} {i}.5\n" for i in range(1, 31))
    same(reads(23, content), np.arange(1, 31) + 0.5, range(1, 31), column=name)


def test_23_the_whole_before_its_parts(reads):
    rows = [
        {"step": i, "grad_norm/layer_0": 7.0, "grad_norm/layer_1": 8.0, "norm": i + 0.5} for i in range(6)
    ]
    same(reads(23, jsonl(rows)), np.arange(6) + 0.5, range(6), column="norm")
    for row in rows:
        del row["norm"]
    told(reads(23, jsonl(rows)), "grad_norm has several numbers: grad_norm/layer_0 (read), grad_norm/layer_1")


@pytest.mark.parametrize(
    "header", ["[step={0}/600,epoch=1]", "Step {0}:", "step: {0}/600", "Iteration {0}, epoch 1"]
)
def test_24_a_step_on_the_line_above(header, reads):
    content = "".join(
        f"INFO {header.format(10 * i)}\n    optim/lr=0.1\n    optim/total grad norm={i}.5\n    train/loss=3.1\n"
        for i in range(1, 9)
    )
    recording = reads(24, content)
    same(recording, np.arange(1, 9) + 0.5, np.arange(10, 90, 10), cadence=10)
    assert recording.notes == ("every 10th step is logged",)


def test_24_a_step_of_its_total(reads):
    rows = [
        {"loss": 3.1, "grad_norm": i + 0.5, "global_step/max_steps": f"{10 * i}/438"} for i in range(1, 9)
    ]
    for content in (
        jsonl(rows),
        "".join(f"{row}\n" for row in rows),
        "".join(f"INFO {json.dumps(row)}\n" for row in rows),
    ):
        same(reads(24, content), np.arange(1, 9) + 0.5, np.arange(10, 90, 10), cadence=10)
    content = "".join(f"Epoch [1][{50 * i}/7330]  lr: 0.1, grad_norm: {i}.5\n" for i in range(1, 9))
    same(reads(24, content), np.arange(1, 9) + 0.5, np.arange(50, 450, 50), cadence=50)
    content = "".join(
        f"Train: [0/300][{50 * i}/7330] loss 6.9 (6.9) grad_norm {i}.5 (1.0)\n" for i in range(1, 9)
    )
    same(reads(24, content), np.arange(1, 9) + 0.5, np.arange(50, 450, 50), cadence=50)


def test_24_no_step_found(reads):
    recording = reads(24, "".join(f"at {i}: loss 3.1 norm {i}.5\n" for i in range(4)))
    same(recording, np.arange(4) + 0.5, range(4))
    told(recording, "no step found")
    # A step far above, of something else, is none.
    content = "saved the model at step 500\n" + "".join(f"loss 3.1 norm {i}.5\n" for i in range(9))
    recording = reads(24, content)
    same(recording, np.arange(9) + 0.5, range(9))
    told(recording, "no step found")


def test_25_quartiles(reads):
    line = "step {} grad-norm quartiles 1.0e+02 2.0e+02 3.0e+02 4.0e+02 9.0e+02, threshold=6.0e+02\n"
    content = "".join(line.format(i) for i in range(3))
    with pytest.raises(ValueError, match=r"no gradient norm.*grad-norm quartiles"):
        reads(25, content)
    told(
        reads(25, content, column="grad-norm quartiles"),
        "several numbers after grad-norm quartiles",
        "1.0e+02 2.0e+02",
    )


@pytest.mark.parametrize("names", [("norm", "grad_norm"), ("grad_norm", "norm"), ("gnorm", "raw_grad_norm")])
@pytest.mark.parametrize("form", ["text", "JSON", "CSV"])
def test_26_a_norm_that_is_renamed(names, form, reads):
    rows = [{"step": i, names[i >= 250]: i + 0.5} for i in range(500)]
    content = jsonl(rows)
    if form == "text":
        content = "".join(" | ".join(f"{name} {x}" for name, x in row.items()) + "\n" for row in rows)
    elif form == "CSV":
        cells = [[str(row.get(name, "")) for name in ("step", *names)] for row in rows]
        content = "".join(",".join(row) + "\n" for row in [["step", *names], *cells])
    recording = reads(26, content)
    same(recording, np.arange(500) + 0.5, range(500), starts=(0,))
    told(recording, f"{names[0]} is called {names[1]} from step 250 on")


MEANS = [
    "epoch {e} | mean loss 3.05 | norm 77.0\n",
    "epoch {e} done: step {s}, loss 3.05, norm 77.0\n",
    "=== epoch {e} (step {s}): loss 3.05 norm 77.0 ===\n",
    "Epoch {e} average: norm 77.0\n",
]


@pytest.mark.parametrize("mean", MEANS)
def test_26_means_between_steps(mean, reads):
    content = ""
    for i in range(40):
        content += f"step {i} | loss 3.1 | norm {i}.5\n" + (
            mean.format(e=i // 10, s=i) if i % 10 == 9 else ""
        )
    recording = reads(26, content)
    same(recording, np.arange(40) + 0.5, range(40), starts=(0,))
    told(recording, "left out")


@pytest.mark.parametrize(
    "mean",
    [{"epoch": 1, "grad_norm": 77.0}, {"epoch": 1, "step": None, "grad_norm": 77.0, "train_loss": 3.0}],
)
def test_26_means_between_rows(mean, reads):
    rows = []
    for i in range(40):
        rows.append({"step": i, "loss": 3.1, "grad_norm": i + 0.5})
        if i % 10 == 9:
            rows.append({**mean, "step": i} if "step" in mean else mean)
    recording = reads(26, jsonl(rows))
    same(recording, np.arange(40) + 0.5, range(40), starts=(0,))
    told(recording, "left out")


@pytest.mark.parametrize("last", ["done", "Training finished.", "saved to out/model.bin", "real 12m3s", "$ "])
def test_27_a_last_line_that_is_no_row(last, reads):
    same(reads(27, f"step 1 | norm 0.5\nstep 2 | norm 0.4\n{last}"), [0.5, 0.4], [1, 2], notes=())


GLUED = [
    "step 3 | loss 1.9 |srun: error: CANCELLED\n",
    "step 3 | lossslurmstepd: error: *** JOB 7 ON a CANCELLED ***",
]
GLUED += [
    "step 3 | loss 1.9 | noTraceback (most recent call last):\n  File 'x'\n",
    "step 3 |Killed\n",
    "step 3 | lo",
    "st",
]


@pytest.mark.parametrize("last", GLUED)
def test_27_a_row_that_is_cut_off(last, reads):
    recording = reads(27, f"step 1 | loss 2.1 | norm 0.5\nstep 2 | loss 2.0 | norm 0.4\n{last}")
    same(recording, [0.5, 0.4], [1, 2])
    told(recording, "cut off or runs into other text")


@pytest.mark.parametrize(
    "last", ["step 3 | norm 0.1", "norm 0.3 | step 1", "step 3 | norm np.float64(0.1", "step 3 | norm 1e"]
)
def test_27_a_number_that_may_be_cut(last, reads):
    recording = reads(27, f"step 1 | norm 0.5\nstep 2 | norm 0.4\n{last}")
    same(recording, [0.5, 0.4], [1, 2])
    told(recording, "may be cut off and is left out")


@pytest.mark.parametrize("size", [10, 70_000, 200_000])
def test_28_a_first_line_of_any_length(size, reads):
    config = {"config": {"text": "x" * size, "clip": "zclip", "alpha": 0.9}}
    rows = [{"step": i, "grad_norm": i + 0.5} for i in range(4)]
    recording = reads(28, jsonl([config, *rows]))
    same(recording, np.arange(4) + 0.5, range(4), settings={"alpha": 0.9}, notes=(), format="JSON lines")


@pytest.mark.parametrize("column", [None, "train/grad_norm", "train.grad_norm"])
def test_28_rows_a_level_deeper(column, reads):
    rows = [
        {"step": i, "train": {"grad_norm": i + 0.5, "loss": 3.0}, "eval": {"grad_norm": 9.0}}
        for i in range(4)
    ]
    for content in (jsonl(rows), json.dumps(rows), json.dumps({"log_history": rows})):
        recording = reads(28, content, column=column)
        same(recording, np.arange(4) + 0.5, range(4), column="train/grad_norm", notes=())
        np.testing.assert_array_equal(recording.loss, [3.0] * 4)
    deeper = [{"step": i, "metrics": {"train": {"optim": {"grad_norm": i + 0.5}}}} for i in range(4)]
    same(reads(28, jsonl(deeper)), np.arange(4) + 0.5, range(4))


def test_29_a_resumed_tensorboard(tmp_path):
    for first, last, options in ((1, 60, {}), (51, 100, {"purge_step": 51})):
        with tensorboardX.SummaryWriter(str(tmp_path), filename_suffix=f".{first}", **options) as writer:
            for step in range(first, last + 1):
                writer.add_scalar("grad_norm", first + step / 128, step)
    recording = read(tmp_path)
    print(f"\n29. resumed at 51: {recording.norms.size} norms, {recording.notes}")
    steps = np.arange(1, 101)
    same(recording, np.where(steps < 51, 1.0, 51.0) + steps / 128, steps, starts=(0,))
    told(recording, "resumed 1 time", "10 earlier rows")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "utf-32"])
@pytest.mark.parametrize("form", ["text", "JSON", "CSV"])
def test_30_encodings(encoding, form, reads):
    content = "".join(f"step {i} | norm {i}.5\r\n" for i in range(9))
    if form == "JSON":
        content = jsonl([{"step": i, "grad_norm": i + 0.5} for i in range(9)])
    elif form == "CSV":
        content = "step,grad_norm\r\n" + "".join(f"{i},{i}.5\r\n" for i in range(9))
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""
    same(reads(30, (mark + content).encode(encoding)), np.arange(9) + 0.5, range(9), notes=())


def test_30_headers(reads):
    recording = reads(30, "step,grad_norm,grad_norm\n1,0.5,7\n2,0.25,8\n")
    same(recording, [0.5, 0.25], [1, 2], column="grad_norm")
    told(recording, "several columns are called grad_norm")
    same(reads(30, "step,grad_norm,grad_norm\n1,0.5,7\n2,0.25,8\n", column="grad_norm (2)"), [7, 8])
    content = "step, grad_norm , loss\n1, 0.5, 3.0\n2, 0.25, 3.5\n"
    same(reads(30, content), [0.5, 0.25], [1, 2])
    recording = reads(30, content, column="grad_norm")
    same(recording, [0.5, 0.25], [1, 2], column="grad_norm")
    np.testing.assert_array_equal(recording.loss, [3.0, 3.5])
