"""Arithmetic that rules share: types, roundings, counters and roots that hold for every number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INT32_MAX = np.iinfo(np.int32).max


def as_float(x: Any) -> jax.Array:
    """`x` in JAX's default float dtype: float32, or float64 under x64."""
    return jnp.asarray(x, jnp.result_type(float))


def unfused(product: jax.Array) -> jax.Array:
    """`product`, to be rounded before it is used on.

    Compilers fuse a product with the sum or product that follows in some programs and not in others, so that
    training and replay would differ in the last digit. They don't fuse across a select, though no number takes its
    other side.
    """
    return jnp.where(jnp.isnan(product), 0.0, product)


def moving_mean(mean: jax.Array, x: jax.Array, decay: jax.Array) -> jax.Array:
    """`decay * mean + (1 - decay) * x`."""
    return unfused(decay * mean) + unfused((1 - decay) * x)


def safe_sqrt(x: jax.Array) -> jax.Array:
    """The square root of `x` >= 0, with derivative 0 instead of infinity at 0."""
    zero = x == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, x)))


def increment(count: Any, when: Any = True) -> jax.Array:
    """The int32 `count`, one higher where `when` holds; the largest int32 stays, where adding would wrap."""
    count = jnp.asarray(count, jnp.int32)
    room = (count < INT32_MAX) & jnp.asarray(when, bool)
    return count + room.astype(jnp.int32)
