"""The shortest loops with ZClip, in Linen and in NNX: `python examples/optax_loop.py`.

The labels of one batch of this regression are 100 times too large.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

from zclip_jax import metrics, zclip

STEPS, BAD_STEP = 100, 70
TX = optax.chain(zclip(), optax.adam(0.1))


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Returns inputs [64, 3] and targets [64, 1]."""
    x, noise = jnp.split(jax.random.normal(jax.random.key(step), (64, 4)), [3], axis=1)
    y = x.sum(axis=1, keepdims=True) + 0.5 * noise
    return x, y * 100 if step == BAD_STEP else y


def linen_loop() -> Iterator[int]:
    model = linen.Dense(1)
    params = model.init(jax.random.key(0), jnp.zeros((1, 3)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=TX)

    @jax.jit
    def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> TrainState:
        grads = jax.grad(lambda p: jnp.mean((state.apply_fn(p, x) - y) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    for step in range(STEPS):
        state = train_step(state, *batch(step))
        if metrics(state)["zclip/fired"]:
            yield step


def nnx_loop() -> Iterator[int]:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def train_step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
        optimizer.update(model, nnx.grad(lambda m: jnp.mean((m(x) - y) ** 2))(model))

    for step in range(STEPS):
        train_step(model, optimizer, *batch(step))
        if metrics(optimizer)["zclip/fired"]:
            yield step


if __name__ == "__main__":
    print("Linen TrainState, spikes at steps", list(linen_loop()))
    print("nnx.Optimizer, spikes at steps", list(nnx_loop()))
