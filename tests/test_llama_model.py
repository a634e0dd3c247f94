"""The LLaMA of examples/llama against the same maths in NumPy, and its sharding."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from model import PRESETS, Llama, LlamaConfig, loss_fn, num_params, shard

pytestmark = pytest.mark.slow

SMALL = LlamaConfig(
    vocab_size=32,
    context=16,
    hidden_size=16,
    ffn_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    dtype="float32",
)


def make(config: LlamaConfig, seed: int = 0) -> Llama:
    """A model whose weights are large enough for attention and gates to be far from linear."""
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    rng = np.random.default_rng(seed)

    def draw(path: tuple, p: jax.ShapeDtypeStruct) -> jax.Array:
        mean = float("scale" in jax.tree_util.keystr(path))
        return jnp.asarray(rng.normal(mean, 0.4, p.shape), p.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, state))


# Compiled as a whole: operation by operation, most of the tests' time would be compilation.
initial = nnx.jit(lambda config: Llama(config, rngs=nnx.Rngs(0)), static_argnums=0)
forward = nnx.jit(lambda model, tokens: (model(tokens), loss_fn(model, tokens)))


@nnx.jit
def evaluate(model: Llama, tokens: jax.Array) -> tuple[jax.Array, jax.Array, nnx.State]:
    """Logits, loss and gradients."""
    return model(tokens), *nnx.value_and_grad(loss_fn)(model, tokens)


def some_tokens(config: LlamaConfig, batch: int = 8, time: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, time))


def make_mesh(data: int, fsdp: int, tensor: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * fsdp * tensor]
    names = ("data", "fsdp", "tensor")
    return jax.make_mesh((data, fsdp, tensor), names, axis_types=(kind,) * 3, devices=devices)


# The same model over again in plain loops, one sequence, head and position at a time.


def reference_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def reference_rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """x [time, head size], rotated one pair (i, i + half) at a time."""
    time, size = x.shape
    out = np.empty_like(x)
    for t in range(time):
        for i in range(size // 2):
            angle = t * theta ** (-2 * i / size)
            rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            out[t, [i, i + size // 2]] = rotation @ x[t, [i, i + size // 2]]
    return out


def reference_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One head: q, k, v [time, head size]."""
    out = np.empty_like(v)
    for t in range(len(q)):
        scores = k[: t + 1] @ q[t] / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[t] = weights @ v[: t + 1] / weights.sum()
    return out


def reference_logits(model: Llama, tokens: np.ndarray) -> np.ndarray:
    config = model.config
    p = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    size = config.hidden_size // config.num_heads
    out = []
    for sequence in tokens:
        x = p["embedding"][sequence]
        for layer in range(config.num_layers):
            b = jax.tree.map(lambda a, layer=layer: a[layer], p["blocks"])
            h = reference_norm(x, b["attention_norm"]["scale"], config.norm_eps)
            heads = []
            for n in range(config.num_heads):
                m = n // (config.num_heads // config.num_kv_heads)
                mine, shared = slice(n * size, (n + 1) * size), slice(m * size, (m + 1) * size)
                q = reference_rotate(h @ b["attention"]["wq"][:, mine], config.rope_theta)
                k = reference_rotate(h @ b["attention"]["wk"][:, shared], config.rope_theta)
                heads.append(reference_attention(q, k, h @ b["attention"]["wv"][:, shared]))
            x = x + np.concatenate(heads, axis=-1) @ b["attention"]["wo"]
            h = reference_norm(x, b["ffn_norm"]["scale"], config.norm_eps)
            gate = h @ b["ffn"]["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ b["ffn"]["up"])) @ b["ffn"]["down"]
        x = reference_norm(x, p["norm"]["scale"], config.norm_eps)
        out.append(x @ (p["embedding"].T if config.tie_embeddings else p["head"]))
    return np.stack(out)


@pytest.mark.parametrize(("kv_heads", "tied"), [(2, False), (2, True), (1, False), (4, True)])
@pytest.mark.usefixtures("x64")
def test_logits_and_loss_equal_numpy(kv_heads: int, tied: bool) -> None:
    config = dataclasses.replace(
        SMALL,
        num_kv_heads=kv_heads,
        tie_embeddings=tied,
        rope_theta=100.0,
        dtype="float64",
        param_dtype="float64",
    )
    tokens = some_tokens(config)
    model = make(config)
    logits, loss = forward(model, jnp.asarray(tokens))
    assert logits.dtype == loss.dtype == jnp.float64
    expected = reference_logits(model, tokens)
    assert expected.dtype == np.float64
    assert expected.std() > 1
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)

    terms = []
    for row, sequence in zip(expected, tokens, strict=True):
        for t in range(len(sequence) - 1):
            terms.append(np.log(np.exp(row[t]).sum()) - row[t, sequence[t + 1]])
    np.testing.assert_allclose(loss, np.mean(terms), rtol=1e-9)


