"""Settings that must stand before JAX is imported: eight CPU devices and checked signatures."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jaxtyping

# Every signature of the package is checked against its annotations while the tests run, and only then.
jaxtyping.install_import_hook("zclip_jax", "beartype.beartype")

import jax
import jax.experimental
import pytest


@pytest.fixture
def strict():
    """No silent widening of dtypes or ranks; optax itself would not pass this, so tests ask for it."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def x64():
    """The test runs with 64-bit types; older JAX keeps the context manager in `jax.experimental`."""
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable_x64(True):
        yield
