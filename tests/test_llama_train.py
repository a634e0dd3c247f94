"""The training script: what it writes, how it stops and continues, what it refuses."""

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml

pytestmark = pytest.mark.slow

faults = importlib.import_module("faults")
flags = importlib.import_module("flags")
train = importlib.import_module("train")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "llama" / "train.py"
SMALL = {
    "context": 16,
    "hidden_size": 32,
    "ffn_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "batch_size": 8,
    "steps": 60,
    "lr": 0.01,
    "warmup": 4,
    "clip_warmup": 4,
    "max_grad_norm": None,
    "eval_every": 25,
    "eval_batches": 2,
    "save_every": 25,
    "mesh": "fsdp=1",
}
NOISE = [30, 45]
TIMING = "tokens_per_second"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(" ".join(rng.choice(words, 2000)))
    return folder


def args(text: Path, run_dir: Path, **flags: Any) -> list[str]:
    flags = {"data": str(text / "*.txt"), "run_dir": str(run_dir)} | SMALL | flags
    given = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        given += ["--" + name.replace("_", "-"), *map(str, values)]
    return given


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Of each step the row of the last attempt, without what depends on the clock or on interruptions."""
    first, *lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert "config" in json.loads(first)
    parsed, torn = [], 0
    for line in lines:
        try:
            parsed.append(json.loads(line, parse_constant=pytest.fail))
        except ValueError:
            torn += 1
    numbers = [(row["attempt"], row["update"]) for row in parsed]
    assert numbers == sorted(numbers)
    assert len({update for _, update in numbers}) == len(parsed)
    assert torn <= numbers[-1][0]  # by a process that was killed
    last = {row["step"]: row for row in parsed}
    dropped = {TIMING, "update", "attempt"}
    return [{k: v for k, v in last[step].items() if k not in dropped} for step in sorted(last)]


def spikes(run_dir: Path) -> list[dict[str, Any]]:
    """Records of the gradients' spikes."""
    records = map(json.loads, (run_dir / "spikes.jsonl").read_text().splitlines())
    return [record for record in records if record["watch"] == "grads"]


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir)]


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption, 2 of whose steps are noise."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    assert train.main(args(text, run_dir, spike_steps=NOISE)) == 0
    return run_dir


