"""Checks of arguments: a ValueError names the argument, what is accepted and the value received."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._numerics import INT32_MAX


def check_number(name: str, value: Any, accepted: str, ok: Callable[[Any], bool]) -> None:
    """Raises ValueError unless `value` is one number that `ok` accepts; traced values pass unseen."""
    if isinstance(value, jax.core.Tracer):
        return
    try:
        number = np.asarray(value)
    except (TypeError, ValueError):  # a ragged list, or an object that refuses
        number = np.asarray(None)
    real = number.dtype.kind in "iuf" or jnp.issubdtype(number.dtype, jnp.floating)
    if not (real and number.ndim == 0 and ok(number)):
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def check_count(name: str, value: Any, least: int, accepted: str = "") -> None:
    """Raises ValueError unless `value` is a whole number of at least `least`; traced values pass unseen."""
    check_number(
        name,
        value,
        f"an integer >= {least}{accepted}",
        lambda x: math.isfinite(x) and x >= least and x == int(x),
    )
    check_number(name, value, "below 2**31, as far as int32 counts", lambda x: x <= INT32_MAX)


def check_cap(value: Any) -> None:
    """Raises ValueError unless `value` can be `max_grad_norm`: a number, None, or a schedule, taken unseen."""
    if value is not None and not callable(value):
        check_number("max_grad_norm", value, "a number >= 0 or None", lambda x: x >= 0)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False, as a Python or NumPy bool: flags shape the program."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}{_static(value)}")


def check_length(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` can be the length of a buffer: a Python int, within what memory holds."""
    if isinstance(value, jax.Array):
        raise ValueError(f"{name} must be a Python int, got an array{_static(value)}")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    check_count(name, value, least)
    check_number(name, value, f"at most {LONGEST:,}, since as many norms are kept", lambda x: x <= LONGEST)


LONGEST = 10_000_000


def _static(value: Any) -> str:
    """What to do where `optax.inject_hyperparams` has made an array of an argument that must stay what it was."""
    return "; with optax.inject_hyperparams name it in static_args" if isinstance(value, jax.Array) else ""
