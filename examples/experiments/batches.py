"""What a step is given: its batch, whole or corrupt, before or after a shift, and its learning rate.

A lane is a mapping of numbers, traced scalars; `config.Settings` says what each means.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from examples.experiments.config import FAULTS

Lane = Mapping[str, jax.Array]


def batch_at(
    step: jax.Array, lane: Lane, windows: jax.Array, batch: int, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Inputs, targets and their weights [B, T], and the gradient's factor; steps count from the trunk's start."""
    at = step - lane["trunk"]  # from 0 where the arms begin
    shifted = at >= lane["steps"] // 4
    half = windows.shape[0] // 2
    low = jnp.where((lane["mix"] > 0) & shifted, half, 0)
    high = jnp.where((lane["mix"] > 0) & ~shifted, half, windows.shape[0])
    pick, junk, order = jax.random.split(jax.random.fold_in(jax.random.key(lane["seed"]), step), 3)
    rows = windows[jax.random.randint(pick, (batch,), low, high)].astype(jnp.int32)

    period = jnp.maximum(lane["period"], 1)
    bad = (at >= 0) & (lane["period"] > 0) & (at % period == period // 2)
    kind = jnp.where(bad, lane["fault"], 0)
    noise = jax.random.randint(junk, rows.shape, 0, vocab_size)
    one = jnp.broadcast_to(noise[0, 0], rows.shape)
    ngram = jnp.take(rows, jnp.arange(rows.shape[1]) % 4, axis=1)
    is_kind = [kind == FAULTS.index(name) for name in ("noise", "repeat", "ngram")]
    rows = jnp.select(is_kind, [noise, one, ngram], rows)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    shuffled = jax.random.permutation(order, targets.ravel()).reshape(targets.shape)
    targets = jnp.where(kind == FAULTS.index("shuffle"), shuffled, targets)

    kept_rows = jnp.arange(batch) < jnp.where(shifted, lane["rows"], batch)
    kept_positions = jnp.arange(inputs.shape[1]) < jnp.where(shifted, lane["positions"], inputs.shape[1])
    weights = (kept_rows[:, None] & kept_positions).astype(jnp.float32)
    factor = jnp.where(kind == FAULTS.index("nan"), jnp.nan, lane["loss_factor"])
    return inputs, targets, weights, factor


def learning_rate(step: jax.Array, lane: Lane) -> jax.Array:
    """Rises, stays, and falls to a tenth over the last 30 % of the arms' steps."""
    rise = jnp.minimum((step + 1) / jnp.maximum(lane["warmup"], 1), 1.0)
    left = (lane["trunk"] + lane["steps"] - step) / (0.3 * lane["steps"])
    return lane["lr"] * rise * jnp.clip(left, 0.1, 1.0)
