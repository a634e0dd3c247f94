"""Runs rules over recorded norms, with the very function that training runs."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._checks import check_number
from zclip_jax._numerics import INT32_MAX, as_float
from zclip_jax._rule import Outcome, Rule, check_rule, decide_all
from zclip_jax._typing import PyTree


class Replay(NamedTuple):
    """What a rule decided on each recorded norm.

    Args:
      outcomes: an `Outcome` whose fields are arrays `[steps]`, or `[settings, steps]` from `sweep`.
      state: the rule's state after the last norm; `clip_by_rule(rule, prior_norms=…)` starts from such a one.
    """

    outcomes: Outcome
    state: PyTree

    @property
    def summary(self) -> dict[str, Any]:
        """Counts and rates over the steps, as NumPy numbers, or arrays `[settings]`.

        `longest_run` is of consecutive fired steps, between which steps that are not finite do not count;
        `locked_in_from` is the step from which on every step fired, -1 if there is none or the run is shorter
        than 50 steps.
        """
        fired, nonfinite = (np.asarray(getattr(self.outcomes, name)) for name in ("fired", "nonfinite"))
        steps = fired.shape[-1]
        counts = {
            f"num_{name}": np.asarray(getattr(self.outcomes, name)).sum(-1)
            for name in ("fired", "bound", "capped", "nonfinite")
        }
        rates = {
            f"{name}_rate": counts[f"num_{name}"] / max(steps, 1) for name in ("fired", "bound", "capped")
        }
        rows = [runs(*row) for row in zip(_rows(fired), _rows(nonfinite), strict=True)]
        longest, locked = (np.reshape(x, fired.shape[:-1])[()] for x in zip(*rows, strict=True))
        return {"num_steps": steps} | counts | rates | {"longest_run": longest, "locked_in_from": locked}


LOCKED_IN = 50


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def runs(fired: np.ndarray, nonfinite: np.ndarray) -> tuple[int, int]:
    """The longest run of fired steps, and the step from which on all fired, or -1; of arrays `[steps]`."""
    kept = np.flatnonzero(~nonfinite)
    edges = np.flatnonzero(np.diff(np.r_[0, fired[kept].astype(np.int8), 0]))
    starts, ends = edges[::2], edges[1::2]
    if not starts.size:
        return 0, -1
    open_ended = ends[-1] == kept.size and ends[-1] - starts[-1] >= LOCKED_IN
    return int(np.max(ends - starts)), int(kept[starts[-1]]) if open_ended else -1


def replay(rule: Any, norms: Any, *, value: Any = None, **extras: Any) -> Replay:
    """Runs `rule` over recorded norms.

    Replay is open loop: it shows the thresholds and rates that the rule would have had on these norms, not the
    loss, nor the norms that would have followed if it had acted.

    Args:
      rule: see `zclip_jax.rules`.
      norms: 1-D, global norms before clipping, oldest first; NaN and infinite ones are counted and passed over.
      value: 1-D of the same length, the losses, for rules that look at them.
      **extras: further arguments of the rule, each an array with the steps along its leading axis.

    Returns:
      A `Replay` with arrays `[steps]`. Works under `jax.vmap`, and under `jax.jit`, which spares later calls the
      compilation; its `summary` on concrete arrays.

    Raises:
      ValueError: `rule` is none, `norms` is not one-dimensional, or another argument has another length.

    Examples:
      >>> from zclip_jax import rules
      >>> from zclip_jax.replay import replay
      >>> result = replay(rules.zscore(warmup_steps=4), [1.0, 1.1, 0.9, 1.0, 5.0, 1.0])
      >>> result.outcomes.fired.tolist(), int(result.summary["num_fired"])
      ([False, False, False, False, True, False], 1)
    """
    check_rule(rule)
    norms, extras = _inputs(norms, value, extras)
    return Replay(*decide_all(rule, norms, **extras))


def sweep(
    rule_factory: Callable[..., Rule], norms: Any, *, value: Any = None, **grid: Any
) -> tuple[list[dict[str, Any]], Replay]:
    """Replays a rule with every combination of some hyperparameters, in one compiled call.

    Args:
      rule_factory: makes the rule from them, such as `rules.zscore` or a lambda.
      norms: 1-D, global norms before clipping, oldest first; NaN and infinite ones are counted and passed over.
      value: 1-D of the same length, the losses, for rules that look at them.
      **grid: hyperparameters by name, each one or more numbers; none that has to be a Python number, such as the
        length of a window.

    Returns:
      The settings, a mapping each, and a `Replay` with arrays `[settings, steps]` in the same order.

    Raises:
      ValueError: `grid` is empty or holds something other than numbers, the rule refuses a setting or needs it as a
        Python number, `norms` is not one-dimensional, or `value` has another length.

    Examples:
      >>> from zclip_jax import rules
      >>> from zclip_jax.replay import sweep
      >>> settings, result = sweep(rules.fixed, [1.0, 2.0, 3.0], max_norm=[0.5, 2.5])
      >>> settings[1], result.summary["num_fired"].tolist()
      ({'max_norm': 2.5}, [3, 1])
    """
    settings, decide = compile_sweep(rule_factory, grid)
    norms, extras = _inputs(norms, value, {})
    return settings, decide(norms, **extras)


def compile_sweep(
    rule_factory: Callable[..., Rule], grid: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Callable[..., Replay]]:
    """Each combination of the grid, and what replays norms with all of them; compiled once for a length."""
    if not grid:
        raise ValueError("sweep needs at least one hyperparameter, such as z_thresh=[2.0, 2.5, 3.0]")
    numbers = {name: _numbers(name, values) for name, values in grid.items()}
    settings = [dict(zip(numbers, values, strict=True)) for values in itertools.product(*numbers.values())]
    for setting in settings:
        check_rule(rule_factory(**setting))  # checks numbers, too, which it can't once they are traced
    for name in numbers:
        _check_traceable(rule_factory, name, settings[0])
    columns = {name: _column([setting[name] for setting in settings]) for name in numbers}
    decide = jax.jit(
        lambda columns, norms, extras: jax.vmap(
            lambda column: decide_all(rule_factory(**column), norms, **extras)
        )(columns)
    )
    return settings, lambda norms, **extras: Replay(*decide(columns, norms, extras))


NUMBERS = "one or more numbers, such as [2.0, 3.0]"


def _numbers(name: str, values: Any) -> list[Any]:
    listed = [] if isinstance(values, str | bytes | Mapping) or not np.iterable(values) else list(values)
    if not listed:
        raise ValueError(f"{name} must be {NUMBERS}, got {values!r}")
    for value in listed:
        if not isinstance(value, bool | np.bool_):  # flags are refused with a reason of their own
            check_number(name, value, NUMBERS, lambda _: True)
    return listed


def _column(values: list[Any]) -> jax.Array:
    column = np.asarray(values)
    wide = column.dtype.kind in "iu" and np.abs(column).max() > INT32_MAX  # more than JAX's integers hold
    return jnp.asarray(column.astype(float) if wide else values)


def _check_traceable(rule_factory: Callable[..., Rule], name: str, setting: dict[str, Any]) -> None:
    others = {other: value for other, value in setting.items() if other != name}
    try:
        jax.eval_shape(lambda x: rule_factory(**others, **{name: x}).init(), _column([setting[name]])[0])
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} can't be swept, since the rule's program depends on it: replay one rule for each value"
        ) from None


def as_norms(norms: Any) -> jax.Array:
    """One-dimensional `norms` as floats; those too large for one become infinite without a word."""
    if np.ndim(norms) != 1:
        raise ValueError(f"norms must be one-dimensional, got an array of shape {np.shape(norms)}")
    with np.errstate(over="ignore"):
        return as_float(norms)


def _inputs(norms: Any, value: Any, extras: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    norms = as_norms(norms)
    with np.errstate(over="ignore"):
        rest = extras if value is None else extras | {"value": as_float(value)}
    for name, x in rest.items():
        if np.shape(x)[:1] != norms.shape:
            raise ValueError(f"{name} must have {norms.size} steps like norms, got shape {np.shape(x)}")
    return norms, rest
