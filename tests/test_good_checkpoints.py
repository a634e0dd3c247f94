"""GoodCheckpoints: what is kept, what is whole, and what a rewind leaves on the disk."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zclip_jax.recovery import GoodCheckpoints, KeepGood

pytestmark = pytest.mark.slow

Composite, Save, Restore = ocp.args.Composite, ocp.args.StandardSave, ocp.args.StandardRestore


def state_of(step):
    return {
        "w": jnp.arange(512, dtype=jnp.float32) + step,
        "n": jnp.int32(step),
        "half": jnp.ones(3, jnp.bfloat16),
    }


def like():
    return Composite(state=Restore(state_of(0)), data=ocp.args.JsonRestore())


def save(checkpoints, *steps):
    for step in steps:
        args = Composite(state=Save(state_of(step)), data=ocp.args.JsonSave({"next": step}))
        assert checkpoints.save(step, args, {"loss": step / 7, "step": step})


def check(restored, step):
    assert restored[0] == step
    assert restored[1]["data"] == {"next": step}
    jax.tree.map(np.testing.assert_array_equal, dict(restored[1]["state"]), state_of(step))


@pytest.fixture
def checkpoints(tmp_path):
    with GoodCheckpoints(tmp_path / "ckpt", keep_recent=9) as checkpoints:
        yield checkpoints


def test_after_a_rewind_saves_are_written_and_a_restart_finds_them(checkpoints):
    save(checkpoints, 100, 200, 300)
    with pytest.raises(ValueError, match=r"got 150 while \[200, 300\] exist: call rewind first"):
        checkpoints.save(150, Composite(state=Save(state_of(150))))
    with pytest.raises(ValueError, match=r"got 300 while \[300\] exist"):
        checkpoints.save(300, Composite(state=Save(state_of(300))))
    check(checkpoints.restore(100, like()), 100)
    checkpoints.rewind(100)
    assert checkpoints.steps == (100,)
    save(checkpoints, 150, 200)
    checkpoints.wait_until_finished()
    with GoodCheckpoints(checkpoints.directory) as again:
        assert again.steps == (100, 150, 200)
        check(again.restore(None, like()), 200)
        assert again.metadata(150) == {"loss": 150 / 7, "step": 150}


def test_steps_are_retired_from_the_newest_to_the_oldest(checkpoints, monkeypatch):
    save(checkpoints, 1, 2, 3, 4)
    deleted, delete = [], checkpoints.manager.delete
    monkeypatch.setattr(checkpoints.manager, "delete", lambda step: (deleted.append(step), delete(step)))
    checkpoints.rewind(2)
    assert deleted == [4, 3]
    checkpoints.rewind(2)  # nothing is newer
    assert checkpoints.steps == (1, 2)
    with pytest.raises(ValueError, match=r"one of the steps \[1, 2\], got 3"):
        checkpoints.rewind(3)


def test_a_rewind_cut_short_is_completed_at_the_next_start(checkpoints, monkeypatch):
    save(checkpoints, 1, 2, 3, 4)
    delete = checkpoints.manager.delete

    def interrupted(step):
        if step == 3:
            shutil.rmtree(checkpoints.directory / "3" / "state")
            raise KeyboardInterrupt
        delete(step)

    monkeypatch.setattr(checkpoints.manager, "delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.rewind(1)
    with GoodCheckpoints(checkpoints.directory) as again:
        assert again.steps == (1,)
        assert sorted(path.name for path in again.directory.iterdir()) == ["1"]
        check(again.restore(None, like()), 1)
        save(again, 2, 3)
        check(again.restore(None, like()), 3)


def test_a_mark_is_stored_with_the_checkpoint(checkpoints):
    save(checkpoints, 1, 2)
    assert checkpoints.mark_good(2)  # while it is still being written
    assert checkpoints.mark_good(1)
    assert checkpoints.mark_good(1)
    assert not checkpoints.mark_good(5)
    save(checkpoints, 3)
    checkpoints.wait_until_finished()
    assert checkpoints.good_steps == (1, 2)
    with GoodCheckpoints(checkpoints.directory) as again:
        assert again.good_steps == (1, 2)
        again.rewind(1)
        save(again, 2)
        assert again.good_steps == (1,)  # the new one of step 2 has not been judged


def test_what_was_saved_by_plain_orbax_can_be_restored(tmp_path):
    with ocp.CheckpointManager(tmp_path / "plain") as manager:
        manager.save(3, args=Save(state_of(3)))
    with GoodCheckpoints(tmp_path / "plain") as checkpoints:
        assert checkpoints.latest_whole() == 3
        assert checkpoints.metadata(3) is None
        step, state = checkpoints.restore(None, Restore(state_of(0)))
        assert (step, int(state["n"])) == (3, 3)
        assert checkpoints.save(4, Save(state_of(4)))
        assert checkpoints.restore(None, Restore(state_of(0)))[0] == 4


def test_a_manager_of_your_own(tmp_path):
    folder = tmp_path / "own"
    options = ocp.CheckpointManagerOptions(
        step_prefix="run", step_format_fixed_length=6, save_interval_steps=2,
        preservation_policy=KeepGood(folder, recent=1, good=1),
    )  # fmt: skip
    with ocp.CheckpointManager(folder, options=options) as manager:
        with pytest.raises(ValueError, match=r"give KeepGood to its options, got {'recent': 3}"):
            GoodCheckpoints(manager, keep_recent=3)
        checkpoints = GoodCheckpoints(manager)
        written = [step for step in range(1, 9) if checkpoints.save(step, Save(state_of(step)))]
        assert written == [1, 2, 4, 6, 8]  # the first one always
        assert checkpoints.mark_good(8)
        assert (folder / "run_000008" / "zclip_good.json").exists()
        assert checkpoints.save(10, Save(state_of(10)))
        checkpoints.wait_until_finished()
        assert checkpoints.steps == (8, 10)
        (folder / "run_000010" / "_CHECKPOINT_METADATA").unlink()
        with pytest.warns(UserWarning, match="step 10: its metadata can't be read"):
            assert checkpoints.restore(None, Restore(state_of(0)))[0] == 8
        assert checkpoints.steps == (8,)
        assert (folder / "broken" / "run_000010").exists()


def array_file(folder):
    """The largest file, which holds the arrays."""
    return max(
        (path for path in Path(folder).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def half_deleted(folder):
    shutil.rmtree(folder / "state")


def missing_array(folder):
    array_file(folder).unlink()


def truncated(folder):
    path = array_file(folder)
    path.write_bytes(path.read_bytes()[:-7])


def no_metadata(folder):
    (folder / "_CHECKPOINT_METADATA").unlink()


def garbage_metadata(folder):
    (folder / "_CHECKPOINT_METADATA").write_text("{")


def changed_metadata(folder):
    path = folder / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace('"step": 3', '"step": 8'))


def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def changed_json(folder):
    (folder / "data" / "metadata").write_text('{"next":4}')


def flipped_bit(folder):
    path = array_file(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


DAMAGES = [
    half_deleted, missing_array, truncated, no_metadata, garbage_metadata, changed_metadata, empty_folder,
    changed_json, flipped_bit,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_restored(damage, tmp_path):
    with GoodCheckpoints(tmp_path / "ckpt", keep_recent=9) as checkpoints:
        save(checkpoints, 1, 2, 3)
    damage(tmp_path / "ckpt" / "3")
    with GoodCheckpoints(tmp_path / "ckpt", keep_recent=9) as checkpoints:
        if 3 in checkpoints.steps:
            if damage not in (changed_json, flipped_bit):
                with pytest.warns(
                    UserWarning, match=r"not whole: step 3: .*; the newest whole one is of step 2"
                ):
                    assert checkpoints.latest_whole() == 2
            with pytest.warns(UserWarning, match=r"not whole: step 3: .*; restored step 2 instead"):
                check(checkpoints.restore(None, like()), 2)
            assert (tmp_path / "ckpt" / "broken" / "3").is_dir()
        assert checkpoints.steps == (1, 2)
        save(checkpoints, 3)  # nothing stands in its way
        check(checkpoints.restore(3, like()), 3)
    with GoodCheckpoints(tmp_path / "ckpt") as checkpoints, warnings.catch_warnings(action="error"):
        assert checkpoints.latest_whole() == 3


def test_several_damaged_ones(checkpoints):
    save(checkpoints, 1, 2, 3, 4)
    checkpoints.wait_until_finished()
    for step in (2, 3):
        half_deleted(checkpoints.directory / str(step))
    with pytest.warns(UserWarning, match=r"step 3: .*; step 2: .*; restored step 1 instead"):
        check(checkpoints.restore(3, like()), 1)
    assert checkpoints.steps == (1, 4)
    checkpoints.rewind(1)
    save(checkpoints, 2, 3)
    checkpoints.wait_until_finished()
    missing_array(checkpoints.directory / "3")
    with pytest.warns(UserWarning, match="restored step 2 instead"):
        check(checkpoints.restore(3, like()), 2)
    assert sorted(path.name for path in (checkpoints.directory / "broken").iterdir()) == ["2", "3", "3-2"]


def test_a_step_that_has_no_checkpoint(checkpoints):
    save(checkpoints, 10, 20, 30)
    with pytest.warns(UserWarning, match="step 25: there is none; restored step 20 instead"):
        check(checkpoints.restore(25, like()), 20)
    assert checkpoints.steps == (10, 20, 30)


def test_nothing_is_moved_where_nothing_can_be_restored(checkpoints):
    with pytest.raises(ValueError, match="can be restored: it is empty"):
        checkpoints.restore(None, like())
    assert checkpoints.latest_whole() is None
    save(checkpoints, 1, 2)
    wrong = Composite(state=Restore({"other": jnp.zeros(2)}), data=ocp.args.JsonRestore())
    with pytest.raises(ValueError, match=r"can be restored: step 2: .*; step 1: "):
        checkpoints.restore(None, wrong)
    assert checkpoints.steps == (1, 2)
    check(checkpoints.restore(None, like()), 2)


def test_retention_on_the_disk(tmp_path):
    with GoodCheckpoints(tmp_path / "ckpt", keep_recent=2, keep_good=2, good_every=300) as checkpoints:
        for step in range(100, 1300, 100):
            save(checkpoints, step)
            checkpoints.mark_good(step - 200)  # known two checkpoints later
        checkpoints.wait_until_finished()
        # When 1200 was saved, the newest good one was 900. Good ones 300 apart; the newest good one; the next to be
        # judged; the two newest.
        assert checkpoints.steps == (400, 700, 900, 1000, 1100, 1200)


steps_and_marks = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=30)


@given(steps_and_marks, st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_what_the_policy_keeps(pairs, recent, good, good_every):
    steps = list(np.cumsum([gap for gap, _ in pairs]).tolist())
    marked = [step for step, (_, mark) in zip(steps, pairs, strict=True) if mark]
    policy = KeepGood("/nowhere", recent, good, good_every)
    kept = policy.kept(steps, marked)
    assert set(steps[-recent:]) <= kept <= set(steps)
    assert set(marked[-1:]) <= kept
    unjudged = [step for step in steps if step > max(marked, default=0)]
    assert set(unjudged[:1]) <= kept
    assert len(kept) <= recent + good + 2
    again = policy.kept(sorted(kept), [step for step in marked if step in kept])
    assert again == kept  # so that a second look deletes nothing


def test_a_good_checkpoint_survives_a_late_verdict(tmp_path):
    """With a verdict ten checkpoints later, retention alone would delete every one before it comes."""
    with GoodCheckpoints(tmp_path / "ckpt", keep_recent=2) as checkpoints:
        for step in range(1, 16):
            save(checkpoints, step)
            checkpoints.mark_good(step - 10)
        assert checkpoints.good_steps
        first = checkpoints.good_steps[0]
        check(checkpoints.restore(first, like()), first)


def test_arguments(tmp_path):
    for name in ("keep_recent", "keep_good", "good_every"):
        with pytest.raises(ValueError, match=f"{name.removeprefix('keep_')} must be an integer >= 1, got 0"):
            GoodCheckpoints(tmp_path, **{name: 0})


def test_metadata_of_any_json(checkpoints):
    value = {"a": [1, 2.5, None, "x"], "b": {"c": True}}
    assert checkpoints.save(1, Save(state_of(1)), value)
    assert checkpoints.metadata(1) == value
    assert checkpoints.save(2, Save(state_of(2)))
    assert checkpoints.metadata(2) is None
    assert json.loads((checkpoints.directory / "1" / "zclip_files.json").read_text())


FULL_DISK = """
import resource, signal, sys, warnings
import jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
from zclip_jax.recovery import GoodCheckpoints

