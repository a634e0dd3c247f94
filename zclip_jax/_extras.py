"""Imports of packages that only an extra installs."""

import importlib
from typing import Any


def require(module: str, extra: str, purpose: str) -> Any:
    """Imports `module`, or raises an ImportError that names the extra which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {module.partition('.')[0]}: pip install 'zclip-jax[{extra}]'"
        ) from error
