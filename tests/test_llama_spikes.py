"""Faults planted into the training script, and the records that it leaves of them."""

import importlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests import test_llama_train as llama

text = llama.text  # a fixture
demo_spike = importlib.import_module("demo_spike")
faults = importlib.import_module("faults")

ROW, TENSOR, NAN = 40, 50, 55  # steps
NAME = "blocks/attention/wk[1]"
PLANTED = {"bad_row_steps": [ROW], "bad_tensor_steps": [TENSOR], "bad_tensor": NAME}


def tree() -> dict[str, Any]:
    return {"blocks": {"wk": jnp.ones((2, 3, 4))}, "head": jnp.ones(5)}


@pytest.mark.parametrize("name", ["blocks/wk[0]", "blocks/wk[1]", "head"])
@pytest.mark.parametrize("factor", [30.0, np.nan])
def test_one_gradient_is_spoiled_on_its_steps(name: str, factor: float) -> None:
    options = faults.FaultOptions(bad_tensor_steps=(3, 7), bad_tensor=name, bad_factor=factor)
    for step in range(1, 9):
        spoiled = faults.spoil_gradients(options, tree(), jnp.asarray(step))
        parts = {"blocks/wk[0]": spoiled["blocks"]["wk"][0], "blocks/wk[1]": spoiled["blocks"]["wk"][1]}
        for other, value in (parts | {"head": spoiled["head"]}).items():
            expected = factor if other == name and step in (3, 7) else 1.0
            np.testing.assert_array_equal(value, np.full(value.shape, expected))


def test_without_a_bad_tensor_nothing_is_traced() -> None:
    grads = tree()
    assert faults.spoil_gradients(faults.FaultOptions(), grads, jnp.asarray(1)) is grads


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_one_row_is_spoiled_in_one_process(parts: int) -> None:
    options = faults.FaultOptions(spike_steps=(2,), bad_row_steps=(5,))
    batch = np.zeros((8, 30), np.int32)
    for step in range(1, 7):
        size = 8 // parts
        spoiled = np.concatenate(
            [
                faults.spoil_rows(
                    options, batch[i : i + size], step, first=i, batch_size=8, vocab_size=50, seed=3
                )
                for i in range(0, 8, size)
            ]
        )
        changed = np.flatnonzero(np.any(spoiled != batch, axis=1)).tolist()
        assert changed == {2: list(range(8)), 5: [faults.bad_row(3, 5, 8)]}.get(step, [])


@pytest.mark.slow
def test_the_demonstration(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = llama.args(text, tmp_path / "run", bad_factor=1000, **PLANTED)
    assert demo_spike.main(given) == 0
    out = capsys.readouterr().out
    assert "the row is named, the tensor is" in out
    records = {record["step"]: record for record in llama.spikes(tmp_path / "run")}
    bad = records[ROW]
    worst = bad["rows"][0]
    assert worst["position"] == faults.bad_row(0, ROW, 8)
    assert worst["row_id"] == bad["row_ids"][worst["position"]]
    assert worst["share"] > 2 * bad["rows"][1]["share"]
    assert bad["data_index"] == ROW - 1
    assert ROW < bad["rows_params_step"] <= ROW + 1
    assert 0 < bad["decision"]["clip_scale"] <= 1
    assert f"window {worst['row_id']} of the corpus" in out
    assert records[TENSOR]["rise"]["group"] == NAME
    assert max(row["share"] for row in records[TENSOR]["rows"]) < 0.5  # no row is to blame

    # Where nothing is planted at those steps, neither is found.
    elsewhere = ["--bad-row-steps", "3", "--bad-tensor-steps", "4"]
    assert demo_spike.main([*given, *elsewhere]) == 1
    assert "is NOT" in capsys.readouterr().out


@pytest.mark.slow
def test_a_gradient_that_is_not_finite(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    given = llama.args(text, run_dir, bad_factor="nan", row_reports=0, **PLANTED)
    assert llama.train.main(given) == 0
    (record,) = [record for record in llama.spikes(run_dir) if record["kind"] == "nonfinite"]
    assert (record["step"], record["nonfinite"], record["norm"]) == (TENSOR, [NAME], "nan")
    assert all(record["rows"] == [] and len(record["row_ids"]) == 8 for record in llama.spikes(run_dir))


@pytest.mark.slow
def test_a_killed_run_records_its_spikes_again(text: Path, tmp_path: Path) -> None:
    """Once in each attempt, alike but for the number of the attempt and of the update."""
    run_dir = tmp_path / "run"
    given = llama.args(text, run_dir, save_every=30, **PLANTED)
    process = llama.start(given)
    llama.wait_for_row(process, run_dir, ROW + 4)
    process.kill()
    process.communicate(timeout=60)
    assert llama.train.main(given) == 0
    again = [record for record in llama.spikes(run_dir) if record["step"] == ROW]
    assert [record["attempt"] for record in again] == [0, 1]
    first, second = ({k: v for k, v in record.items() if k not in ("attempt", "update")} for record in again)
    assert first == second


@pytest.mark.slow
def test_a_tensor_that_is_none(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = llama.args(text, tmp_path / "run", **(PLANTED | {"bad_tensor": "wk[1]"}))
    assert llama.train.main(given) == 2
    err = capsys.readouterr().err
    assert "bad_tensor must be one of " in err
    assert "blocks/attention/wk" in err
    assert err.endswith("got 'wk[1]'\n")
