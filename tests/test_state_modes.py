"""Every transformation under JAX's switches: 64 bits, strict promotion, debugging, transfer guards, meshes."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.cases import in_mesh
from tests.transformations import (
    BY_NAME,
    GRADS,
    LOSS,
    ONE_OF_A_KIND,
    PARAMS,
    STEPS,
    TRANSFORMATIONS,
    assert_same,
    clip_states,
    each,
    is_stacked,
    mark_slow,
    program,
    spec,
    whole_run,
)
from zclip_jax import clip_by_rule, metrics, rules, unscale, zclip

pytestmark = pytest.mark.slow

QUICK = [t for t in TRANSFORMATIONS if not t.slow]
ELSEWHERE = ("chain", "skip", "Multi", "inject", "two")
OURS = [t.name for t in QUICK if not any(word in t.name for word in ELSEWHERE)]
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


def finite_steps():
    """Steps whose gradients and losses are finite and not zero, a spike among them."""
    finite = [
        i
        for i in range(STEPS)
        if np.isfinite(LOSS[i]) and all(np.isfinite(x).all() for x in GRADS[i].values())
    ]
    return [i for i in finite if any(x.any() for x in GRADS[i].values())]


@each(QUICK)
@pytest.mark.parametrize("made", ["x32", pytest.param("x64", marks=pytest.mark.slow)])
def test_x64_keeps_the_types_of_a_state(name, made):
    """Made with 64 bits or without, and carried on with them; the updates keep their types too."""
    this = program(name)
    with enable_x64(made == "x64"):
        state = this.tx.init(PARAMS)
    with enable_x64(True):
        after, (updates, _) = jax.eval_shape(this.eager, state, GRADS[1], LOSS[1])
        assert spec(clip_states(after)) == spec(clip_states(state))
        if name in OURS:
            wide = jax.tree.map(np.float64, GRADS[1])
            updates, after = jax.eval_shape(lambda s: this.tx.update(wide, s, value=1.0), state)
            assert spec(after) == spec(state)
            assert spec(updates) == spec(wide)


@mark_slow("name", OURS, ["zscore-True", "sigma_skip", "percentile"])
def test_a_narrow_state_goes_on_with_64_bits(name):
    this, whole = program(name), whole_run(name)
    with enable_x64(True):
        state, (updates, logged) = this.jitted(jax.tree.map(jnp.array, whole.states[34]), GRADS[34], LOSS[34])
    want_updates, want = whole.seen[34]
    for key, x in logged.items():
        assert key.endswith("_rate") or x.dtype == want[key].dtype, key
        np.testing.assert_allclose(x, want[key], rtol=1e-4, atol=1e-5, err_msg=key)
    assert spec(updates) == spec(want_updates)


@mark_slow("name", OURS, [name for name in OURS if name not in ("at_most", "bounded", "in_log_space")])
def test_strict_promotion_of_dtypes_and_ranks(name, strict):
    """Gradients of every dtype, losses of every type, the metrics too."""
    tx = BY_NAME[name].make()
    losses = [2, np.float64(1.5), jnp.bfloat16(2.0)]
    for wide in (False, True):
        floats = [np.float32, jnp.bfloat16, np.float16, np.complex64]
        floats += [np.float64, np.complex128] if wide else []
        grads = {"layers": np.full((2, 2), 0.1, np.float32), "step": np.int32(3), "mask": np.array([True])}
        grads |= {f"{i}": np.full(2, 0.1, dtype) for i, dtype in enumerate(floats)}
        with enable_x64(wide):
            state = tx.init(grads)
            for loss in losses:
                updates, after = jax.eval_shape(functools.partial(tx.update, grads, value=loss), state)
                assert spec(after) == spec(state)
                assert spec(updates) == spec(grads)
            jax.eval_shape(metrics, state)


@pytest.mark.parametrize(
    "scale", [2.0**10, 1024, np.float64(1024), np.float32(1024), np.int64(1024), "jax", "half"]
)
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.complex64])
def test_unscale_under_strict_promotion(dtype, scale, strict):
    scale = {"jax": jnp.float32(1024), "half": jnp.float16(1024)}.get(scale, scale)
    grads = {
        "w": jnp.asarray([1024.0, 2048.0], dtype),
        "step": jnp.asarray(3),
        "s": jnp.asarray(512.0, dtype),
    }
    for got in (unscale(grads, scale), jax.jit(unscale)(grads, scale)):
        np.testing.assert_array_equal(got["w"], [1.0, 2.0])
        assert got["s"] == 0.5
        assert got["step"] == 3
        assert got["w"].dtype == (np.complex64 if dtype == np.complex64 else np.float32)


@pytest.mark.parametrize(
    "prior", [[1, 2, 3], (1.0, 2.0), np.arange(1, 5), np.float64([1.0, 2.0]), "bf16", "jax"]
)
def test_prior_norms_under_strict_promotion(prior, strict):
    prior = (
        {"bf16": jnp.ones(3, jnp.bfloat16), "jax": jnp.ones(4)}.get(prior, prior)
        if isinstance(prior, str)
        else prior
    )
    state = zclip(prior_norms=prior).init(PARAMS)
    np.testing.assert_allclose(state.rule_state.mean, np.mean(np.float32(prior)), rtol=1e-6)


OP_BY_OP = (
    "zscore-default",
    "in_log_space",
    "loss_aware",
    "sigma_skip",
    "percentile",
    "level",
    "adagc by layer",
)


@each(QUICK)
def test_debug_nans(name):
    """Neither a state nor an update of finite gradients holds a NaN, compiled; nor any step on the way, eagerly."""
    this = program(name)
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with jax.debug_nans(True):
        plain.update(GRADS[0], plain.init(PARAMS), PARAMS)
        state = this.tx.init(PARAMS)
        for i in finite_steps():
            state, _ = this.jitted(state, GRADS[i], LOSS[i])
        for i in [10, 30] if name in OP_BY_OP else []:
            state, _ = this.eager(state, GRADS[i], LOSS[i])


def test_debug_infs_is_out_as_the_docs_say():
    """Infinity is how a state says that there is no limit; adam and clip_by_global_norm have none."""
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with jax.debug_infs(True):
        plain.update(GRADS[0], plain.init(PARAMS), PARAMS)
        with pytest.raises(FloatingPointError, match="inf"):
            zclip().init(PARAMS)
    concepts = pathlib.Path(__file__).parents[1] / "docs" / "concepts.md"
    assert "`jax_debug_infs` does not" in concepts.read_text()


@each(QUICK)
def test_transfer_guard(name):
    """A compiled step, and the metrics inside `jit` and outside, move nothing between host and device."""
    this, whole = program(name), whole_run(name)
    state, grads, loss = jax.tree.map(jnp.array, (whole.states[34], GRADS[34], LOSS[34]))
    read = jax.jit(metrics)
    read(state)
    with jax.transfer_guard("disallow"):
        outside, inside = metrics(state), read(state)
    assert_same(jax.device_get(outside), jax.device_get(inside))
    with jax.transfer_guard("disallow"):
        _, (_, logged) = this.jitted(state, grads, loss)  # which donates the state
    assert_same(jax.device_get(logged), whole.seen[34][1])


FACTORIES = """
import jax
from jax._src import xla_bridge
import numpy as np, optax
from tests.cases import RULES
from tests.transformations import TRANSFORMATIONS, is_stacked
from zclip_jax import clip_by_rule, rules, skip_by_rule, zclip, levelclip

