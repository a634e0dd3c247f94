"""Plain optax: `python examples/recipes/plain_optax.py`.

The labels of one batch of this regression are 100 times too large.
"""

import jax
import jax.numpy as jnp
import optax

from zclip_jax import metrics, zclip

STEPS, BAD_STEP = 100, 70


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Returns inputs [64, 3] and targets [64, 1]."""
    x, noise = jnp.split(jax.random.normal(jax.random.key(step), (64, 4)), [3], axis=1)
    y = x.sum(axis=1, keepdims=True) + 0.5 * noise
    return x, y * 100 if step == BAD_STEP else y


def loss_fn(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


# [recipe]
tx = optax.chain(zclip(), optax.adam(0.1))  # ahead of the optimizer


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, metrics(opt_state) | {"loss": loss}


def main() -> list[int]:
    """Returns the steps at which the rule fired."""
    params = {"w": jnp.zeros((3, 1)), "b": jnp.zeros(1)}
    opt_state, spikes, logged = tx.init(params), [], {}
    for step in range(STEPS):
        params, opt_state, logged = train_step(params, opt_state, *batch(step))
        if logged["zclip/fired"]:
            spikes.append(step)
            print(
                f"step {step}: norm {logged['zclip/grad_norm']:.1f}, scale {logged['zclip/clip_scale']:.4f}"
            )
    print(f"loss {logged['loss']:.2f} after {STEPS} steps, spikes: {logged['zclip/num_fired']}")
    return spikes


if __name__ == "__main__":
    main()
