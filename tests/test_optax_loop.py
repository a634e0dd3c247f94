"""The loop of `examples/optax_loop.py`."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "examples" / "optax_loop.py"


@pytest.mark.parametrize("loop", ["linen_loop", "nnx_loop"])
def test_only_the_bad_batch_is_a_spike(loop: str) -> None:
    spec = importlib.util.spec_from_file_location("optax_loop", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert list(getattr(module, loop)()) == [module.BAD_STEP]
