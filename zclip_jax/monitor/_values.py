"""From values on devices to numbers on the host."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Number = bool | int | float


def keep(value: Any) -> Any:
    """`value` as it is now: what is on the host may be written into before the row is."""
    return np.array(value) if isinstance(value, np.ndarray) else value


def fetch(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Waits for values, which is to be done on the thread that trains.

    Returns:
      Python numbers and NumPy arrays by name; and of what is neither, or can't be read, why. What a step that failed
      raises is raised here, where its results are waited for.
    """
    unread: dict[str, str] = {}
    try:
        there = jax.device_get(list(values.values()))
    except Exception:
        unread = {name: why for name, value in values.items() if (why := _unreadable(value))}
        if not unread:
            raise
        values = {name: value for name, value in values.items() if name not in unread}
        there = jax.device_get(list(values.values()))
    host = {}
    for name, value in zip(values, there, strict=True):
        number = as_number(value)
        if number is None:
            unread[name] = (
                "it is traced: call log outside of the function that is jitted"
                if isinstance(value, jax.core.Tracer)
                else f"it is no number and no array of numbers, but {type(value).__name__}"
            )
        else:
            host[name] = number
    return host, unread


def _unreadable(value: Any) -> str | None:
    if not isinstance(value, jax.Array):
        return None
    if value.is_deleted():
        return "its buffer was donated to a later step; log what the jitted step returns beside its state"
    if not (value.is_fully_addressable or value.is_fully_replicated):
        return "it is spread over several processes; reduce it inside of the step"
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return f"it is of type {value.dtype}"
    return None


def as_number(value: Any) -> Number | np.ndarray | None:
    """A Python number, or an array of more; None if `value` is neither."""
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        real = value.dtype.kind in "biuf" or jax.dtypes.issubdtype(value.dtype, np.number)
        if not real or value.dtype.kind == "c":
            return None
        if value.ndim:
            return np.asarray(value)
        number = value.item()
        return number if isinstance(number, bool | int) else float(number)  # a longdouble stays one
    return None
