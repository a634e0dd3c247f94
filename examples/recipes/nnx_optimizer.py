"""Flax NNX with an `nnx.Optimizer`: `python examples/recipes/nnx_optimizer.py`.

The labels of one batch of this regression are 100 times too large.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zclip_jax import metrics, zclip

STEPS, BAD_STEP = 100, 70


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Returns inputs [64, 3] and targets [64, 1]."""
    x, noise = jnp.split(jax.random.normal(jax.random.key(step), (64, 4)), [3], axis=1)
    y = x.sum(axis=1, keepdims=True) + 0.5 * noise
    return x, y * 100 if step == BAD_STEP else y


# [recipe]
tx = optax.chain(zclip(), optax.adam(0.1))  # ahead of the optimizer


@nnx.jit
def train_step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return metrics(optimizer) | {"loss": loss}


def main() -> list[int]:
    """Returns the steps at which the rule fired."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer, spikes, logged = nnx.Optimizer(model, tx, wrt=nnx.Param), [], {}
    for step in range(STEPS):
        logged = train_step(model, optimizer, *batch(step))
        if logged["zclip/fired"]:
            spikes.append(step)
            print(
                f"step {step}: norm {logged['zclip/grad_norm']:.1f}, scale {logged['zclip/clip_scale']:.4f}"
            )
    print(f"loss {logged['loss']:.2f} after {STEPS} steps, spikes: {logged['zclip/num_fired']}")
    return spikes


if __name__ == "__main__":
    main()
