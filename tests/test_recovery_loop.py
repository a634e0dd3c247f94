"""examples/recovery_loop.py: it recovers, it can be continued, and it can be killed at any moment."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from examples import recovery_loop
from zclip_jax.recovery import GoodCheckpoints, RecoveryLog, SkippingIterator, SkipRanges

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def last_state(run_dir):
    with GoodCheckpoints(run_dir / "checkpoints") as checkpoints, warnings.catch_warnings(action="error"):
        return checkpoints.restore(None, ocp.args.StandardRestore(recovery_loop.init()))


def assert_same(one, other):
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])


def without(skips, steps):
    """The run that left these batches out from its start."""
    batches = SkippingIterator(grain.MapDataset.range(10_000).map(recovery_loop.read), skips=skips)
    state = recovery_loop.init()
    for _ in range(steps):
        _, batch = next(batches)
        state, _ = recovery_loop.train_step(state, {**batch, "lr_factor": np.float32(1)})
    return steps, state


def decisions(run_dir):
    return [(x["event"], x["step"]) for x in RecoveryLog(run_dir / "recovery.jsonl").read()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    assert recovery_loop.train(folder, 300) == 0
    return folder


def test_it_ends_where_the_run_without_the_bad_batches_ends(whole):
    assert decisions(whole) == [("rewind", 211), ("rewind", 211), ("rewound", 180)]
    with GoodCheckpoints(whole / "checkpoints") as checkpoints:
        assert checkpoints.metadata(300)["batches"]["skips"] == [[198, 211]]
    assert_same(last_state(whole), without(SkipRanges([(198, 211)]), 300))


def test_it_says_what_it_was(whole, capsys, tmp_path):
    assert recovery_loop.train(tmp_path, 212) == 0
    assert "Without batches [198, 211) the spike is gone" in capsys.readouterr().out


def test_it_can_be_continued(whole, tmp_path):
    for steps in (150, 205, 300):
        assert recovery_loop.train(tmp_path, steps) == 0
    with GoodCheckpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.good_steps
    skipped = decisions(tmp_path)[0]
    assert skipped[0] == "rewind"
    assert_same(last_state(tmp_path), last_state(whole))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each run is a fork")
@pytest.mark.parametrize("seed", [0, 1])
def test_it_can_be_killed_at_any_moment(whole, seed, tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    command = [sys.executable, "-W", "ignore", "tests/killed.py", str(tmp_path), "300", str(seed), "12"]
    env = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    folders = sorted(tmp_path.iterdir())
    assert len(folders) >= 2
    for folder in folders:
        assert_same(last_state(folder), last_state(whole))
        rewinds = [
            x["action"]["skip"] for x in RecoveryLog(folder / "recovery.jsonl").read() if "action" in x
        ]
        assert rewinds
        assert all(skip == [[198, 211]] for skip in rewinds)