class TestFinishedRun:
    def test_a_row_for_each_step(self, finished: Path) -> None:
        logged = rows(finished)
        assert [row["step"] for row in logged] == list(range(1, 61))
        assert [row["zclip/num_steps"] for row in logged] == list(range(1, 61))
        assert [row["step"] for row in logged if "val_loss" in row] == [25, 50, 60]

    def test_the_rate_rises_and_falls(self, finished: Path) -> None:
        rates = [row["lr"] for row in rows(finished)]
        np.testing.assert_allclose(rates[:5], [0.0025, 0.004375, 0.00625, 0.008125, 0.01], rtol=1e-5)
        assert 0.001 < rates[-1] < rates[-2] < 0.01

    def test_the_noise_is_clipped(self, finished: Path) -> None:
        fired = [row["step"] for row in rows(finished) if row["zclip/fired"]]
        assert set(NOISE) <= set(fired)

    def test_numbers_that_json_lacks(self, finished: Path) -> None:
        first = rows(finished)[0]
        assert first["zclip/threshold"] == "inf"
        assert float(first["zclip/threshold"]) == float("inf")

    def test_files(self, finished: Path) -> None:
        names = {path.name for path in finished.iterdir()}
        expected = {"checkpoints", "config.yaml", "metrics.jsonl", "plot.png", "spikes.jsonl", "tensorboard"}
        assert names - {"alarms.jsonl"} == expected
        assert (finished / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert {path.name for path in (finished / "checkpoints").iterdir()} == {"50", "60"}
        assert list((finished / "tensorboard").iterdir())
        config = yaml.safe_load((finished / "config.yaml").read_text())
        assert config["hidden_size"] == 32
        assert config["spike_steps"] == NOISE

    def test_again_reports_again(
        self, finished: Path, text: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = rows(finished)
        assert train.main(args(text, finished, spike_steps=NOISE)) == 0
        assert rows(finished) == before
        out = capsys.readouterr().out
        assert "continued after step 60" in out
        (line,) = [line for line in out.splitlines() if line.startswith("held-out")]
        val_loss, unigram_entropy = float(line.split()[1]), float(line.split()[-1])
        assert val_loss < unigram_entropy - 0.2
        assert f"step {NOISE[0]}: norm" in out
        assert " recorded in spikes.jsonl; the largest:" in out


def test_one_compilation(text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles(), caplog.at_level("WARNING"):
        assert train.main(args(text, tmp_path / "run")) == 0
    compiled = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("Compiling jit(train_step)") for message in compiled) == 1


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_config_file(finished: Path, tmp_path: Path, suffix: str) -> None:
    saved = yaml.safe_load((finished / "config.yaml").read_text())
    path = tmp_path / f"config.{suffix}"
    path.write_text(json.dumps(saved) if suffix == "json" else yaml.safe_dump(saved))
    config = flags.parse_flags(train.Config(), ["--config", str(path)], None)
    assert flags.to_flags(config) == saved
    config = flags.parse_flags(
        train.Config(), ["--config", str(path), "--steps", "7", "--max-grad-norm", "2"], None
    )
    assert flags.to_flags(config) == saved | {"steps": 7, "max_grad_norm": 2.0}


def test_switches_in_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("robust_warmup: true\nremat: true\nlr: 1e-3\n")
    config = flags.parse_flags(train.Config(), ["--config", str(path)], None)
    assert (config.clip.robust_warmup, config.model.remat, config.lr) == (True, True, 1e-3)
    args = ["--config", str(path), "--no-robust-warmup"]
    assert not flags.parse_flags(train.Config(), args, None).clip.robust_warmup


def test_help_has_a_line_for_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in flags.to_flags(train.Config()):
        flag = "--" + name.replace("_", "-")
        assert flag in out
        described = out.split(flag + " ")[-1].split("(default")[0]
        assert described.rstrip().endswith("."), flag


class TestRefusal:
    def refused(self, capsys: pytest.CaptureFixture[str], args: list[str]) -> str:
        capsys.readouterr()
        assert train.main(args) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith("train.py: ")
        assert err.count("\n") == 1
        return err

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"foo": 1}, "--foo"),
            ({"lr": "x"}, "--lr"),
            ({"clip": "best"}, "--clip"),
            ({"steps": 0}, "steps must be at least 1"),
            ({"z_thresh": 0}, "z_thresh"),
            ({"clip": "fixed"}, "max_grad_norm"),
            ({"hidden_size": 33}, "hidden_size"),
            ({"batch_size": 7, "accumulate": 2}, "batch_size 7"),
            ({"batch_size": 5000}, "5000"),
            ({"vocab_size": 3}, "vocab_size"),
            ({"mesh": "rows=2"}, "rows=2"),
            ({"mesh": "data=9"}, "9 devices"),
            ({"config": "missing.yaml"}, "missing.yaml"),
            ({"data": "missing/*"}, "missing/*"),
        ],
    )
    def test_bad_flags(
        self,
        text: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        flags: dict[str, Any],
        said: str,
    ) -> None:
        assert said in self.refused(capsys, args(text, tmp_path / "run", **flags))

    def test_empty_corpus(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.txt").touch()
        assert "empty" in self.refused(capsys, args(tmp_path, tmp_path / "run"))

    @pytest.mark.parametrize("content", ["lr: [", "- 1", "lr: fast", "depth: 3"])
    def test_bad_config_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(content)
        assert str(path) in self.refused(capsys, ["--config", str(path)])

    @pytest.mark.parametrize(
        "change",
        [
            {"hidden_size": 64},
            {"batch_size": 4},
            {"seed": 1},
            {"lr": 0.02},
            {"steps": 70},
            {"z_thresh": 3.0},
            {"clip": "none"},
            {"spike_steps": [30]},
        ],
    )
    def test_another_run(
        self,
        finished: Path,
        text: Path,
        capsys: pytest.CaptureFixture[str],
        change: dict[str, Any],
    ) -> None:
        ((name, value),) = change.items()
        flags = {"spike_steps": NOISE} | change
        said = self.refused(capsys, args(text, finished, **flags))
        saved = yaml.safe_load((finished / "config.yaml").read_text())[name]
        assert f"{name}={saved!r}, not {value!r}" in said

    def test_another_corpus(self, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The files that the flags name are no longer what they were."""
        (tmp_path / "a.txt").write_text("abc " * 500)
        assert train.main(args(tmp_path, tmp_path / "run")) == 0
        (tmp_path / "a.txt").write_text("abc " * 600)
        assert "corpus=" in self.refused(capsys, args(tmp_path, tmp_path / "run"))

    def test_checkpoint_of_something_else(
        self, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ocp = importlib.import_module("orbax.checkpoint")
        with ocp.CheckpointManager(tmp_path / "run" / "checkpoints") as checkpoints:
            checkpoints.save(3, args=ocp.args.StandardSave({"w": np.ones(2)}))
        assert "cannot read" in self.refused(capsys, args(text, tmp_path / "run"))


def test_what_may_change_and_what_fresh_deletes(finished: Path, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    (run_dir / "notes.txt").touch()
    flags = {"spike_steps": NOISE, "save_every": 3, "eval_batches": 1, "keep": 1, "log_every": 1}
    assert train.main(args(text, run_dir, **flags)) == 0
    assert rows(run_dir) == rows(finished)
    assert train.main([*args(text, run_dir, seed=1), "--fresh"]) == 0
    assert len(losses(run_dir)) == 60
    assert losses(run_dir)[0] != losses(finished)[0]
    assert (run_dir / "notes.txt").exists()


@pytest.mark.parametrize("clip", ["levelclip", "fixed", "none"])
def test_other_clipping(clip: str, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = {"clip": clip, "max_grad_norm": 0.5, "spike_steps": NOISE}
    assert train.main(args(text, run_dir, **flags)) == 0
    logged = rows(run_dir)
    assert logged[NOISE[0] - 1]["zclip/fired"]
    if clip == "fixed":
        over = [row["zclip/grad_norm"] > 0.5 for row in logged]
        assert [row["zclip/bound"] for row in logged] == over
    else:
        capped = [row["zclip/capped"] for row in logged]
        assert any(capped) == (clip == "levelclip")


def test_accumulation_changes_rounding_only(finished: Path, text: Path, tmp_path: Path) -> None:
    assert train.main(args(text, tmp_path / "run", spike_steps=NOISE, accumulate=2)) == 0
    expected, logged = rows(finished), rows(tmp_path / "run")
    assert [row["zclip/num_steps"] for row in logged] == list(range(1, 61))
    for name, rtol in (("loss", 1e-5), ("zclip/grad_norm", 1e-4)):
        values = [[row[name] for row in rows] for rows in (logged, expected)]
        np.testing.assert_allclose(*values, rtol=rtol)


@pytest.mark.parametrize("clipper", [None, optax.identity()])
def test_steps_with_another_clipper(clipper: optax.GradientTransformation | None) -> None:
    """They have its metrics only where it has any."""
    sizes = {"context": 16, "hidden_size": 32, "ffn_size": 64, "num_layers": 2}
    llama = train.model_config(train.ModelOptions(**sizes), vocab_size=256)
    init, train_step, eval_step = train.step_functions(train.Config(), llama, clipper)
    tokens = jax.ShapeDtypeStruct((8, 17), np.int32)
    state = jax.eval_shape(init)
    after, scalars = jax.eval_shape(train_step, state, tokens)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert {name for name in scalars if not name.startswith(("zclip/", "watch/"))} == {"loss", "lr"}
    for name in ("zclip/fired", "watch/grads/fired", "watch/updates/ratio"):
        assert (name in scalars) == (clipper is None)
    assert jax.eval_shape(eval_step, state, tokens).shape == ()


def test_the_default_mesh_has_all_devices() -> None:
    assert dict(train.make_mesh("").shape) == {"data": 1, "fsdp": jax.device_count(), "tensor": 1}


def test_continuing_on_other_devices(finished: Path, text: Path, tmp_path: Path) -> None:
    """A run of 2 devices, stopped after 25 steps, goes on on 1."""
    run_dir = tmp_path / "run"
    flags = {"spike_steps": NOISE}
    assert train.main(args(text, run_dir, mesh="fsdp=2", keep=9, **flags)) == 0
    for step in ("50", "60"):
        for path in sorted((run_dir / "checkpoints" / step).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (run_dir / "checkpoints" / step).rmdir()
    assert train.main(args(text, run_dir, keep=9, **flags)) == 0
    np.testing.assert_allclose(losses(run_dir), losses(finished), rtol=1e-4)


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_row(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Waits until the log has the row of `step`, or the process has ended."""
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and f'"step": {step}, "attempt"' in path.read_text():
            return
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopping(number: signal.Signals, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = args(text, run_dir, steps=100_000, save_every=100_000, eval_every=100_000)
    process = start(arguments)
    wait_for_row(process, run_dir, 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert err == ""
    command = f"python {SCRIPT} --config {run_dir / 'config.yaml'}"
    assert out.splitlines()[-1] == f"stopped; to continue: {command}"
    (step,) = [int(path.name) for path in (run_dir / "checkpoints").iterdir()]
    assert step >= 3
    assert [row["step"] for row in rows(run_dir)] == list(range(1, step + 1))


def test_killed_and_continued(
    finished: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "killed"
    arguments = args(text, run_dir, spike_steps=NOISE, save_every=7)
    for step in sorted(random.Random(0).sample(range(5, 58), 3)):
        process = start(arguments)
        wait_for_row(process, run_dir, step)
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    assert train.main(arguments) == 0
    assert "continued after step" in capsys.readouterr().out
    assert rows(run_dir) == rows(finished)
