"""Settings that must stand before JAX is imported: eight CPU devices, a compilation cache, checked signatures."""

import atexit
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Most of the tests' time is compilation. What one process has compiled, its siblings and children load. The
# folder is deleted at the end, since a killed process may leave a damaged file; name one to keep it for a rerun.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="zclip-jax-compiled-", ignore_cleanup_errors=True)
    atexit.register(compiled.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jaxtyping

# Every signature of the package is checked against its annotations while the tests run, and only then.
jaxtyping.install_import_hook("zclip_jax", "beartype.beartype")

import functools

import jax
import jax.experimental
import pytest

from zclip_jax._rule import decide_all
from zclip_jax.replay import _replay, _specs


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


@pytest.fixture(scope="module")
def compiled_once():
    """`replay` of a rule with the same settings and as many steps compiles once, for modules that run many."""
    make, known = _specs.make_rule, functools.lru_cache(None, typed=True)(_specs.make_rule)

    def make_rule(name, **settings):
        traced = any(isinstance(x, jax.Array) for x in settings.values())
        return (make if traced else known)(name, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_specs, "make_rule", make_rule)
        patch.setattr(_replay, "decide_all", jax.jit(decide_all, static_argnums=0))
        yield
