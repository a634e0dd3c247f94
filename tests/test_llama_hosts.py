"""The training script as several processes, joined over 127.0.0.1."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import test_llama_train as llama

text = llama.text  # a fixture

FLAGS = {"steps": 30, "spike_steps": [12, 24], "bad_row_steps": [18], "eval_every": 15, "save_every": 15}
NEVER = {"steps": 100_000, "save_every": 100_000, "eval_every": 100_000}
FAST = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"  # to compile
UNFINISHED = "ignore:Error reading persistent compilation cache"  # the others read what the first one writes
Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that tell each other from their flags, from JAX's variables or as SLURM's tasks."""
    started = []
    # JAX warns of proxies.
    inherited = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}

    def start(*arguments: list[str], by: str = "flags") -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port, count = free.getsockname()[1], len(arguments)
        processes = []
        for index, given in enumerate(arguments):
            at = f"127.0.0.1:{port}"
            flags, variables = [], {}
            if by == "flags":
                flags = ["--coordinator", at, "--num-processes", str(count), "--process-id", str(index)]
            elif by == "variables":
                variables = {
                    "JAX_COORDINATOR_ADDRESS": at,
                    "JAX_NUM_PROCESSES": count,
                    "JAX_PROCESS_ID": index,
                }
            else:
                variables = {
                    "SLURM_JOB_ID": 1,
                    "SLURM_STEP_NODELIST": "localhost",
                    "SLURM_NTASKS": count,
                    "SLURM_PROCID": index,
                    "SLURM_LOCALID": index,
                    "JAX_COORDINATOR_PORT": port,
                }
            variables |= {"PYTHONPATH": llama.ROOT, "XLA_FLAGS": FAST, "PYTHONWARNINGS": UNFINISHED}
            process = subprocess.Popen(
                [sys.executable, str(llama.SCRIPT), *given, *flags],
                env=inherited | {name: str(value) for name, value in variables.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            processes.append(process)
        return processes

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str], list[str]]:
    """Exit statuses, and what was printed but for the greeting of the collectives' library."""
    told = [process.communicate(timeout=180) for process in processes]
    outs = ["".join(line for line in out.splitlines(True) if "[Gloo]" not in line) for out, _ in told]
    return [process.returncode for process in processes], outs, [err for _, err in told]


def assert_same(run_dir: Path, expected_dir: Path) -> None:
    logged, expected = llama.rows(run_dir), llama.rows(expected_dir)
    for name in ("step", "zclip/fired", "zclip/bound", "zclip/capped"):
        assert [row[name] for row in logged] == [row[name] for row in expected], name
    for name in ("loss", "val_loss", "zclip/grad_norm", "zclip/clip_scale"):
        values = [[float(row[name]) for row in rows if name in row] for rows in (logged, expected)]
        np.testing.assert_allclose(*values, rtol=1e-4, err_msg=name)
    found, known = ({r["step"]: r for r in llama.spikes(folder)} for folder in (run_dir, expected_dir))
    assert list(found) == list(known)
    for step, record in found.items():
        for name in ("share", "rise"):
            assert record[name]["group"] == known[step][name]["group"]
        assert record["row_ids"] == known[step]["row_ids"]
        assert (record["data_index"], len(record["row_ids"])) == (step - 1, llama.SMALL["batch_size"])
        norms = [[row["norm"] for row in r["rows"]] for r in (record, known[step])]
        np.testing.assert_allclose(*norms, rtol=1e-3)
    bad = found[FLAGS["bad_row_steps"][0]]
    position = llama.faults.bad_row(0, bad["step"], len(bad["row_ids"]))
    assert (bad["rows"][0]["row_id"], bad["rows"][0]["position"]) == (bad["row_ids"][position], position)


def run(start: Start, count: int, arguments: list[str], **options: Any) -> None:
    statuses, outs, errs = finish(start(*[arguments] * count, **options))
    assert statuses == [0] * count, errs
    assert errs == [""] * count
    assert f" in {count} processes\n" in outs[0]
    assert outs[1:] == [""] * (count - 1)


