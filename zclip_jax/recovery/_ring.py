"""The last few states in host memory, so that a rewind is a copy and not a read of the disk."""

import copy
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zclip_jax._checks import check_count

Index = tuple[tuple[int, int], ...]  # which part of the global array: start and stop for each axis


class MemoryRing:
    """Keeps copies of the last `size` states in the host's memory, and gives them back to the devices.

    The copies lie in pinned memory (`pinned_host`) where accelerators have it, else in NumPy arrays. Each process
    keeps only what its own devices hold, and of equal copies on several devices one. `put` returns once the copies
    are on their way, and the state that you gave may then be donated; so may a state that `get` gave you.

    A checkpoint is known to be good only `grace` steps later, so keep one state more than you put in that time:
    `size = 1 + ceil(grace / save_every)`. A ring lives as long as its process: after a restart only the disk is left.

    Args:
      size: how many states to keep; a further one takes the place of the oldest.

    Examples:
      >>> import jax.numpy as jnp
      >>> from zclip_jax.recovery import MemoryRing
      >>> ring = MemoryRing(size=2)
      >>> for step in (10, 20, 30):
      ...     ring.put(step, {"w": jnp.full(4, step, jnp.float32)})
      >>> ring.steps, ring.nbytes, ring.get(20)["w"].tolist()
      ((20, 30), 32, [20.0, 20.0, 20.0, 20.0])
    """

    def __init__(self, size: int = 2):
        check_count("size", size, 1)
        self.size = size
        self._states: dict[int, tuple[list[Any], Any]] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the states that are kept, in order."""
        return tuple(sorted(self._states))

    @property
    def nbytes(self) -> int:
        """How many bytes this process's copies take."""
        kept = (leaf for leaves, _ in self._states.values() for leaf in leaves)
        return sum(leaf.nbytes for leaf in kept if isinstance(leaf, _Copy | np.ndarray))

    def put(self, step: int, state: Any) -> None:
        """Copies `state`, a pytree, as the one after `step` updates."""
        self._states.pop(step, None)
        while len(self._states) >= self.size:
            del self._states[min(self._states)]
        leaves, structure = jax.tree.flatten(state)
        self._states[step] = _keep_all(leaves), structure

    def get(self, step: int, like: Any = None) -> Any:
        """A new copy of the state after `step` updates.

        Args:
          step: one of `steps`.
          like: a pytree of arrays or of `jax.ShapeDtypeStruct`, whose shardings the copy shall have. Its arrays
            may be donated ones. None for the shardings that the state had.

        Raises:
          KeyError: there is no state of this step.
          ValueError: `like` has other leaves than the state, or needs parts that this process does not hold.
        """
        if step not in self._states:
            raise KeyError(f"step must be one of {list(self.steps)}, got {step}")
        kept, structure = self._states[step]
        wanted: list[Any] = [None] * len(kept)
        if like is not None:
            wanted, given = jax.tree.flatten(like)
            if given != structure:
                raise ValueError(f"like must have the structure of the state, {structure}, got {given}")
        return jax.tree.unflatten(structure, _give_all(kept, wanted))

    def drop_after(self, step: int) -> None:
        """Forgets the states of later steps, which a rewind to `step` has made worthless."""
        self._states = {kept: state for kept, state in self._states.items() if kept <= step}


@dataclass
class _Copy:
    """One array: its parts that lie on this process's devices, each once."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding
    key_impl: Any  # of a typed random key, else None
    parts: dict[Index, Any]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def _keep_all(leaves: list[Any]) -> list[Any]:
    kept, places, parts, hosts = [], [], [], []
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            kept.append(copy.deepcopy(leaf))
            continue
        impl = None
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            impl, leaf = jax.random.key_impl(leaf), jax.random.key_data(leaf)
        kept.append(_Copy(leaf.shape, leaf.dtype, leaf.sharding, impl, {}))
        for shard in leaf.addressable_shards:
            place = _index(shard.index, leaf.shape)
            if place not in kept[-1].parts:
                kept[-1].parts[place] = None
                places.append((kept[-1], place))
                parts.append(shard.data)
                hosts.append(_host_of(shard.device))
    if all(hosts):
        parts = jax.device_put(parts, hosts, may_alias=False)  # one call for all: each has its price
    else:
        for part in parts:
            part.copy_to_host_async()
        parts = [np.array(part) for part in parts]
    for (array, place), part in zip(places, parts, strict=True):
        array.parts[place] = part
    return kept


def _host_of(device: Any) -> Any:
    """Where to copy what lies on `device`; None for NumPy, which on a CPU is several times faster (measured)."""
    if device.platform == "cpu" or all(x.kind != "pinned_host" for x in device.addressable_memories()):
        return None
    return _pinned(device)


def _pinned(device: Any) -> Any:
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def _give_all(kept: list[Any], wanted: list[Any]) -> list[Any]:
    given, arrays, parts, devices = [], [], [], []
    for leaf, like in zip(kept, wanted, strict=True):
        if not isinstance(leaf, _Copy):
            given.append(copy.deepcopy(leaf))
            continue
        sharding = leaf.sharding
        if like is not None and leaf.key_impl is None:
            if (tuple(like.shape), like.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"like must hold {leaf.dtype}{list(leaf.shape)}, got {like.dtype}{list(like.shape)}"
                )
            sharding = getattr(like, "sharding", None) or sharding
        on = sharding.addressable_devices_indices_map(leaf.shape)
        arrays.append((len(given), leaf, sharding, len(on)))
        given.append(None)
        for device, place in on.items():
            part = _part(leaf, _index(place, leaf.shape))
            # JAX may take an aligned NumPy array for its own, whatever `may_alias` says.
            parts.append(part.copy() if isinstance(part, np.ndarray) else part)
            devices.append(jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    parts = iter(jax.device_put(parts, devices, may_alias=False))
    for at, leaf, sharding, count in arrays:
        here = [next(parts) for _ in range(count)]
        array = jax.make_array_from_single_device_arrays(leaf.shape, sharding, here)
        given[at] = array if leaf.key_impl is None else jax.random.wrap_key_data(array, impl=leaf.key_impl)
    return given


def _part(leaf: _Copy, place: Index) -> Any:
    """The part of the array at `place`, which may have been split in another way."""
    if place in leaf.parts:
        return leaf.parts[place]
    out = np.empty([stop - start for start, stop in place], leaf.dtype)
    filled = 0
    for kept, part in leaf.parts.items():
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(kept, place, strict=True)]
        if all(start < stop for start, stop in both):
            there = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, place, strict=True))
            here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, kept, strict=True))
            out[there] = np.asarray(part)[here]
            filled += out[there].size
    if filled != out.size:
        raise ValueError(
            f"like has a sharding that needs a part of an array, {list(place)} of {list(leaf.shape)}, which no "
            "device of this process held when the state was put"
        )
    return out


def _index(slices: Any, shape: tuple[int, ...]) -> Index:
    return tuple(s.indices(size)[:2] for s, size in zip(slices, shape, strict=True))
