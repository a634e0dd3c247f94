"""The last norms in a ring buffer, and their mean and standard deviation."""

from typing import Any

import jax
import jax.numpy as jnp

from zclip_jax._rule import check_count, safe_sqrt


def check_window(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` can be the static length of a buffer."""
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{name} must be a Python int, got an array; with optax.inject_hyperparams name it in static_args"
        )
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    check_count(name, value, least)


def push(buffer: jax.Array, count: jax.Array, x: jax.Array) -> jax.Array:
    """`buffer` `[window]` with its oldest entry, or its next free one, replaced; `count` were pushed before."""
    return buffer.at[count % buffer.size].set(x)


def mean_and_std(buffer: jax.Array, count: jax.Array, ddof: int = 0) -> tuple[jax.Array, jax.Array]:
    """Of the entries pushed so far, in two passes over them: running sums would drift, and go negative."""
    held = jnp.minimum(count, buffer.size)
    used = jnp.arange(buffer.size, dtype=jnp.int32) < held
    mean = jnp.sum(jnp.where(used, buffer, 0.0)) / jnp.maximum(held, 1).astype(buffer.dtype)
    squares = jnp.sum(jnp.where(used, jnp.square(buffer - mean), 0.0))
    return mean, safe_sqrt(squares / jnp.maximum(held - ddof, 1).astype(buffer.dtype))
