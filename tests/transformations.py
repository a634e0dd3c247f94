"""The transformations that tests of states run over, one series of gradients for all, and the run to compare with."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.cases import LOSSES, RULES, fast_jit
from zclip_jax import (
    ClipState,
    WatchState,
    clip_by_rule,
    levelclip,
    metrics,
    rules,
    skip_by_rule,
    watch,
    zclip,
)


def is_stacked(path):
    return path[0].key == "layers"


class Transformation(NamedTuple):
    """`make()` gives it; `slow` ones repeat in another setting what a quick one does."""

    name: str
    make: Callable[[], Any]
    slow: bool = False


def falling(start, end):
    """A schedule over 40 steps, under strict promotion too, where those of optax are not."""
    return lambda step: start + (end - start) * jnp.asarray(jnp.minimum(step, 40), jnp.float32) / 40


def injected(learning_rate, z_thresh):
    return optax.chain(zclip(z_thresh=z_thresh), optax.sgd(learning_rate))


KINDS = {case.make: case.name for case in reversed(RULES)}
ONE_OF_A_KIND = [case for case in RULES if KINDS[case.make] == case.name or "robust_warmup" in case.kwargs]
BY_LAYER = ("adagc",)
SKIPPING = ("sigma_skip",)
SLOW = (
    "zclip",
    "zclip robust",
    "zclip with prior norms",
    "levelclip",
    "observe_only",
    "two clips",
    "inject_hyperparams",
    "at_most of a window",
    "bounded window",
    "loss_aware window",
    "three combinators",
    "skip around a chain",
    "skip in a chain",
    "skip around MultiSteps",
    "watch by layer",
    "watch in a skip",
)


def among(case, kinds):
    return case in ONE_OF_A_KIND and case.name.split("-")[0] in kinds


COMPOSED = {
    "zclip": zclip,
    "zclip robust": lambda: zclip(robust_warmup=True, warmup_steps=20),
    "zclip by leaf": lambda: zclip(granularity="leaf", stacked=is_stacked, warmup_steps=8),
    "zclip with prior norms": lambda: zclip(prior_norms=[0.3, 0.31, 0.29, 0.3] * 8),
    "zclip with schedules": lambda: zclip(z_thresh=falling(3.0, 2.0), max_grad_norm=falling(2.0, 0.5)),
    "levelclip": levelclip,
    "observe_only": lambda: zclip(observe_only=True, nonfinite="propagate"),
    "chain": lambda: optax.chain(zclip(warmup_steps=10), optax.adamw(falling(1e-2, 1e-3))),
    "two clips": lambda: optax.chain(
        zclip(warmup_steps=10), clip_by_rule(rules.percentile(50.0, 12), granularity="leaf"), optax.sgd(1.0)
    ),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.chain(clip_by_rule(rules.percentile(50.0, 8)), optax.adam(1e-2)), 2
    ).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(zclip)(z_thresh=2.5, max_grad_norm=1.0),
    "inject_hyperparams with schedules": lambda: optax.inject_hyperparams(injected)(
        learning_rate=falling(1.0, 0.1), z_thresh=falling(3.0, 2.0)
    ),
    "at_most of a window": lambda: clip_by_rule(rules.at_most(rules.percentile(50.0, 12), falling(1.0, 0.3))),
    "bounded window": lambda: clip_by_rule(rules.bounded(rules.window_zscore(12, warmup_steps=8), 0.1, 1.0)),
    "loss_aware window": lambda: clip_by_rule(rules.loss_aware(rules.percentile(50.0, 12), form="step")),
    "three combinators": lambda: clip_by_rule(
        rules.at_most(
            rules.loss_aware(rules.bounded(rules.sigma_skip(6.0, 16, 8), 0.1, 5.0)), falling(4.0, 1.0)
        ),
        granularity="leaf",
    ),
    "skip around a chain": lambda: skip_by_rule(
        optax.chain(zclip(warmup_steps=8), optax.adam(falling(1e-2, 1e-3))), rules.sigma_skip(6.0, 24, 12)
    ),
    "skip with counts": lambda: skip_by_rule(
        optax.chain(clip_by_rule(rules.percentile(50.0, 8)), optax.adam(falling(1e-2, 1e-3))),
        rules.window_zscore(24, warmup_steps=12),
        advance_counts=True,
    ),
    "skip in a chain": lambda: optax.chain(zclip(), skip_by_rule(optax.adam(1e-2), rules.level())),
    "skip around MultiSteps": lambda: skip_by_rule(
        optax.MultiSteps(optax.chain(zclip(warmup_steps=4), optax.sgd(1.0)), 2), rules.fixed(1.0)
    ),
    "watch": lambda: watch("grads"),
    "watch by layer": lambda: watch("grads", rule=rules.percentile(50.0, 12), stacked=is_stacked),
    "watch at both ends of a chain": lambda: optax.chain(
        watch("grads", stacked=is_stacked), zclip(), optax.sgd(0.1), watch("updates")
    ),
    "watch in a skip": lambda: skip_by_rule(
        optax.MultiSteps(
            optax.chain(watch("grads"), optax.sgd(0.1), watch("updates", rule=rules.fixed(0.01))), 2
        ),
        rules.fixed(2.0),
    ),
}

TRANSFORMATIONS = [
    *(
        Transformation(f"{case.name}", lambda case=case: clip_by_rule(case()), case not in ONE_OF_A_KIND)
        for case in RULES
    ),
    *(
        Transformation(
            f"{case.name} by leaf", lambda case=case: clip_by_rule(case(), granularity="leaf"), True
        )
        for case in RULES
    ),
    *(
        Transformation(
            f"{case.name} by layer",
            lambda case=case: clip_by_rule(case(), granularity="leaf", stacked=is_stacked),
            not among(case, BY_LAYER),
        )
        for case in RULES
    ),
    *(
        Transformation(
            f"skip_by_rule {case.name}",
            lambda case=case: skip_by_rule(optax.adam(1e-2), case()),
            not among(case, SKIPPING),
        )
        for case in RULES
    ),
    *(Transformation(name, make, name in SLOW) for name, make in COMPOSED.items()),
]
BY_NAME = {transformation.name: transformation for transformation in TRANSFORMATIONS}


def each(transformations):
    """Parametrizes a test by the name of a transformation."""
    return mark_slow(
        "name", [t.name for t in transformations], [t.name for t in transformations if not t.slow]
    )


def mark_slow(argument, names, quick):
    """Parametrizes a test by names, of which all but the `quick` ones are slow."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        argument, [n if n in quick else pytest.param(n, marks=slow) for n in names]
    )