def save(step):
    state = {"w": jnp.asarray(np.random.default_rng(step).normal(size=300_000))}
    return checkpoints.save(step, ocp.args.StandardSave(state), {"step": step})

options = ocp.CheckpointManagerOptions(enable_async_checkpointing=sys.argv[2] == "async")
checkpoints = GoodCheckpoints(ocp.CheckpointManager(sys.argv[1], options=options))
assert save(1)
checkpoints.wait_until_finished()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step, limit in ((2, 100_000), (3, 0)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        save(step)
        checkpoints.mark_good(1)
        checkpoints.wait_until_finished()
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
told = [str(warning.message) for warning in caught]
for step in (2, 3):
    assert any(f"the checkpoint of step {step} was not written: " in text for text in told), told
assert checkpoints.steps == (1,)
assert save(4)
assert checkpoints.latest_whole() == 4
assert checkpoints.steps == (1, 4)
step, state = checkpoints.restore(1, ocp.args.StandardRestore({"w": jnp.zeros(300_000)}))
assert step == 1
assert (state["w"] == jnp.asarray(np.random.default_rng(1).normal(size=300_000))).all()
checkpoints.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["async", "at once"])
def test_a_full_disk_is_a_warning(how, tmp_path):
    """Files may not grow, which the system reports in the same places as a full disk."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "ckpt"), how]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list((tmp_path / "ckpt").glob("*tmp*"))
