"""What Orbax and Grain do, and recovery works around: where one of these fails, upstream has changed.

Tried with orbax-checkpoint 0.12.8, grain 0.2.18 and optax 0.2.8. A failure is no fault of ours; look whether the way
around in `zclip_jax.recovery` is still needed, and still right.
"""

import copy
import json
import shutil

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from zclip_jax.recovery import SkippingIterator

SAVE = ocp.args.StandardSave({"w": np.arange(2048, dtype=np.float32)})
RAW = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
set_next_index, get_next_index = grain.experimental.set_next_index, grain.experimental.get_next_index


@pytest.fixture
def manager(tmp_path):
    """Restored step 100 while 200 and 300 exist."""
    with ocp.CheckpointManager(tmp_path / "ckpt") as manager:
        for step in (100, 200, 300):
            assert manager.save(step, args=SAVE)
        manager.wait_until_finished()
        manager.restore(100, args=ocp.args.StandardRestore())
        yield manager


def test_orbax_writes_nothing_after_a_rewind(manager):
    """And says so only by returning False [MaxText PR 5260]; a crash would resume from step 300."""
    assert not manager.save(150, args=SAVE)
    assert not manager.save(250, args=SAVE)
    assert manager.latest_step() == 300
    assert manager.save(301, args=SAVE)


def test_orbax_does_not_replace_a_step_by_force(manager):
    with pytest.raises(StepAlreadyExistsError, match="200 already exists"):
        manager.save(200, args=SAVE, force=True)


def test_orbax_forces_an_older_step_but_keeps_the_newest(manager):
    assert manager.save(150, args=SAVE, force=True)
    manager.wait_until_finished()
    assert 300 in manager.all_steps()
    with ocp.CheckpointManager(manager.directory) as again:
        assert again.latest_step() == 300


def test_orbax_saves_once_the_newer_steps_are_deleted(manager):
    for step in (300, 200):
        manager.delete(step)
    assert manager.save(150, args=SAVE)
    manager.wait_until_finished()
    assert (manager.all_steps(), manager.latest_step()) == ([100, 150], 150)


def test_orbax_v1_deletes_the_old_checkpoint_and_writes_no_new_one(tmp_path):
    state = {"w": jnp.arange(4.0)}
    with ocp1.training.Checkpointer(tmp_path / "v1") as checkpointer:
        for step in (100, 200, 300):
            assert checkpointer.save(step, state)
        assert not checkpointer.save(150, state)
        assert not checkpointer.save(200, state, overwrite=True)
        assert [x.step for x in checkpointer.checkpoints] == [100, 300]


def test_orbax_restores_a_flipped_bit_without_a_word(tmp_path):
    """So GoodCheckpoints saves sums."""
    values = np.random.default_rng(0).normal(size=2048).astype(np.float32)
    with ocp.CheckpointManager(tmp_path / "ckpt") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": values}))
        manager.wait_until_finished()
        path = max((tmp_path / "ckpt").rglob("d/*"), key=lambda path: path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        restored = manager.restore(1, args=ocp.args.StandardRestore({"w": jnp.zeros(2048)}))
    assert 0 < (np.asarray(restored["w"]) != values).sum() < 100  # a bit of the compressed bytes


def test_orbax_counts_a_half_deleted_checkpoint_as_its_latest(tmp_path):
    with ocp.CheckpointManager(tmp_path / "ckpt") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.Composite(state=SAVE))
    shutil.rmtree(tmp_path / "ckpt" / "2" / "state")
    with ocp.CheckpointManager(tmp_path / "ckpt") as manager:
        assert manager.latest_step() == 2
        with pytest.raises(Exception, match="state"):
            manager.restore(2, args=ocp.args.Composite(state=ocp.args.StandardRestore()))


def test_orbax_removes_what_another_manager_is_writing(tmp_path):
    """With `cleanup_tmp_directories`, at its start: so only one process at a time may own a folder."""
    (tmp_path / "5.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=SAVE)
        manager.wait_until_finished()
        assert not (tmp_path / "5.orbax-checkpoint-tmp").exists()


def ints():
    return grain.MapDataset.range(100)


def rows():
    return grain.MapDataset.source([{"x": np.arange(3 + i % 5) + 10 * i} for i in range(40)])


WITHOUT_AN_INDEX = {
    "iterator filter": lambda: ints().to_iter_dataset(RAW).filter(lambda x: x % 3 != 1),
    "mix": lambda: grain.IterDataset.mix([ints().to_iter_dataset(RAW)] * 2, weights=[0.5, 0.5]),
    "packing": lambda: grain.experimental.ConcatThenSplitIterDataset(
        rows().to_iter_dataset(RAW), length_struct={"x": 6}
    ),
    "window shuffle": lambda: grain.experimental.WindowShuffleIterDataset(
        ints().to_iter_dataset(RAW), window_size=4, seed=1
    ),
}


@pytest.mark.parametrize("kind", WITHOUT_AN_INDEX)
def test_grain_has_no_index_behind_what_drops_or_draws(kind):
    source = WITHOUT_AN_INDEX[kind]()
    with pytest.raises(NotImplementedError):
        set_next_index(iter(source), 5)
    assert SkippingIterator(source).how == "drain"


def test_grain_counts_source_positions_behind_a_map_level_filter():
    source = ints().filter(lambda x: x % 3 != 1).to_iter_dataset(RAW)
    iterator = iter(source)
    set_next_index(iterator, 5)
    assert [*source][5] == 8
    assert next(iterator) == 5
    assert SkippingIterator(source).how == "drain"


def test_grain_counts_source_positions_behind_a_map_that_returns_none():
    source = ints().map(lambda x: None if x == 2 else x).to_iter_dataset(RAW)
    iterator = iter(source)
    set_next_index(iterator, 5)
    assert [*source][5] == 6
    assert next(iterator) == 5
    assert [next(iterator), get_next_index(iterator)] == [6, 7]


def test_grain_packs_other_batches_from_a_state_that_was_json():
    """Its state has tuples, which it compares with tuples; JSON makes lists of them."""
    source = WITHOUT_AN_INDEX["packing"]()
    want = [batch["x"].tolist() for batch in source]
    iterator = iter(source)
    next(iterator)
    state = iterator.get_state()
    for through, same in ((copy.deepcopy, True), (lambda x: json.loads(json.dumps(x)), False)):
        again = iter(source)
        again.set_state(through(state))
        assert ([next(again)["x"].tolist() for _ in range(3)] == want[1:4]) is same


def test_grain_loses_its_place_when_an_element_raises():
    """The elements after it come, but the index does not count it."""

    def read(x):
        if x == 2:
            raise OSError("no such record")
        return x

    iterator = iter(
        ints().map(read).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    )
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(OSError, match="no such record"):
        next(iterator)
    assert next(iterator) == 3
    assert get_next_index(iterator) == 3


def test_optax_monitor_changes_the_structure_of_its_state():
    """It recompiles after the first update, a scan refuses it, and a checkpoint of a fresh state has another tree."""
    monitor = optax.contrib.monitor if hasattr(optax.contrib, "monitor") else optax.monitor
    tx = monitor({"n": lambda updates, **_: optax.tree.norm(updates)})
    params = {"w": jnp.ones(2)}
    before = tx.init(params)
    _, after = tx.update(params, before, params)
    assert jax.tree.structure(before) != jax.tree.structure(after)
