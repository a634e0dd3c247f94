"""MemoryRing: what comes back is bit for bit what went in, on the right devices, and outlives donation."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from zclip_jax.recovery import MemoryRing, _ring

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def sharded(spec, x):
    return jax.device_put(x, NamedSharding(MESH, PartitionSpec(*spec)))


def state_of(seed):
    rng = np.random.default_rng(seed)
    return {
        "split": sharded(("data", "model"), rng.normal(size=(4, 8)).astype(np.float32)),
        "replicated": sharded((), rng.normal(size=6).astype(np.float32)),
        "half": sharded((None, "model"), rng.normal(size=(3, 4)).astype(ml_dtypes.bfloat16)),
        "step": jnp.int32(seed),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(seed),
        "on host": rng.normal(size=3),
        "name": f"state {seed}",
        "none": None,
    }


def bits(tree):
    def plain(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(lambda x: x if isinstance(x, str) else np.asarray(plain(x)).tobytes(), tree)


@pytest.fixture(params=["pinned_host", "NumPy"])
def memory(request, monkeypatch):
    """Where the copies lie; a CPU has pinned memory too, although nothing is gained by it."""
    if request.param == "pinned_host":
        kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
        if "pinned_host" not in kinds:
            pytest.skip("this JAX has no pinned_host on a CPU")
        monkeypatch.setattr(_ring, "_host_of", _ring._pinned)
    return request.param


def assert_same(got, want):
    assert bits(got) == bits(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(x) is type(y)
        if isinstance(x, jax.Array):
            assert (x.dtype, x.shape, x.sharding) == (y.dtype, y.shape, y.sharding)


def test_the_same_bits_and_shardings_come_back(memory):
    ring = MemoryRing(size=2)
    for step in (10, 20):
        ring.put(step, state_of(step))
    for step in (10, 20):
        want = state_of(step)
        assert_same(ring.get(step), want)
        assert_same(ring.get(step, like=state_of(7)), want)


def test_a_state_that_is_donated_leaves_the_copies_alone(memory):
    @jax.jit
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    donating = jax.jit(step, donate_argnums=0)
    start = {"w": sharded(("data",), np.arange(1 << 12, dtype=np.float32)), "n": sharded((), np.float32(0))}
    want = bits(start)
    state, ring = start, MemoryRing()
    ring.put(0, state)
    for _ in range(3):
        state = donating(state)
    assert start["w"].is_deleted()
    for _ in range(2):  # what was given is donated too
        given = ring.get(0, like=start)  # of deleted arrays only shapes and shardings are read
        assert bits(given) == want
        after = donating(given)
        assert given["w"].is_deleted()
        np.testing.assert_array_equal(after["w"], np.arange(1 << 12) + 1)


def test_large_arrays_share_no_memory(memory):
    """JAX may take an aligned NumPy array for its own."""
    x = jax.device_put(np.arange(1 << 20, dtype=np.float32), jax.devices()[0])
    ring = MemoryRing()
    ring.put(0, [x])
    (leaf,), _ = ring._states[0]
    ((place, part),) = leaf.parts.items()
    if isinstance(part, np.ndarray):
        room = np.empty(part.nbytes + 64, np.uint8)
        aligned = room[-room.ctypes.data % 64 :][: part.nbytes].view(part.dtype).reshape(part.shape)
        aligned[:] = part
        part = leaf.parts[place] = aligned
    one, two = ring.get(0)[0], ring.get(0)[0]
    kept = part.ctypes.data if isinstance(part, np.ndarray) else part.unsafe_buffer_pointer()
    assert len({kept, *(array.unsafe_buffer_pointer() for array in (x, one, two))}) == 4


def test_numpy_leaves_are_copies(memory):
    x, ring = np.ones(3), MemoryRing()
    ring.put(0, [x])
    x[:] = 5
    (y,) = ring.get(0)
    y[:] = 6
    np.testing.assert_array_equal(ring.get(0)[0], 1)


def test_another_sharding(memory):
    state = {"x": sharded(("data", "model"), np.arange(64, dtype=np.float32).reshape(8, 8))}
    ring = MemoryRing()
    ring.put(1, state)
    for sharding in (
        NamedSharding(MESH, PartitionSpec("model")),
        NamedSharding(MESH, PartitionSpec(None, ("model", "data"))),
        NamedSharding(MESH, PartitionSpec()),
        SingleDeviceSharding(jax.devices()[3]),
    ):
        got = ring.get(1, like={"x": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)})
        assert got["x"].sharding == sharding
        np.testing.assert_array_equal(got["x"], state["x"])


def test_parts_held_elsewhere_are_missed(memory):
    ring = MemoryRing()
    ring.put(1, [sharded(("data",), np.arange(8.0, dtype=np.float32))])
    (leaf,), _ = ring._states[1]
    del leaf.parts[((4, 8),)]
    with pytest.raises(ValueError, match=r"a part of an array, \[\(0, 8\)\] of \[8\], which no"):
        ring.get(
            1, like=[jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec()))]
        )


def test_each_part_is_held_once(memory):
    ring = MemoryRing(size=3)
    ring.put(1, [sharded((), np.zeros(100, np.float32)), sharded(("data",), np.zeros((2, 100), np.float32))])
    assert ring.nbytes == 400 + 800
    ring.put(2, [np.zeros(10), "text", None])
    assert ring.nbytes == 1200 + 80
    ring.drop_after(1)
    assert ring.nbytes == 1200


def test_which_states_are_kept():
    ring = MemoryRing(size=2)
    assert ring.steps == ()
    for step in (1, 2, 3):
        ring.put(step, step)
    assert ring.steps == (2, 3)
    ring.put(3, 33)
    assert (ring.steps, ring.get(3)) == ((2, 3), 33)
    ring.drop_after(2)
    assert ring.steps == (2,)
    with pytest.raises(KeyError, match=r"one of \[2\], got 3"):
        ring.get(3)
    ring.put(3, 4)
    ring.drop_after(0)
    assert (ring.steps, ring.nbytes) == ((), 0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="size must be an integer >= 1, got 0"):
        MemoryRing(size=0)
    ring = MemoryRing()
    ring.put(1, {"a": jnp.zeros(2)})
    with pytest.raises(ValueError, match="like must have the structure"):
        ring.get(1, like={"b": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"like must hold float32\[2\], got float32\[3\]"):
        ring.get(1, like={"a": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"like must hold float32\[2\], got int32\[2\]"):
        ring.get(1, like={"a": jnp.zeros(2, int)})