def untouched(what):
    assert not xla_bridge.backends_are_initialized(), what

untouched("import")
for case in RULES:
    case()
    untouched("rules." + case.name)
    for rule in (rules.at_most(case(), np.float32(1.0)), rules.at_most(case(), lambda step: 1.0),
                 rules.bounded(case(), 0.0, np.inf), rules.bounded(case(), np.float64(0.1), lambda step: 3.0),
                 rules.loss_aware(case(), eta=np.float32(1.0))):
        clip_by_rule(rule, granularity="leaf", stacked=is_stacked)
        skip_by_rule(optax.adam(1e-3), rule, advance_counts=True)
        untouched("a combinator of " + case.name)
for make in (zclip, levelclip):
    make(prior_norms=[1.0, 2.0])
    make(prior_norms=np.ones(3))
    untouched(make.__name__)
for name in rules.__all__:
    make = getattr(rules, name)
    if not isinstance(make, type):
        for given in ((), (1.5,), (rules.fixed(1.0),), (rules.fixed(1.0), 1.0, 2.0)):
            try:
                make(*given)
            except (TypeError, ValueError):
                pass
            untouched(f"rules.{name}{given}")
for transformation in TRANSFORMATIONS:
    transformation.make()
    untouched(transformation.name)
print("untouched")
"""


def test_factories_touch_no_device():
    """Or `jax.distributed.initialize()` would come too late: one process makes them all."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FACTORIES], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "untouched", done.stderr[-2000:]


