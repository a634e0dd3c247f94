"""A LLaMA in Flax NNX: RMSNorm, RoPE, grouped-query attention and SwiGLU.

Shape letters: B batch, T time (S for the time axis of keys), D hidden size, F FFN size,
V vocabulary, N query heads, K key/value heads, G = N // K, H head size, L layers.

The blocks are one stacked module whose parameters carry a leading axis L, and they run in a scan:
the compiled program is as large for 80 layers as for one.

Sharding is for a mesh with the axes `data`, `fsdp` and `tensor` (any of them may have size 1), all
of `jax.sharding.AxisType.Auto`, made current with `jax.set_mesh`. The batch is split over `data`
and `fsdp`; matrices are stored split over `fsdp` and `tensor`, and each layer gathers its own over
`fsdp` for as long as it uses them. With no mesh all of this does nothing.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

Spec = Sequence[str | tuple[str, ...] | None]  # the mesh axes over which each axis is split
HIDDEN: Spec = (("data", "fsdp"), None, None)  # activations [B, T, D]
COLUMN: Spec = ("fsdp", "tensor")  # matrices whose outputs are split over `tensor`
ROW: Spec = ("tensor", "fsdp")  # matrices whose inputs are
TYPE_NAMES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and number formats of a model.

    `context` is the longest input. `remat` recomputes each block in the backward pass in place of
    storing its activations. `qk_norm` puts an RMSNorm on queries and keys. `dtype` is what matrices
    are multiplied in, `param_dtype` what the parameters are stored in, `norm_dtype` what RMSNorm
    computes in: float32 or wider where it is None.
    """

    vocab_size: int
    context: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    remat: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    norm_dtype: str | None = None

    def __post_init__(self) -> None:
        def check(field: str, ok: bool, accepted: str) -> None:
            if not ok:
                raise ValueError(f"{field}={getattr(self, field)!r}: expected {accepted}")

        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type is int:
                check(name, isinstance(value, int) and value > 0, "a positive integer")
            elif field.type is float:
                check(name, 0 < value < math.inf, "a positive finite number")
            elif field.type is str:
                check(name, value in TYPE_NAMES, f"one of {', '.join(TYPE_NAMES)}")
        ok = self.norm_dtype is None or self.norm_dtype in TYPE_NAMES
        check("norm_dtype", ok, f"None or one of {', '.join(TYPE_NAMES)}")
        heads, kv_heads = self.num_heads, self.num_kv_heads
        check("hidden_size", self.hidden_size % heads == 0, f"a multiple of num_heads={heads}")
        check("hidden_size", self.head_size % 2 == 0, f"an even size for each of {heads} heads")
        check("num_kv_heads", heads % kv_heads == 0, f"a divisor of num_heads={heads}")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def wide_dtype(self) -> jnp.dtype:
        """What norms, RoPE, softmax and logits are in: float32, or float64 where `dtype` is."""
        return jnp.promote_types(self.dtype, jnp.float32)


PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(256, 128, 96, 256, 4, 4, 2, dtype="float32"),  # CPUs: slow in bfloat16
    "llama-130m": LlamaConfig(32_000, 1024, 768, 2048, 12, 12, 12),
    "llama-1b": LlamaConfig(65_536, 2048, 2048, 5440, 16, 16, 16, remat=True),  # ZClip paper's
    "llama-7b": LlamaConfig(32_000, 4096, 4096, 11_008, 32, 32, 32, remat=True),
    "llama-70b": LlamaConfig(32_000, 4096, 8192, 28_672, 80, 64, 8, remat=True),
}


def _partition_spec(spec: Spec, known: Sequence[str]) -> PartitionSpec:
    """`spec` without the axis names that are not `known`."""
    groups = [(axis,) if isinstance(axis, str) else axis or () for axis in spec]
    return PartitionSpec(*[tuple(n for n in group if n in known) or None for group in groups])


