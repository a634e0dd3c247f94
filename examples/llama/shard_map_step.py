"""The training step of `train.py` once more, its collectives written out with `jax.shard_map`.

    python examples/llama/shard_map_step.py
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/llama/shard_map_step.py  # on a CPU

The mesh has the axes `data` and `fsdp`. Each parameter, and the moments that the optimizer keeps for it, is
stored split over `fsdp` and copied over `data`; each device has its own rows of the batch. In a step a device

1. gathers the parameters over `fsdp` and computes the loss of its rows, averaged over all devices;
2. differentiates that. Each collective turns into its transpose: out of the gathering comes a
   `jax.lax.psum_scatter` of the gradients over `fsdp`, out of the copying a `jax.lax.psum` over `data`;
3. runs `optax.chain(zclip(), optax.adamw(...))` on its part of the gradients.

zclip gets no axis names: the types of the gradients say over which axes they are split. It adds one
all-reduce of one number, and its state is the same on every device.

Parameters are stored split, but whole while a step runs. `train.py` leaves the collectives to XLA, gathers
layer by layer, and so trains larger models.
"""

from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zclip_jax import metrics, zclip

from data import DataConfig, load_corpus, train_iterator
from model import PRESETS, Llama, LlamaConfig, loss_fn

AXES = ("data", "fsdp")
Params, OptState, Scalars = optax.Params, optax.OptState, dict[str, jax.Array]  # the first is an nnx.State
Init = Callable[[int], tuple[Params, OptState]]
Step = Callable[[Params, OptState, jax.Array], tuple[Params, OptState, Scalars]]


def split_first(shape: tuple[int, ...], parts: int) -> P:
    """Splits over `fsdp` the first axis that divides, so that parts are contiguous; else none."""
    for axis, size in enumerate(shape):
        if size % parts == 0:
            return P(*[None] * axis, "fsdp")
    return P()


def gather(part: jax.Array, spec: P) -> jax.Array:
    """A whole parameter out of its parts, of a type that varies over all axes.

    Marking it as varying moves no data forward. Backward it is the sum over the axes that hold copies. That
    it stands ahead of the gathering, and outside of the scan over layers, makes the sum one of scattered
    gradients; JAX would otherwise put it where the parameter first meets the batch.
    """
    if "fsdp" not in spec:
        return jax.lax.pcast(part, AXES, to="varying")
    part = jax.lax.pcast(part, "data", to="varying")
    return jax.lax.all_gather(part, "fsdp", axis=tuple(spec).index("fsdp"), tiled=True)


def make_step(llama: LlamaConfig, tx: optax.GradientTransformation, mesh: Mesh) -> tuple[Init, Step]:
    """The jitted `init` and `step` on a mesh with the axes `data` and `fsdp`.

    `init(seed)` returns the parameters and the optimizer state. `step` consumes both, takes int tokens
    [B, T + 1] with B a multiple of the number of devices, and returns both and scalars: the loss and
    `zclip_jax.metrics`.
    """
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Llama(llama, rngs=nnx.Rngs(0))))
    param_specs = jax.tree.map(lambda x: split_first(x.shape, mesh.shape["fsdp"]), shapes)
    # Moments like their parameters; counters and the clip state are copies.
    state_specs = optax.tree_map_params(
        tx.init,
        lambda _, spec: spec,
        jax.eval_shape(tx.init, shapes),
        param_specs,
        transform_non_params=lambda _: P(),
    )

    def init(seed: int) -> tuple[Params, OptState]:
        params = nnx.state(Llama(llama, rngs=nnx.Rngs(jax.random.key(seed))))
        return params, tx.init(params)

    def mean_loss(params: Params, tokens: jax.Array) -> jax.Array:
        """Of the parts of the parameters and the rows of one device: the loss of the global batch."""
        model = nnx.merge(graphdef, jax.tree.map(gather, params, param_specs))
        return jax.lax.pmean(loss_fn(model, tokens), AXES)

    def step(params: Params, opt_state: OptState, tokens: jax.Array) -> tuple[Params, OptState, Scalars]:
        loss, grads = jax.value_and_grad(mean_loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics(opt_state) | {"loss": loss}

    specs = (param_specs, state_specs)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P(AXES)), out_specs=(*specs, P()))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(init, out_shardings=shardings), jax.jit(mapped, donate_argnums=(0, 1))


def main(steps: int = 40, noise_at: int = 30) -> None:
    """Trains the tiny model on the source of Python's standard library; one batch is noise."""
    llama, devices = PRESETS["tiny"], jax.device_count()
    data = 2 if devices % 4 == 0 else 1
    mesh = jax.make_mesh((data, devices // data), AXES, axis_types=(AxisType.Auto,) * 2)
    corpus = load_corpus(DataConfig(), context=llama.context, cache_dir=".")
    batches = train_iterator(corpus, batch_size=-(-16 // devices) * devices, seed=0)
    tx = optax.chain(zclip(warmup_steps=10), optax.adamw(1e-3, weight_decay=0.01))
    init, step = make_step(llama, tx, mesh)
    params, opt_state = init(0)
    print(f"{corpus.name}\n{dict(mesh.shape)}\nstep  loss   norm  scale  spikes")
    for number in range(1, steps + 1):
        rows = next(batches).tokens
        if number == noise_at:
            rows = np.random.default_rng(0).integers(llama.vocab_size, size=rows.shape, dtype=np.int32)
        tokens = jax.device_put(rows, NamedSharding(mesh, P(AXES)))
        params, opt_state, scalars = step(params, opt_state, tokens)
        loss, norm, scale, spikes = (
            float(scalars[key]) for key in ("loss", "zclip/grad_norm", "zclip/clip_scale", "zclip/num_fired")
        )
        if number % 5 == 0 or scalars["zclip/fired"]:
            print(f"{number:4}  {loss:.3f}  {norm:.3f}  {scale:.3f}  {spikes:.0f}", flush=True)


if __name__ == "__main__":
    main()