def test_logits_do_not_depend_on_later_tokens() -> None:
    model = make(SMALL)
    tokens = some_tokens(SMALL)
    before, _ = forward(model, jnp.asarray(tokens))
    for t in range(tokens.shape[1]):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % SMALL.vocab_size
        after, _ = forward(model, jnp.asarray(changed))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert not np.allclose(after[:, t], before[:, t])


def test_remat_changes_neither_loss_nor_gradients() -> None:
    tokens = jnp.asarray(some_tokens(SMALL))
    found = []
    for remat in (False, True):
        model = make(dataclasses.replace(SMALL, remat=remat))
        _, loss, grads = evaluate(model, tokens)
        found.append((loss, nnx.to_pure_dict(grads)))
    (loss, grads), (remat_loss, remat_grads) = found
    np.testing.assert_allclose(remat_loss, loss, rtol=1e-6)
    assert len(jax.tree.leaves(grads)) == 12
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), remat_grads, grads)


def test_bfloat16_computes_near_float32_and_keeps_float32_around_it() -> None:
    tokens = jnp.asarray(some_tokens(SMALL))
    model, exact = make(dataclasses.replace(SMALL, dtype="bfloat16")), make(SMALL)
    logits, loss, grads = evaluate(model, tokens)
    assert logits.dtype == loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, forward(exact, tokens)[1], rtol=1e-2)


def test_initial_weights() -> None:
    model = initial(SMALL)
    attention, ffn = model.blocks.attention, model.blocks.ffn
    for plain in (model.embedding, model.head, attention.wq, attention.wv, ffn.gate, ffn.up):
        np.testing.assert_allclose(np.std(plain[...]), 0.02, rtol=0.1)
    for into_residual in (attention.wo, ffn.down):
        np.testing.assert_allclose(np.std(into_residual[...]), 0.02 / np.sqrt(2 * 3), rtol=0.1)
    assert not np.array_equal(attention.wq[0], attention.wq[1])
    np.testing.assert_array_equal(model.norm.scale[...], 1)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("vocab_size", 0, "a positive integer"),
        ("context", -1, "a positive integer"),
        ("hidden_size", 18, "a multiple of num_heads=4"),
        ("hidden_size", 20, "an even size for each of 4 heads"),
        ("ffn_size", 1.5, "a positive integer"),
        ("num_layers", 0, "a positive integer"),
        ("num_heads", 0, "a positive integer"),
        ("num_kv_heads", 3, "a divisor of num_heads=4"),
        ("norm_eps", 0.0, "a positive finite number"),
        ("rope_theta", float("inf"), "a positive finite number"),
        ("dtype", "int8", "one of bfloat16, float16, float32, float64"),
        ("param_dtype", "single", "one of bfloat16, float16, float32, float64"),
    ],
)
def test_bad_configs_are_refused(field: str, value: object, accepted: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}: expected {accepted}")):
        dataclasses.replace(SMALL, **{field: value})


