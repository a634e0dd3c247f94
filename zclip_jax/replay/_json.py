"""What JSON can hold."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def to_json(x: Any) -> Any:
    """`x` with NumPy's numbers as Python's, and None for those that JSON has no word for."""
    if isinstance(x, Mapping):
        return {key: to_json(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [to_json(value) for value in x]
    if isinstance(x, np.generic):
        x = x.item()
    return None if isinstance(x, float) and not math.isfinite(x) else x
