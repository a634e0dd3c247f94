"""The example's step with collectives written out, against the plain step on one device."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.cases import FAST
from zclip_jax import metrics, zclip

import shard_map_step
from data import DataConfig
from model import PRESETS, Llama, LlamaConfig, loss_fn
from shard_map_step import make_step

pytestmark = pytest.mark.slow

# Axes of 3 and 12 do not divide over 8 devices and those of 24 and 32 do: some leaves split, some are copies.
LLAMA = LlamaConfig(
    vocab_size=32,
    context=8,
    hidden_size=12,
    ffn_size=24,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    dtype="float32",
)
STEPS, NOISE_AT = 12, 8  # counting from 0
MESHES = {"data=1,fsdp=8": (1, 8), "data=2,fsdp=4": (2, 4), "data=8,fsdp=1": (8, 1)}
each_mesh = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
DECISIONS = [f"zclip/{name}" for name in ("fired", "bound", "capped", "nonfinite", "num_fired", "num_steps")]
NUMBERS = ["loss", *(f"zclip/{name}" for name in ("grad_norm", "z_score", "mean", "std", "clip_scale"))]


def make_tx(clip=None):
    clip = zclip(warmup_steps=4, max_grad_norm=None) if clip is None else clip
    return optax.chain(clip, optax.adamw(1e-2, eps=1e-6))


@functools.cache
def program(sizes, llama=LLAMA, clip=None):
    """`init`, the shapes and shardings of the inputs of `step`, and `step`."""
    mesh = jax.make_mesh(sizes, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    init, step = make_step(llama, make_tx(clip), mesh)
    split = NamedSharding(mesh, P(("data", "fsdp")))
    tokens = jax.ShapeDtypeStruct((16, llama.context + 1), np.int32, sharding=split)
    return init, (*jax.eval_shape(init, 1), tokens), step


@functools.cache
def compiled(sizes, clip=None):
    _, inputs, step = program(sizes, clip=clip)
    return step.lower(*inputs).compile(FAST)


def batches():
    """int32 [16, 9] each: rows that count up, and once random tokens, the same in every row."""
    rng = np.random.default_rng(0)
    for number in range(STEPS):
        # Random rows that differ would cancel out: the model is too young for a spike.
        noise = number == NOISE_AT
        rows = rng.integers(32, size=9) if noise else rng.integers(4, size=(16, 1)) + np.arange(9)
        yield np.broadcast_to(rows, (16, 9)).astype(np.int32)


def run(step, params, opt_state, place):
    """The parameters after all steps, and for each key the values of its steps."""
    history = collections.defaultdict(list)
    for rows in batches():
        params, opt_state, scalars = step(params, opt_state, jax.device_put(rows, place))
        for key, value in jax.device_get(scalars).items():
            history[key].append(value)
    return params, history


@pytest.fixture(scope="module")
def plain():
    """On one device, with no mesh: the first parameters and optimizer state, the last parameters, history."""
    tx = make_tx()
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Llama(LLAMA, rngs=nnx.Rngs(0))))

    @functools.partial(jax.jit, compiler_options=FAST)
    def init():
        params = nnx.state(Llama(LLAMA, rngs=nnx.Rngs(1)))
        return params, tx.init(params)

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), tokens))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics(opt_state) | {"loss": loss}

    initial = jax.device_get(init())  # a copy that no step can consume
    return initial, *run(step, *initial, None)


def assert_equal_trees(tree, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), tree, expected)


@each_mesh
def test_equals_the_plain_step(sizes, plain):
    _, (*state, tokens), _ = program(sizes)
    initial, final, expected = plain
    params, opt_state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), initial, tuple(state))
    params, history = run(compiled(sizes), params, opt_state, tokens.sharding)

    for key in DECISIONS:
        np.testing.assert_array_equal(history[key], expected[key], err_msg=key)
    for key in NUMBERS:
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-4, err_msg=key)
    assert_equal_trees(params, final, rtol=1e-3, atol=1e-5)
    # The comparison says something of clipping only where some steps are clipped and others are not.
    assert np.flatnonzero(history["zclip/fired"]).tolist() == [NOISE_AT]


def test_init_and_step_store_parameters_and_moments_split(plain):
    sizes = (1, 8)
    init, (*_, tokens), _ = program(sizes)
    params, opt_state = init(1)
    assert_equal_trees((params, opt_state), plain[0], rtol=1e-6, atol=1e-8)

    def check(params, opt_state):
        clip_state, (adam, *_) = opt_state
        for tree in (params, adam.mu, adam.nu):
            gate, wq = tree["blocks"]["ffn"]["gate"][...], tree["blocks"]["attention"]["wq"][...]
            assert gate.shape == (3, 12, 24)
            assert {shard.data.shape for shard in gate.addressable_shards} == {(3, 12, 3)}
            assert len({str(shard.index) for shard in gate.addressable_shards}) == 8
            assert wq.shape == (3, 12, 12)
            assert wq.sharding.is_fully_replicated
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves((clip_state, adam.count)))

    check(params, opt_state)
    rows = jax.device_put(next(batches()), tokens.sharding)
    new_params, new_opt_state, _ = compiled(sizes)(params, opt_state, rows)
    check(new_params, new_opt_state)
    gates = [tree["blocks"]["ffn"]["gate"][...] for tree in (params, new_params)]
    assert gates[0].is_deleted()
    assert not gates[1].is_deleted()


def collectives(program):
    """How often each collective occurs, and each shape in all-reduces, of which XLA makes one of several."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program.as_text())
    reduced = " ".join(shapes for shapes, kind in found if kind == "all-reduce")
    shapes = re.findall(r"\w+\[.*?\]", reduced)
    return collections.Counter(kind for _, kind in found), collections.Counter(shapes)


