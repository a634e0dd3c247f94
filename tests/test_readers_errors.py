"""Readers of files that hold no norms, and the names that norms, steps and losses have."""

import json
import math
import sys

import numpy as np
import pytest

from tests.reading import ROWS, jsonl, read_text, write_events
from zclip_jax.replay.readers import Recording, read
from zclip_jax.replay.readers._names import loss_rank, norm_rank, step_rank

NAN, INF = math.nan, math.inf
__all__ = ["read_text"]  # a fixture


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
