"""Flax Linen with a `TrainState`: `python examples/recipes/linen_train_state.py`.

The labels of one batch of this regression are 100 times too large.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training.train_state import TrainState

from zclip_jax import metrics, zclip

STEPS, BAD_STEP = 100, 70


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Returns inputs [64, 3] and targets [64, 1]."""
    x, noise = jnp.split(jax.random.normal(jax.random.key(step), (64, 4)), [3], axis=1)
    y = x.sum(axis=1, keepdims=True) + 0.5 * noise
    return x, y * 100 if step == BAD_STEP else y


# [recipe]
model = linen.Dense(1)
tx = optax.chain(zclip(), optax.adam(0.1))  # ahead of the optimizer


def new_state() -> TrainState:
    params = model.init(jax.random.key(0), jnp.zeros((1, 3)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state: TrainState, x: jax.Array, y: jax.Array):
    def loss_fn(params):
        return jnp.mean((state.apply_fn(params, x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, metrics(state) | {"loss": loss}


def main() -> list[int]:
    """Returns the steps at which the rule fired."""
    state, spikes, logged = new_state(), [], {}
    for step in range(STEPS):
        state, logged = train_step(state, *batch(step))
        if logged["zclip/fired"]:
            spikes.append(step)
            print(
                f"step {step}: norm {logged['zclip/grad_norm']:.1f}, scale {logged['zclip/clip_scale']:.4f}"
            )
    print(f"loss {logged['loss']:.2f} after {STEPS} steps, spikes: {logged['zclip/num_fired']}")
    return spikes


if __name__ == "__main__":
    main()