@each_mesh
def test_zclip_costs_an_all_reduce_of_one_number(sizes):
    state_only = optax.GradientTransformation(
        zclip().init, lambda updates, state, params=None: (updates, state)
    )
    with_zclip, reduced = collectives(compiled(sizes))
    without, reduced_without = collectives(compiled(sizes, state_only))
    assert with_zclip - without == {"all-reduce": 1}
    assert reduced - reduced_without == {"f32[]": 1}
    assert without - with_zclip == reduced_without - reduced == {}
    assert without["all-gather"] == without["reduce-scatter"] > 0
    assert without["all-to-all"] == without["collective-permute"] == 0


def test_gradients_are_summed_over_data_once_scattered():
    _, (params, *_), _ = program((2, 4))
    parts = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(params)]
    expected = collections.Counter(f"f32[{','.join(map(str, part))}]" for part in parts)
    _, reduced = collectives(compiled((2, 4)))
    assert reduced - expected == {"f32[]": 2}  # loss and norm
    assert expected - reduced == {}


@pytest.mark.parametrize(
    "changes",
    [{"remat": True, "dtype": "bfloat16"}, {"tie_embeddings": True}, {"num_layers": 8}],
    ids=["remat", "tied", "split over layers"],
)
def test_types_of_other_models(changes):
    _, (*state, tokens), step = program((2, 4), dataclasses.replace(LLAMA, **changes))
    *new_state, _ = jax.eval_shape(step, *state, tokens)
    assert jax.tree.map(jnp.shape, new_state) == jax.tree.map(jnp.shape, state)


def test_main(monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(LLAMA, vocab_size=256))
    monkeypatch.setattr(shard_map_step, "DataConfig", lambda: DataConfig(__file__))
    shard_map_step.main(steps=5, noise_at=3)
    *_, sizes, header, last = capsys.readouterr().out.splitlines()
    assert sizes == "{'data': 2, 'fsdp': 4}"
    assert header.split() == ["step", "loss", "norm", "scale", "spikes"]
    step, loss, norm, scale, spikes = map(float, last.split())
    assert (step, spikes) == (5, 0)
    assert loss == pytest.approx(np.log(256), rel=0.1)
    assert norm * scale <= 1.001
