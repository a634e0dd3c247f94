"""`jax.shard_map`, with rows and weights split over all devices: `python examples/recipes/sharded_step.py`.
On a CPU, `XLA_FLAGS=--xla_force_host_platform_device_count=8` makes eight devices. One batch has bad labels.
"""

import jax
import jax.numpy as jnp
import optax

from zclip_jax import metrics, zclip

STEPS, BAD_STEP = 100, 70


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Returns inputs [64, 8] and targets [64]."""
    x, noise = jnp.split(jax.random.normal(jax.random.key(step), (64, 9)), [8], axis=1)
    y = x.sum(axis=1) + 0.5 * noise[:, 0]
    return x, y * 100 if step == BAD_STEP else y


# [recipe]
tx = optax.chain(zclip(), optax.adam(0.1))  # no axis name: types say how gradients are split
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
params, param_specs = {"w": jnp.zeros(8), "b": jnp.zeros(())}, {"w": jax.P("data"), "b": jax.P()}
state_specs = optax.tree_map_params(
    tx.init, lambda _, spec: spec, tx.init(params), param_specs, transform_non_params=lambda _: jax.P()
)


def step_on_a_device(params, opt_state, x, y):
    def loss_fn(params):
        w = jax.lax.all_gather(params["w"], "data", tiled=True)
        return jax.lax.pmean(jnp.mean((x @ w + params["b"] - y) ** 2), "data")

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, metrics(opt_state) | {"loss": loss}


specs = (param_specs, state_specs)
in_specs, out_specs = (*specs, jax.P("data"), jax.P("data")), (*specs, jax.P())
train_step = jax.jit(jax.shard_map(step_on_a_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def main() -> list[int]:
    """Returns the steps at which the rule fired."""
    state, spikes, logged = (params, tx.init(params)), [], {}
    for step in range(STEPS):
        *state, logged = train_step(*state, *batch(step))
        if logged["zclip/fired"]:
            spikes.append(step)
            print(
                f"step {step}: norm {logged['zclip/grad_norm']:.1f}, scale {logged['zclip/clip_scale']:.4f}"
            )
    print(f"loss {logged['loss']:.2f} after {STEPS} steps on {mesh.size} devices")
    return spikes


if __name__ == "__main__":
    main()
