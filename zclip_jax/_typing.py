"""Array types of the signatures, and the dataclass of states.

With `jaxtyping` installed the types carry dtypes and shapes, which the tests check; elsewhere they are plain.
"""

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    # Type checkers know this decorator; chex makes the same class, registered as a pytree.
    from dataclasses import dataclass as dataclass

    FloatScalar = BoolScalar = IntScalar = Floats = FloatEach = BoolEach = IntEach = jax.Array
else:
    from chex import dataclass as dataclass

    try:
        from jaxtyping import Array, Bool, Float, Int
        from numpy import ndarray
    except ImportError:
        FloatScalar = BoolScalar = IntScalar = Floats = FloatEach = BoolEach = IntEach = jax.Array
    else:
        # A state restored from a checkpoint may hold NumPy arrays.
        FloatScalar = Float[Array | ndarray, ""]
        BoolScalar = Bool[Array | ndarray, ""]
        IntScalar = Int[Array | ndarray, ""]
        Floats = Float[Array | ndarray, "*groups n"]
        # Scalars, or one for each group of leaves.
        FloatEach = Float[Array | ndarray, "*groups"]
        BoolEach = Bool[Array | ndarray, "*groups"]
        IntEach = Int[Array | ndarray, "*groups"]

Numeric = Any
PyTree = Any