def test_made_in_one_jit_used_outside():
    """Rules and transformations keep no tracer: all made in one trace, each used in another."""
    made = {}

    @jax.jit
    def trace(x):
        made.update({t.name: t.make() for t in TRANSFORMATIONS})
        return x

    trace(1.0)
    for case in ONE_OF_A_KIND:  # op by op, where a tracer that was kept is found out
        tx = made[case.name]
        tx.update(GRADS[0], tx.init(PARAMS), PARAMS, value=LOSS[0])


SHAPES = {"layers": (8, 16), "head": (8,)}
# A tree whose layers, width, both or neither are split over two explicit axes.
SPLITS = {
    "layers": {"layers": P("x", None), "head": P(None)},
    "width": {"layers": P(None, "x"), "head": P("y")},
    "both": {"layers": P("x", "y"), "head": P(("x", "y"))},
    "layers over both": {"layers": P(("x", "y"), None), "head": P(None)},
}


def frames():
    for axis in ("explicit", "auto"):
        for granularity in ("stacked", "label", "leaf", "global"):
            for split in SPLITS:
                slow = axis == "auto" or (granularity != "stacked" and split != "layers")
                marks = pytest.mark.slow if slow else ()
                yield pytest.param(axis, granularity, split, id=f"{axis}-{granularity}-{split}", marks=marks)


FRAMES = {
    "global": {},
    "leaf": {"granularity": "leaf"},
    "stacked": {"granularity": "leaf", "stacked": is_stacked},
    "label": {"granularity": lambda path: "all", "stacked": is_stacked},
}


@pytest.mark.parametrize(("axis", "granularity", "split"), list(frames()))
def test_a_split_tree_decides_as_a_whole_one(axis, granularity, split):
    """And its updates keep their shardings."""
    axis = AxisType.Explicit if axis == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("x", "y"), (axis, axis), devices=jax.devices()[:8])
    tx = clip_by_rule(rules.fixed(1.0), **FRAMES[granularity])
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    grads["layers"][2:5] *= 0.01

    def step(grads):
        updates, state = tx.update(grads, tx.init(grads))
        return updates, metrics(state)

    want, want_logged = step(grads)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPLITS[split].items()}
    with in_mesh(mesh):
        got, logged = jax.jit(step)(jax.device_put(grads, shardings))
    assert len(np.unique(want_logged["zclip/bound"])) == (2 if granularity in ("stacked", "label") else 1)
    for key, x in logged.items():
        np.testing.assert_allclose(x, want_logged[key], rtol=1e-5, err_msg=key)
    for key, x in got.items():
        np.testing.assert_allclose(x, want[key], rtol=1e-5)
        if axis == AxisType.Explicit:
            assert x.sharding.is_equivalent_to(shardings[key], x.ndim)
