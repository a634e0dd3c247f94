"""Gradients of a scaled loss."""

from typing import Any

import jax
import jax.numpy as jnp

from zclip_jax._norm import accumulator_dtype, is_gradient
from zclip_jax._typing import PyTree


def unscale(grads: PyTree, loss_scale: Any) -> PyTree:
    """Takes the loss scale out of gradients, in float32, ahead of the clipping and the optimizer.

    Clipping must see the true norm: a scale that changes would read as a shift. Gradients that overflowed under
    the scale stay infinite or NaN, so the step counts as non-finite: it is not absorbed and is no spike.

    `flax.training.dynamic_scale.DynamicScale.value_and_grad` returns gradients that are unscaled already.

    Args:
      grads: gradients of `loss * loss_scale`, any float dtype.
      loss_scale: scalar, the factor.

    Returns:
      The gradients of the loss, float32 (float64 where they are).

    Examples:
      >>> import jax.numpy as jnp
      >>> from zclip_jax import unscale
      >>> unscale(jnp.asarray([1024.0, 2048.0], jnp.float16), 2.0**10)
      Array([1., 2.], dtype=float32)
    """

    def divide(x):
        if not is_gradient(x):
            return x
        x, dtype = jnp.asarray(x), accumulator_dtype(x)
        scale = jnp.asarray(loss_scale, dtype)
        if jnp.iscomplexobj(x):
            return jax.lax.complex(x.real / scale, x.imag / scale)
        return x.astype(dtype) / scale

    return jax.tree.map(divide, grads)
