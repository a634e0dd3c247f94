"""Equinox: `python examples/recipes/equinox_module.py`.

The labels of one batch of this regression are 100 times too large.
"""

import equinox as eqx
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


# [recipe]
tx = optax.chain(zclip(), optax.adam(0.1))  # ahead of the optimizer


@eqx.filter_jit
def train_step(model: eqx.nn.MLP, opt_state: optax.OptState, x: jax.Array, y: jax.Array):
    loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2))(model)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, metrics(opt_state) | {"loss": loss}


def main() -> list[int]:
    """Returns the steps at which the rule fired."""
    model = eqx.nn.MLP(3, 1, width_size=16, depth=1, key=jax.random.key(0))
    opt_state, spikes, logged = tx.init(eqx.filter(model, eqx.is_inexact_array)), [], {}
    for step in range(STEPS):
        model, opt_state, logged = train_step(model, opt_state, *batch(step))
        if logged["zclip/fired"]:
            spikes.append(step)
            print(
                f"step {step}: norm {logged['zclip/grad_norm']:.1f}, scale {logged['zclip/clip_scale']:.4f}"
            )
    print(f"loss {logged['loss']:.2f} after {STEPS} steps, spikes: {logged['zclip/num_fired']}")
    return spikes


if __name__ == "__main__":
    main()
