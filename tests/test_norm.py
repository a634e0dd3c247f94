"""`_norm.global_norm` against NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zclip_jax._norm import global_norm

pytestmark = pytest.mark.usefixtures("strict")


def numpy_norm(tree):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    wide = [x.astype(np.complex128) for x in leaves if x.dtype.kind not in "ib"]
    return np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in wide))


DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.complex64, np.int32)


@st.composite
def trees(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    leaves = draw(
        st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), max_size=6)
    )
    scale = 10.0 ** draw(st.integers(-3, 3))

    def leaf(shape, dtype):
        values = rng.standard_normal(shape) * scale
        if dtype is np.complex64:
            values = values + 1j * rng.standard_normal(shape)
        return np.asarray(values).astype(dtype)

    return {"list": [leaf(shape, dtype) for shape, dtype in leaves], "none": None}


@given(trees())
@settings(max_examples=40, deadline=None)
def test_equals_numpy_on_random_trees(tree):
    norm = global_norm(tree)
    assert norm.dtype == jnp.float32
    assert norm.shape == ()
    np.testing.assert_allclose(norm, numpy_norm(tree), rtol=1e-6)


@pytest.mark.parametrize("tree", [{}, (), None, jnp.zeros((0, 3)), {"i": jnp.arange(3)}])
def test_nothing_to_measure_is_zero(tree):
    norm = global_norm(tree)
    assert norm == 0.0
    assert norm.dtype == jnp.float32


def test_accumulates_in_float64_where_leaves_are(x64):
    tree = {"a": jnp.full(3, 1e-9), "b": jnp.ones(4, jnp.float32), "c": jnp.ones(2, jnp.bfloat16)}
    norm = global_norm(tree)
    assert norm.dtype == jnp.float64
    np.testing.assert_allclose(norm, numpy_norm(tree), rtol=1e-15)
    assert global_norm({"b": jnp.ones(4, jnp.float32)}).dtype == jnp.float32
    assert global_norm(jnp.ones(4, jnp.complex128)).dtype == jnp.float64


def test_many_small_squares_are_not_lost():
    """A running float32 sum would stop growing at 2**24."""
    np.testing.assert_allclose(jax.jit(global_norm)(jnp.ones(40_000_000)), 40e6**0.5, rtol=1e-6)


def test_python_scalars_count():
    np.testing.assert_allclose(global_norm([3.0, jnp.asarray(4.0), 7]), 5.0)


def test_float8_and_keys():
    tree = {"f8": jnp.asarray([3.0, 4.0], jnp.float8_e4m3fn), "key": jax.random.key(0)}
    np.testing.assert_allclose(global_norm(tree), 5.0)


def test_reads_no_more_than_the_plain_sum_of_squares():
    """One read with the XLA of today; older ones materialise the squares, for everybody."""

    def bytes_accessed(norm):
        leaves = {f"w{i}": jax.ShapeDtypeStruct((256, 1024), jnp.float32) for i in range(8)}
        cost = jax.jit(norm).lower(leaves).compile().cost_analysis()
        return (cost[0] if isinstance(cost, list) else cost)["bytes accessed"]

    def plain(tree):
        return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))

    assert bytes_accessed(global_norm) <= bytes_accessed(plain)
