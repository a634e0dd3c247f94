"""Faults to plant into a run: batches of noise, rows of one token, and a gradient that is wrong in one tensor."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax import group_names


@dataclasses.dataclass(frozen=True)
class FaultOptions:
    """Faults to plant, to see what clipping and monitoring make of them."""

    spike_steps: tuple[int, ...] = ()  # Steps whose batch is replaced by random tokens.
    bad_row_steps: tuple[int, ...] = ()  # Steps one row of whose batch becomes one random token, repeated.
    bad_tensor_steps: tuple[int, ...] = ()  # Steps on which one gradient is multiplied by bad_factor.
    bad_tensor: str | None = None  # Which one: a parameter, or a layer of one as in blocks/attention/wq[2].
    bad_factor: float = 100.0  # nan makes the gradient NaN.


def is_stacked(path: Any) -> bool:
    """Whether a parameter of the model holds one tensor for each layer."""
    return path[0].key == "blocks"


def bad_row(seed: int, step: int, batch_size: int) -> int:
    """The position in the batch of the row that is replaced on a step of `bad_row_steps`."""
    return int(np.random.default_rng([seed, step, 1]).integers(batch_size))


def spoil_rows(
    options: FaultOptions,
    rows: np.ndarray,
    step: int,
    *,
    first: int,
    batch_size: int,
    vocab_size: int,
    seed: int,
) -> np.ndarray:
    """Rows from position `first` on of a batch, spoiled where a fault is planted; the same on each call."""
    if step not in (*options.spike_steps, *options.bad_row_steps):
        return rows
    positions = np.arange(first, first + len(rows))
    shape = (batch_size, rows.shape[1])
    noise = np.random.default_rng([seed, step]).integers(vocab_size, size=shape, dtype=np.int32)
    if step in options.spike_steps:
        return noise[positions]
    is_bad = positions == bad_row(seed, step, batch_size)
    return np.where(is_bad[:, None], noise[0, 0], rows)


def find_tensor(options: FaultOptions, params: Any) -> np.ndarray:
    """Of the tensors of the model, layer by layer, which one is bad: bool [tensors]; ValueError if none is."""
    names = group_names(params, stacked=is_stacked)
    if options.bad_tensor_steps and options.bad_tensor not in names:
        raise ValueError(
            f"bad_tensor must be one of {', '.join(group_names(params))}, those of blocks with a layer behind it as "
            f"in {names[0]}; got {options.bad_tensor!r}"
        )
    return np.array([name == options.bad_tensor for name in names])


def spoil_gradients(options: FaultOptions, grads: Any, step: jax.Array) -> Any:
    """Multiplies the gradient of one tensor on some steps; without such steps nothing is traced."""
    if not options.bad_tensor_steps:
        return grads
    is_bad = find_tensor(options, grads)
    now = jnp.isin(step, jnp.asarray(options.bad_tensor_steps))
    factors = jnp.where(now & is_bad, options.bad_factor, 1.0)
    places = iter(range(len(is_bad)))

    def spoil(path: Any, x: jax.Array) -> jax.Array:
        if not is_stacked(path):
            return x * factors[next(places)]
        layers = np.array([next(places) for _ in range(x.shape[0])])
        return x * factors[layers].reshape(-1, *[1] * (x.ndim - 1))

    return jax.tree_util.tree_map_with_path(spoil, grads)
