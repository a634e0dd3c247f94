"""The training script on one device and on eight: the same losses, and the same decisions to clip."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import test_llama_train as llama

pytestmark = pytest.mark.slow

text = llama.text  # a fixture

# The cap is hit on a few steps that are no spikes.
FLAGS = {"steps": 50, "spike_steps": [30, 45], "max_grad_norm": 1.5, "eval_every": 50, "keep": 9}
DECISIONS = ("zclip/fired", "zclip/bound", "zclip/capped")
NUMBERS = ("loss", "zclip/grad_norm", "zclip/clip_scale", "zclip/z_score")
MIXED = "data=2,fsdp=2,tensor=2"


def run(text: Path, run_dir: Path, mesh: str) -> Path:
    assert llama.train.main(llama.args(text, run_dir, mesh=mesh, **FLAGS)) == 0
    return run_dir


def assert_same(logged: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in logged] == [row["step"] for row in expected]
    for name in DECISIONS:
        steps = [[row["step"] for row in rows if row[name]] for rows in (logged, expected)]
        assert steps[0] == steps[1], name
    for name in NUMBERS:
        values = [[float(row[name]) for row in rows] for rows in (logged, expected)]
        atol = 1e-3 if name == "zclip/z_score" else 0.0  # a difference of norms, over their spread
        np.testing.assert_allclose(*values, rtol=1e-4, atol=atol, err_msg=name)


@pytest.fixture(scope="module")
def one_device(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return llama.rows(run(text, tmp_path_factory.mktemp("runs") / "one", "fsdp=1"))


@pytest.fixture(scope="module")
def mixed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(text, tmp_path_factory.mktemp("runs") / "mixed", MIXED)


def test_every_kind_of_decision_is_made(one_device: list[dict[str, Any]]) -> None:
    """And none of them so narrowly that rounding could turn it."""
    fired = [row["step"] for row in one_device if row["zclip/fired"]]
    assert set(FLAGS["spike_steps"]) <= set(fired)
    assert 0 < sum(row["zclip/capped"] for row in one_device) < len(one_device) - len(fired)
    assert min(abs(row["zclip/grad_norm"] / FLAGS["max_grad_norm"] - 1) for row in one_device) > 1e-2
    assert min(abs(row["zclip/z_score"] - 2.5) for row in one_device) > 0.1


@pytest.mark.parametrize("mesh", ["data=8", "data=4,fsdp=2"])
def test_eight_devices(mesh: str, one_device: list[dict[str, Any]], text: Path, tmp_path: Path) -> None:
    assert_same(llama.rows(run(text, tmp_path / "run", mesh)), one_device)


def test_tensor_parallel(mixed: Path, one_device: list[dict[str, Any]]) -> None:
    assert_same(llama.rows(mixed), one_device)


@pytest.mark.parametrize("mesh", ["fsdp=1", pytest.param("data=8", marks=pytest.mark.slow)])
def test_continuing_on_another_mesh(
    mesh: str, mixed: Path, one_device: list[dict[str, Any]], text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(mixed, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "50")
    assert_same(llama.rows(run(text, run_dir, mesh)), one_device)