def halved(run_dir: Path, copy: Path) -> Path:
    """A copy of a run whose last checkpoint is that of step 15."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "30")
    return copy


@pytest.fixture(scope="module")
def one(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that the others are compared with."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    assert llama.train.main(llama.args(text, run_dir, **FLAGS)) == 0
    fired = [row["step"] for row in llama.rows(run_dir) if row["zclip/fired"]]
    assert set(FLAGS["spike_steps"]) <= set(fired)
    return run_dir


@pytest.mark.slow
def test_two_processes(start: Start, one: Path, text: Path, tmp_path: Path) -> None:
    """Their run is that of one process, which as well as four goes on with their checkpoint."""
    run_dir = tmp_path / "two"
    run(start, 2, llama.args(text, run_dir, mesh="fsdp=2", **FLAGS), by="variables")
    assert_same(run_dir, one)
    assert len(list((run_dir / "tensorboard").iterdir())) == 1
    assert (run_dir / "plot.png").exists()

    continued = halved(run_dir, tmp_path / "one")
    assert llama.train.main(llama.args(text, continued, **FLAGS)) == 0
    assert_same(continued, one)

    continued = halved(run_dir, tmp_path / "four")
    run(start, 4, llama.args(text, continued, mesh="fsdp=4", **FLAGS))
    assert_same(continued, one)


@pytest.mark.slow
def test_four_processes(start: Start, one: Path, text: Path, tmp_path: Path) -> None:
    """Two and two of them hold the same rows."""
    run(start, 4, llama.args(text, tmp_path / "run", mesh="data=2,tensor=2", **FLAGS))
    assert_same(tmp_path / "run", one)


@pytest.mark.slow
def test_a_signal_to_one_stops_all(start: Start, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "tokenizer.json").write_text("what --fresh deletes before anyone reads it")
    arguments = llama.args(text, run_dir, mesh="data=2", vocab_size=270, **NEVER)
    last = 0
    for number, index, by, more in (
        (signal.SIGTERM, 1, "flags", ["--fresh"]),
        (signal.SIGINT, 0, "SLURM", []),
    ):
        processes = start(*[[*arguments, *more]] * 2, by=by)
        llama.wait_for_row(processes[0], run_dir, last + 4)
        processes[index].send_signal(number)
        statuses, outs, errs = finish(processes)
        assert statuses == [128 + number] * 2, errs
        assert errs == ["", ""]
        assert outs[0].splitlines()[-1].startswith("stopped; to continue: ")
        assert f"continued after step {last}" in outs[0] or not last
        before, last = last, max(int(path.name) for path in (run_dir / "checkpoints").iterdir())
        assert last >= before + 4
        assert [row["step"] for row in llama.rows(run_dir)] == list(range(1, last + 1))


@pytest.mark.slow
def test_a_lost_process_ends_the_others(start: Start, text: Path, tmp_path: Path) -> None:
    processes = start(*[llama.args(text, tmp_path / "run", mesh="data=2", **NEVER)] * 2)
    llama.wait_for_row(processes[0], tmp_path / "run", 2)
    processes[1].kill()
    statuses, _, errs = finish(processes)
    assert statuses == [1, -signal.SIGKILL]
    assert "Traceback" in errs[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param([{"batch_size": 7}] * 2, "batch_size 7", id="both"),
        pytest.param([{"lr": 0.01}, {"lr": "x"}], "--lr", id="one", marks=pytest.mark.slow),
        pytest.param([{"seed": 0}, {"seed": 1}], "differ in seed", id="different", marks=pytest.mark.slow),
    ],
)
def test_one_error(flags: list[dict[str, Any]], said: str, start: Start, text: Path, tmp_path: Path) -> None:
    arguments = [llama.args(text, tmp_path / "run", mesh="fsdp=2", **given) for given in flags]
    statuses, outs, errs = finish(start(*arguments))
    assert statuses == [2, 2], errs
    assert outs == ["", ""]
    assert "".join(errs).startswith("train.py: ")
    assert "".join(errs).count("\n") == 1
    assert said in "".join(errs)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"coordinator": "host", "process_id": 0}, "'host' is not like host:1234"),
        ({"process_id": "first"}, "--process-id"),
        ({"distributed": "on"}, "JAX_PROCESS_ID must be a number, got 'x'"),
        ({"config": "config.json"}, "config.json: only the command line"),
    ],
)
def test_wrong_flags(
    flags: dict[str, Any],
    said: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PROCESS_ID", "x")
    Path("config.json").write_text('{"num_processes": 2}')
    assert llama.train.main(llama.args(text, tmp_path / "run", **flags)) == 2
    assert said in capsys.readouterr().err
