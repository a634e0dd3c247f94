"""The one number a rule needs: the global L2 norm of a pytree, accumulated in float32 or wider."""

import jax
import jax.numpy as jnp

from zclip_jax._typing import FloatScalar, PyTree


def is_gradient(x: jax.typing.ArrayLike) -> bool:
    """Whether a leaf takes part in norm and scaling: floats and complex; not ints, bools, keys or float0."""
    return jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact)


def accumulator_dtype(x: jax.typing.ArrayLike) -> jnp.dtype:
    """The real dtype in which a leaf is squared and scaled: float32, or float64 for 64-bit leaves."""
    wide = jnp.finfo(jax.dtypes.result_type(x)).bits == 64
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def global_norm(tree: PyTree, axis_name: str | tuple[str, ...] | None = None) -> FloatScalar:
    """The L2 norm over all float and complex leaves of `tree`, each entry counted once.

    Squares are taken and summed in float32 (float64 for 64-bit leaves), so a norm above 1.8e19 overflows to
    `inf` and one below 1e-22 underflows to 0. Each leaf is read once.

    Args:
      tree: the gradients; any shapes, zero-size ones included. A tree without such leaves has norm 0.
      axis_name: mapped axes (of `pmap` or `shard_map`) over which the leaves are split; their square sums
        are added with one `jax.lax.psum`.
    """
    sums = [_square_sum(x) for x in jax.tree.leaves(tree) if is_gradient(x)]
    widest = max((s.dtype for s in sums), key=lambda dtype: dtype.itemsize, default=jnp.float32)
    total = sum((s.astype(widest) for s in sums), jnp.zeros((), widest))
    if axis_name is not None:
        total = jax.lax.psum(total, axis_name)
    # With derivative 0 at 0, where the root has none.
    zero = total == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, total)))


def _square_sum(x: jax.typing.ArrayLike) -> FloatScalar:
    x = jnp.asarray(x)
    dtype = accumulator_dtype(x)
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    squares = [jnp.square(part.astype(dtype)) for part in parts]
    return jnp.sum(sum(squares[1:], squares[0]))