def test_input_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="17 positions: expected at most 16"):
        forward(make(SMALL), jnp.zeros((1, 17), int))


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # embedding and head, then per layer: attention, FFN, two norms; the last norm
        (
            "llama-1b",
            2 * 65_536 * 2048 + 16 * (4 * 2048**2 + 3 * 2048 * 5440 + 2 * 2048) + 2048,
        ),
        ("llama-7b", 6_738_415_616),
        ("llama-70b", 68_976_648_192),
    ],
)
def test_parameter_counts(preset: str, expected: int) -> None:
    model = nnx.eval_shape(lambda: Llama(PRESETS[preset], rngs=nnx.Rngs(0)))
    assert num_params(model) == expected
    assert num_params(nnx.state(model)) == expected


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1)])
def test_sharded_model_equals_single_device(sizes: tuple[int, int, int]) -> None:
    tokens, model = jnp.asarray(some_tokens(SMALL)), make(SMALL)
    expected_logits, expected_loss, expected_grads = evaluate(model, tokens)

    mesh = make_mesh(*sizes)
    state = nnx.state(model)
    nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    with jax.set_mesh(mesh):
        logits, loss, grads = evaluate(model, tokens)
    assert logits.sharding.num_devices == 8
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        nnx.to_pure_dict(grads),
        nnx.to_pure_dict(expected_grads),
    )


def test_training_under_a_mesh_starts_and_stays_sharded() -> None:
    # Adafactor keeps row and column statistics, whose shapes are not those of the parameters.
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    tx = optax.chain(factored, optax.trace(0.9), optax.scale(-3e-3))

    @nnx.jit
    def init() -> tuple[Llama, nnx.Optimizer]:
        model = Llama(SMALL, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        shard(optimizer)
        return model, optimizer

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Llama, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
        optimizer.update(model, grads)
        shard(model)
        shard(optimizer)
        return loss

    mesh = make_mesh(2, 2, 2)
    tokens = some_tokens(SMALL)
    tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    with jax.set_mesh(mesh):
        model, optimizer = init()
        abstract = nnx.eval_shape(init)
        specs = {
            "/".join(path): variable[...].sharding.spec
            for path, variable in nnx.to_flat_state(nnx.state(model))
        }
        values = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
        losses = [float(step(model, optimizer, tokens)) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1

    assert specs.pop("embedding") == PartitionSpec("tensor", "fsdp")
    assert specs.pop("head") == PartitionSpec("fsdp", "tensor")
    for name in ("attention/wq", "attention/wk", "attention/wv", "ffn/gate", "ffn/up"):
        assert specs.pop(f"blocks/{name}") == PartitionSpec(None, "fsdp", "tensor")
    for name in ("attention/wo", "ffn/down"):
        assert specs.pop(f"blocks/{name}") == PartitionSpec(None, "tensor", "fsdp")
    assert len(specs) == 3
    assert not any(axis for norm in specs.values() for axis in norm)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        values,
        nnx.to_pure_dict(nnx.state(initial(SMALL))),
    )

    gate = model.blocks.ffn.gate[...]
    assert {piece.data.shape for piece in gate.addressable_shards} == {(3, 16 // 2, 24 // 2)}
    moments = optimizer.opt_state[1].trace["blocks"]["ffn"]["gate"]
    assert moments[...].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    for real, planned in zip(jax.tree.leaves((model, optimizer)), jax.tree.leaves(abstract), strict=True):
        assert real.shape == planned.shape
        sharding = NamedSharding(mesh, planned.sharding.spec)
        assert real.sharding.is_equivalent_to(sharding, real.ndim)


def test_explicit_mesh_is_refused() -> None:
    with (
        jax.set_mesh(make_mesh(2, 2, 2, AxisType.Explicit)),
        pytest.raises(ValueError, match=re.escape("expected AxisType.Auto")),
    ):
        initial(SMALL)


def test_runs_inside_a_shard_map_over_the_batch() -> None:
    tokens = jnp.asarray(some_tokens(SMALL))
    model = make(SMALL)
    graphdef, state = nnx.split(model)
    mesh = make_mesh(4, 1, 2)

    def local(state: nnx.State, tokens: jax.Array) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, state), tokens)[None]

    batch = PartitionSpec("data")
    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), batch), out_specs=batch, axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        losses = jax.jit(spread)(state, tokens)
    assert losses.shape == (4,)
    np.testing.assert_allclose(losses.mean(), forward(model, tokens)[1], rtol=1e-6)