def constrain(value: jax.Array, spec: Spec) -> jax.Array:
    """Split `value` over the named axes of the current mesh; without a mesh, return it as it is.

    Axes which the mesh lacks, or which a `jax.shard_map` around this splits, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        raise ValueError(
            f"mesh axes {mesh.explicit_axes} have AxisType.Explicit: expected AxisType.Auto, as in "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
        )
    if not mesh.auto_axes:
        return value
    return jax.lax.with_sharding_constraint(value, _partition_spec(spec, mesh.auto_axes))


def shard(node: nnx.Pytree) -> None:
    """Split the variables of a model or an `nnx.Optimizer`, in place, over the current mesh.

    `Llama` does it to itself. Do it to an optimizer in the jitted function which makes that:
    nothing else keeps XLA from replicating fresh zeros.
    """
    for _, variable in nnx.iter_graph(node):
        if not isinstance(variable, nnx.Variable):
            continue
        value, spec = variable[...], variable.get_metadata().get("out_sharding", ())
        if spec and len(spec) != value.ndim:
            # An optimizer state which inherited its parameter's axes but not its shape.
            spec = ()
            variable.set_metadata(out_sharding=spec)
        variable[...] = constrain(value, spec)


def _matrix(
    config: LlamaConfig, rngs: nnx.Rngs, shape: tuple[int, int], spec: Spec, std: float = 0.02
) -> nnx.Param[jax.Array]:
    value = std * jax.random.normal(rngs.params(), shape, jnp.dtype(config.param_dtype))
    # Flax's own eager placing of annotated variables fails where there is no mesh.
    return nnx.Param(value, out_sharding=spec, eager_sharding=False)


def _gather(param: nnx.Param[jax.Array], dtype: str) -> jax.Array:
    """A matrix in `dtype`, whole over `fsdp` and still split over `tensor`.

    The inner constraint is for the backward pass: gradients too are stored split only.
    """
    value = param[...].astype(dtype)  # while split, so that fewer bytes travel
    # Inside the scan over layers the annotation still has an entry for the layer axis.
    spec = param.get_metadata("out_sharding")[-value.ndim :]
    return constrain(constrain(value, spec), [None if axis == "fsdp" else axis for axis in spec])


def _project(x: jax.Array, param: nnx.Param[jax.Array], dtype: str) -> jax.Array:
    """[B, T, in] -> [B, T, out]"""
    # Flat, since XLA for CPUs otherwise transposes the operands of the weight gradient in memory.
    return (x.reshape(-1, x.shape[-1]) @ _gather(param, dtype)).reshape(*x.shape[:-1], -1)


def rope_tables(config: LlamaConfig, time: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the RoPE angles, each [T, H / 2]."""
    exponents = jnp.arange(0, config.head_size, 2, dtype=config.wide_dtype) / config.head_size
    angles = jnp.arange(time)[:, None] * config.rope_theta**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply RoPE to x [B, T, heads, H] in the half-split convention: i turns with i + H / 2."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class RMSNorm(nnx.Module):
    def __init__(self, config: LlamaConfig, size: int) -> None:
        self.config = config
        self.scale = nnx.Param(jnp.ones(size, config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size]"""
        wide = x.astype(self.config.norm_dtype or self.config.wide_dtype)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.config.norm_eps)
        return (normed * self.scale[...].astype(wide.dtype)).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        hidden, kv_size = config.hidden_size, config.num_kv_heads * config.head_size
        self.wq = _matrix(config, rngs, (hidden, hidden), COLUMN)
        self.wk = _matrix(config, rngs, (hidden, kv_size), COLUMN)
        self.wv = _matrix(config, rngs, (hidden, kv_size), COLUMN)
        self.wo = _matrix(config, rngs, (hidden, hidden), ROW, 0.02 / math.sqrt(2 * config.num_layers))
        self.q_norm = RMSNorm(config, config.head_size) if config.qk_norm else None
        self.k_norm = RMSNorm(config, config.head_size) if config.qk_norm else None

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D], causal; query head n reads key/value head n // G."""
        config, (batch, time, _) = self.config, x.shape
        heads, kv_heads, head = config.num_heads, config.num_kv_heads, config.head_size
        q = _project(x, self.wq, config.dtype).reshape(batch, time, heads, head)
        k = _project(x, self.wk, config.dtype).reshape(batch, time, kv_heads, head)
        v = _project(x, self.wv, config.dtype).reshape(batch, time, kv_heads, head)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q = q.reshape(batch, time, kv_heads, heads // kv_heads, head)

        # With G after T, the scores come out of the product without a transposition.
        scores = jnp.einsum("btkgh,bskh->bktgs", q, k).astype(config.wide_dtype)
        causal = jnp.tril(jnp.ones((time, time), bool))[:, None, :]
        scores = jnp.where(causal, scores / math.sqrt(head), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(config.dtype)
        mixed = jnp.einsum("bktgs,bskh->btkgh", weights, v).reshape(batch, time, heads * head)
        return _project(mixed, self.wo, config.dtype)


class FeedForward(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        hidden, ffn = config.hidden_size, config.ffn_size
        self.gate = _matrix(config, rngs, (hidden, ffn), COLUMN)
        self.up = _matrix(config, rngs, (hidden, ffn), COLUMN)
        self.down = _matrix(config, rngs, (ffn, hidden), ROW, 0.02 / math.sqrt(2 * config.num_layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D], by way of [B, T, F] (SwiGLU)"""
        dtype = self.config.dtype
        inner = jax.nn.silu(_project(x, self.gate, dtype)) * _project(x, self.up, dtype)
        return _project(inner, self.down, dtype)


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config, config.hidden_size)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = RMSNorm(config, config.hidden_size)
        self.ffn = FeedForward(config, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]"""
        x = constrain(x + self.attention(self.attention_norm(x), cos, sin), HIDDEN)
        return constrain(x + self.ffn(self.ffn_norm(x)), HIDDEN)


class Llama(nnx.Module):
    """The language model; `blocks` holds all layers, its parameters are [L, ...].

    Weights start normal with std 0.02; matrices that add to the residual stream (wo, down) with
    0.02 / sqrt(2 L), so that its size does not grow with depth.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        vocab, hidden, tied = config.vocab_size, config.hidden_size, config.tie_embeddings
        self.embedding = _matrix(config, rngs, (vocab, hidden), ROW)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = stack(rngs)
        self.norm = RMSNorm(config, config.hidden_size)
        self.head = None if tied else _matrix(config, rngs, (hidden, vocab), COLUMN)
        shard(self)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int [B, T] -> float32 logits [B, T, V]; those at t predict token t + 1."""
        config, time = self.config, tokens.shape[1]
        if time > config.context:
            raise ValueError(f"tokens have {time} positions: expected at most {config.context}")
        cos, sin = rope_tables(config, time)
        graphdef, layers = nnx.split(self.blocks)

        def layer(x: jax.Array, state: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, state)(x, cos, sin), None

        # The table is not cast before the lookup, whose gradient sums over all uses of a token.
        x = _gather(self.embedding, config.param_dtype)[tokens]
        x = constrain(x.astype(config.dtype), HIDDEN)
        # A scan already prevents the merging of the two computations that prevent_cse is for.
        body = jax.checkpoint(layer, prevent_cse=False) if config.remat else layer
        x, _ = jax.lax.scan(body, x, layers)
        matrix = _gather(self.embedding if self.head is None else self.head, config.dtype)
        logits = self.norm(x) @ (matrix.T if self.head is None else matrix)
        return logits.astype(config.wide_dtype)


def loss_fn(model: Llama, tokens: jax.Array) -> jax.Array:
    """Mean next-token cross entropy, in nats, of int tokens [B, T + 1]."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    # A masked sum, not an index: it needs no gathering of a vocabulary split over `tensor`.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def num_params(model_or_state: Any) -> int:
    """How many numbers a model or a state, abstract or not, holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model_or_state))