# Spikes, zeros, NaN and infinity, in a warm-up and after it, and a leaf that is zero or NaN alone.
STEPS = 44
STOPS = (12, 34)
PARAMS = {"head": np.float32([0.5, -1.0]), "layers": np.float32([[1.0, 2.0], [-1.0, 0.5], [0.1, -0.3]])}


def _series():
    rng = np.random.default_rng(11)
    series = []
    for step in range(STEPS):
        grads = {name: rng.standard_normal(x.shape) for name, x in PARAMS.items()}
        norm = np.sqrt(sum(np.sum(x**2) for x in grads.values()))
        size = 0.3 * (1 + 0.05 * rng.standard_normal()) * {6: 8.0, 30: 8.0, 36: 9.0, 40: 30.0}.get(step, 1.0)
        size = {13: 0.0, 35: 0.0}.get(step, size)
        grads = {name: np.float32(x / norm * size) for name, x in grads.items()}
        if step in (14, 37):
            grads["head"][1] = np.nan
        if step in (16, 38):
            grads["layers"][1, 0] = np.inf
        if step in (20, 39):
            grads["head"][:] = 0.0
        series.append(grads)
    return series


GRADS = _series()
LOSS = np.float32(LOSSES[:STEPS])
LOSS[[15, 41]] = np.nan
LOSS[33] = 9.0


class Program:
    """A transformation and its one compiled step, which donates the state."""

    def __init__(self, name):
        self.tx = BY_NAME[name].make()
        self.jitted = fast_jit(self.eager, donate_argnums=0)

    def eager(self, state, grads, loss):
        updates, state = self.tx.update(grads, state, PARAMS, value=loss)
        return state, (updates, metrics(state))

    def run(self, state, steps, jit=True):
        """The last state, and updates and metrics of each of `steps`, in NumPy."""
        step, seen = self.jitted if jit else self.eager, []
        if jit:  # a copy, to be donated
            state = jax.tree.map(jnp.array, state)
        for i in steps:
            state, out = step(state, GRADS[i], LOSS[i])
            seen.append(jax.device_get(out))
        return state, seen


class Whole(NamedTuple):
    """The uninterrupted run: NumPy states ahead of the steps of `STOPS`, and updates and metrics of each step."""

    states: dict[int, Any]
    seen: list[Any]


program = functools.lru_cache(None)(Program)


@functools.lru_cache(None)
def whole_run(name):
    this = program(name)
    state, states, seen, start = this.tx.init(PARAMS), {}, [], 0
    for stop in (*STOPS, STEPS):
        state, out = this.run(state, range(start, stop))
        states[stop] = jax.tree.map(np.copy, jax.device_get(state))
        seen += out
        start = stop
    return Whole(states, seen)


def clip_states(tree):
    """The states of this package in `tree`; those of optax have habits of their own."""
    ours = (ClipState, WatchState)
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ours))
    return [x for x in found if isinstance(x, ours)]


def spec(tree):
    """Shapes and dtypes of the leaves, and the structure."""
    return [(np.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)], jax.tree.structure(tree)


def bits(tree):
    """Every leaf's bytes, signs of zeros and payloads of NaN included."""
    leaves = jax.tree.leaves(tree)
    keys = [jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for x in leaves]
    return [
        np.asarray(jax.random.key_data(x) if key else x).tobytes()
        for x, key in zip(leaves, keys, strict=True)
    ]


def assert_same(got, want):
    """The same structure, and in each place the same number, NaN as NaN."""
    assert spec(got) == spec(want)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))
