"""Training: runs of one program side by side, as lanes of a `vmap`, in a scan over the steps.

What differs between lanes is a number in an array: seed, rate, fault, rule and its settings. What shapes the
program (sizes, optimizer, number format) is a `Program`, and each is compiled once for a number of lanes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from examples.experiments.arms import clipper, lane_settings, parse_arm, skipper
from examples.experiments.batches import batch_at, learning_rate
from examples.experiments.config import FAULTS, Run, Settings
from examples.llama.data import Corpus, DataConfig, load_corpus, val_batches
from examples.llama.model import PRESETS, Llama, LlamaConfig
from zclip_jax import metrics, unscale

SIZES = ("hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "context", "dtype")
NUMBERS = ("lr", "warmup", "b2", "eps", "weight_decay", "z_loss", "loss_factor", "loss_scale")
NUMBERS += ("period", "trunk", "steps")
LOGGED = ("grad_norm", "clip_scale", "fired", "nonfinite")
PRIOR = 200  # norms of the trunk that a branch's rule knows
HELD_OUT = (8, 32)  # batches, windows in each
Tree = Any
Lanes = Mapping[str, jax.Array]  # by name


@dataclasses.dataclass(frozen=True)
class Program:
    model: LlamaConfig
    batch: int
    optimizer: str
    families: tuple[str, ...]
    skip: bool
    nonfinite: str


@functools.cache
def corpus_of(data: str | None, vocab_size: int | None, context: int, cache: str) -> Corpus:
    return load_corpus(DataConfig(data=data, vocab_size=vocab_size), context=context, cache_dir=cache)


def model_of(settings: Settings, vocab_size: int) -> LlamaConfig:
    given = {name: getattr(settings, name) for name in SIZES if getattr(settings, name) is not None}
    return dataclasses.replace(
        PRESETS[settings.preset],
        vocab_size=-(-vocab_size // 64) * 64,
        qk_norm=settings.qk_norm,
        norm_dtype=settings.norm_dtype,
        tie_embeddings=settings.tie_embeddings,
        **given,
    )


def lane_of(run: Run, program: Program) -> dict[str, float]:
    settings = run.settings
    numbers = {name: getattr(settings, name) for name in NUMBERS}
    numbers |= {
        "seed": run.seed,
        "fault": FAULTS.index(settings.fault),
        "rows": settings.rows or settings.batch,
        "positions": settings.positions or program.model.context,
        "mix": settings.mix,
        "update_rms": math.inf if settings.update_rms is None else settings.update_rms,
    }
    return numbers | lane_settings(parse_arm(run.arm), program.families)


def stack_lanes(lanes: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    whole = ("seed", "fault", "rows", "positions", "warmup", "period", "trunk", "steps", "family")
    return {
        name: np.asarray([lane[name] for lane in lanes], np.int32 if name in whole else np.float32)
        for name in lanes[0]
    }


def _muon(lane: Lanes) -> optax.GradientTransformation:
    def dimensions(params: Tree) -> Tree:  # matrices of the blocks are [layers, in, out]
        return jax.tree.map(lambda x: MuonDimensionNumbers(1, 2) if x.ndim == 3 else None, params)

    muon = optax.contrib.muon(
        1.0, adam_b2=lane["b2"], muon_weight_dimension_numbers=dimensions, consistent_rms=0.2
    )
    return optax.chain(muon, optax.scale(-1.0))


DIRECTIONS: dict[str, Callable[[Lanes], optax.GradientTransformation]] = {
    "adamw": lambda lane: optax.scale_by_adam(b2=lane["b2"], eps=lane["eps"]),
    "lion": lambda lane: optax.scale_by_lion(b2=0.95),
    "sgd": lambda lane: optax.trace(0.9),
    "muon": _muon,
}


def optimizer_of(program: Program, lane: Lanes, prior: jax.Array | None) -> optax.GradientTransformation:
    """Clipping and the optimizer, whose updates are yet to be multiplied by minus the rate."""
    inner = optax.chain(
        DIRECTIONS[program.optimizer](lane),
        optax.clip_by_block_rms(lane["update_rms"]),
        optax.add_decayed_weights(lane["weight_decay"]),
    )
    if program.skip:
        return skipper(inner, program.families[0], lane, prior)
    return optax.chain(clipper(program.families, lane, program.nonfinite, prior), inner)


@functools.cache
def functions(program: Program) -> tuple[Callable[..., Tree], Callable[..., Tree], Callable[..., jax.Array]]:
    """Jitted, over lanes: state to start with, some steps, held-out loss."""

    def build(key: jax.Array) -> Llama:
        return Llama(program.model, rngs=nnx.Rngs(params=key))

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: build(jax.random.key(0))))
    vocab_size = program.model.vocab_size

    def losses(params: Tree, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graphdef, params)(inputs)
        is_target = targets[..., None] == jnp.arange(vocab_size)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return log_z - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1), log_z

    def init(lane: Lanes, prior: jax.Array | None, trunk: Tree | None) -> Tree:
        params = nnx.state(build(jax.random.key(lane["seed"]))) if trunk is None else trunk[0]
        state: Any = optimizer_of(program, lane, prior).init(params)
        if trunk is not None and program.skip:
            state = dataclasses.replace(state, inner_state=trunk[1])
        elif trunk is not None:
            state = (state[0], trunk[1])
        return params, state

    def step(lane: Lanes, windows: jax.Array, state: Tree, index: jax.Array) -> tuple[Tree, Tree]:
        params, opt_state = state
        inputs, targets, weights, factor = batch_at(index, lane, windows, program.batch, vocab_size)

        def objective(params: Tree) -> tuple[jax.Array, jax.Array]:
            loss, log_z = losses(params, inputs, targets)
            loss = jnp.sum(weights * loss) / jnp.sum(weights)
            penalty = lane["z_loss"] * jnp.sum(weights * log_z**2) / jnp.sum(weights)
            return (loss + penalty) * factor * lane["loss_scale"], loss

        grads, loss = jax.grad(objective, has_aux=True)(params)
        grads = unscale(grads, lane["loss_scale"])
        tx = optax.with_extra_args_support(optimizer_of(program, lane, None))
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        rate = learning_rate(index, lane)
        params = jax.tree.map(lambda p, u: p - (rate * u).astype(p.dtype), params, updates)
        told = metrics(opt_state)
        return (params, opt_state), {"loss": loss} | {name: told[f"zclip/{name}"] for name in LOGGED}

    def some_steps(
        state: Tree, lanes: Lanes, windows: jax.Array, first: jax.Array, count: int
    ) -> tuple[Tree, Tree]:
        def run(state: Tree, lane: Lanes) -> tuple[Tree, Tree]:
            return jax.lax.scan(lambda s, i: step(lane, windows, s, i), state, first + jnp.arange(count))

        return jax.vmap(run)(state, lanes)

    def evaluate(state: Tree, batches: jax.Array) -> jax.Array:
        def run(params: Tree) -> jax.Array:
            return jnp.mean(jax.lax.map(lambda b: jnp.mean(losses(params, b[:, :-1], b[:, 1:])[0]), batches))

        return jax.vmap(run)(state[0])

    return (
        jax.jit(jax.vmap(init)),
        jax.jit(some_steps, static_argnames="count", donate_argnames="state"),
        jax.jit(evaluate),
    )


def train(
    program: Program,
    lanes: Sequence[Mapping[str, float]],
    corpus: Corpus,
    first: int,
    steps: int,
    *,
    evals: int,
    trunk: tuple[Tree, np.ndarray] | None = None,
) -> tuple[Tree, dict[str, np.ndarray]]:
    """States at the end, and what was logged, [lanes, steps]; `held_out` and `held_out_steps` are [lanes, evals].

    `trunk` is what to branch off: parameters and optimizer state of each lane, and norms [lanes, n].
    """
    init, some_steps, evaluate = functions(program)
    arrays = {name: jnp.asarray(x) for name, x in stack_lanes(lanes).items()}
    windows = _on_device(corpus, "train")
    batches = _on_device(corpus, "val")
    state = init(
        arrays, None if trunk is None else jnp.asarray(trunk[1]), None if trunk is None else trunk[0]
    )
    chunk = max(1, steps // evals)
    logged, held_out, ends = [], [], []
    while (done := sum(ends[-1:])) < steps:
        count = min(chunk, steps - done)
        state, told = some_steps(state, arrays, windows, jnp.asarray(first + done), count=count)
        logged.append(jax.tree.map(np.asarray, told))
        held_out.append(np.asarray(evaluate(state, batches)))
        ends.append(done + count)
    series = {name: np.concatenate([part[name] for part in logged], axis=1) for name in logged[0]}
    series["held_out"] = np.stack(held_out, axis=1)
    series["held_out_steps"] = np.broadcast_to(np.asarray(ends), series["held_out"].shape)
    return state, series


_DEVICE: dict[tuple[int, str], jax.Array] = {}


def _on_device(corpus: Corpus, part: str) -> jax.Array:
    """Windows to train on [n, T + 1], or held-out batches [batches, B, T + 1]."""
    if (key := (id(corpus), part)) not in _DEVICE:
        if part == "train":
            _DEVICE[key] = jnp.asarray(corpus.train)
        else:
            found = list(val_batches(corpus, batch_size=HELD_OUT[1], max_batches=HELD_OUT[0]))
            _DEVICE[key] = jnp.asarray(np.stack(found))
    return _DEVICE[key]
