"""Sums over what a checkpoint holds, so that a bit that changed on the disk is noticed."""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def sums(items: dict[str, Any]) -> dict[str, list[Any]]:
    """For each array `[dtype, shape, sum of its bits mod 2**32]`, for each other item the CRC of its JSON.

    Any one bit, and nearly any other change, changes a sum. Arrays are summed on their devices, so that this costs
    one read of them; every process gets the same numbers.
    """
    made: dict[str, list[Any]] = {}
    arrays = {}
    for name, item in items.items():
        leaves = jax.tree_util.tree_leaves_with_path(item)
        if any(isinstance(leaf, jax.Array | np.ndarray | np.generic) for _, leaf in leaves):
            for path, leaf in leaves:
                if isinstance(leaf, jax.Array | np.ndarray | np.generic):
                    key = name + jax.tree_util.keystr(path)
                    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                        leaf = jax.random.key_data(leaf)  # pyrefly: ignore[bad-argument-type]
                    made[key] = [str(leaf.dtype), list(leaf.shape)]
                    arrays[key] = _sum(leaf)
        else:
            made[name] = ["json", crc(item)]
    for key, total in jax.device_get(arrays).items():
        made[key].append(int(total))
    return made


def changed(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> list[str]:
    """The names whose sums differ, of those that are in both with one dtype and shape."""
    both = (name for name in before if name in after and before[name][:-1] == after[name][:-1])
    return [name for name in both if before[name] != after[name]]


def crc(value: Any) -> int:
    """The CRC-32 of `value` as JSON, the same before and after it was saved as JSON."""
    return zlib.crc32(json.dumps(value, default=str).encode())


def _sum(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return _sum_on_device(x)
    flat = np.ascontiguousarray(_whole_bytes(x)).reshape(-1)
    return flat.view(f"uint{8 * min(flat.itemsize, 4)}").sum(dtype=np.uint32)


@jax.jit
def _sum_on_device(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _sum_on_device(x.real) + _sum_on_device(x.imag)
    x = _whole_bytes(x)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}")
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def _whole_bytes(x: Any) -> Any:
    if x.dtype.name in ("bool", "int2", "int4", "uint2", "uint4"):
        return x.astype("int8")
    return x.astype("float32") if x.dtype.name == "float4_e2m1fn" else x
