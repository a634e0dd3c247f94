"""The last norms in a ring buffer, and their mean and standard deviation."""

import jax
import jax.numpy as jnp

from zclip_jax._numerics import INT32_MAX, as_float, safe_sqrt


def push(buffer: jax.Array, count: jax.Array, x: jax.Array) -> jax.Array:
    """`buffer` `[window]` with its oldest entry, or its next free one, replaced; `count` were pushed before."""
    return buffer.at[count % buffer.size].set(x.astype(buffer.dtype))


def count_on(count: jax.Array, window: int) -> jax.Array:
    """One more; before int32 would wrap it goes back by a whole `window`, which leaves the places as they are."""
    return jnp.where(count == INT32_MAX, count - (window - 1), count + (count < INT32_MAX).astype(jnp.int32))


def mean_and_std(buffer: jax.Array, count: jax.Array, ddof: int = 0) -> tuple[jax.Array, jax.Array]:
    """Of the entries pushed so far, in two passes over them: running sums would drift, and go negative."""
    buffer, held = as_float(buffer), jnp.minimum(count, buffer.size)
    used = jnp.arange(buffer.size, dtype=jnp.int32) < held
    mean = jnp.sum(jnp.where(used, buffer, 0.0)) / jnp.maximum(held, 1).astype(buffer.dtype)
    squares = jnp.sum(jnp.where(used, jnp.square(buffer - mean), 0.0))
    return mean, safe_sqrt(squares / jnp.maximum(held - ddof, 1).astype(buffer.dtype))
