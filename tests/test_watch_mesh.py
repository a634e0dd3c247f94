"""The same record on every mesh, with one all-reduce."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.cases import fast_jit, in_mesh
from tests.watching import KINDS
from zclip_jax import metrics, spikes, watch, zclip

SPECS = {"head": P("x", "y"), "layers": P(None, "x"), "norm": P(), "body": P(("x", "y"))}
SHAPES = {"head": (8, 4), "layers": (2, 8), "norm": (3,), "body": (16,)}
STEPS, SPIKE, BAD = 12, 9, 11
PARAMS = {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}
INSIDE = {"specs": SPECS, "predicate": lambda path: SPECS[path[0].key]}


def is_stacked(path):
    return path[0].key == "layers"


def make(**kwargs):
    kwargs["stacked"] = is_stacked
    return optax.chain(watch("grads", **kwargs), optax.sgd(0.1), watch("updates", **kwargs))


def grads_of(step):
    rng = np.random.default_rng(step)
    grads = {name: np.float32(rng.standard_normal(shape)) for name, shape in SHAPES.items()}
    grads["head"] *= 100
    grads["layers"][1] *= 5000 if step == SPIKE else 1
    if step == BAD:
        grads["body"][7] = np.nan
    return grads


SERIES = jax.tree.map(lambda *x: np.stack(x), *map(grads_of, range(STEPS)))


def scan(tx, params, series):
    state = tx.init(params)
    return jax.lax.scan(lambda state, grads: tx.update(grads, state, params)[::-1], state, series)


def records(state):
    return spikes(state, PARAMS, stacked=is_stacked)


@pytest.fixture(scope="module")
def alone():
    state, _ = fast_jit(lambda params, series: scan(make(), params, series))(PARAMS, SERIES)
    found = records(state)
    assert [(r["watch"], r["kind"], r["step"]) for r in found] == [
        (what, kind, step + 1) for kind, step in (("spike", SPIKE), ("nonfinite", BAD)) for what in KINDS
    ]
    for record in found[:2]:
        assert record["share"]["group"] == record["rise"]["group"] == "layers[1]"
    for record in found[2:]:
        assert record["nonfinite"] == ["body"]
    return state


def check(state, alone):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    assert [str(record) for record in records(state)] == [str(record) for record in records(alone)]


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("x", "y"), (kind, kind), devices=jax.devices()[:8])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jit(kind, alone):
    mesh = mesh_of(kind)
    series = {k: jax.device_put(x, NamedSharding(mesh, P(None, *SPECS[k]))) for k, x in SERIES.items()}
    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in PARAMS.items()}
    with in_mesh(mesh):
        state, _ = fast_jit(lambda params, series: scan(make(), params, series))(params, series)
    check(state, alone)


def shard_mapped(tx, **kwargs):
    inner = jax.tree.map(lambda spec: P(None, *spec), SPECS, is_leaf=lambda x: isinstance(x, P))
    return jax.shard_map(
        lambda params, series: scan(tx, params, series),
        mesh=mesh_of(),
        in_specs=(SPECS, inner),
        out_specs=(P(), inner),
        **kwargs,
    )


def test_shard_map_by_its_types(alone):
    check(fast_jit(shard_mapped(make()))(PARAMS, SERIES)[0], alone)


@pytest.mark.parametrize("how", INSIDE)
def test_shard_map_without_types(how, alone):
    tx = make(axis_name=("x", "y"), split=INSIDE[how])
    check(fast_jit(shard_mapped(tx, check_vma=False))(PARAMS, SERIES)[0], alone)


def test_pmap():
    """Of leaves that are split over the devices, and of one that each has a copy of."""
    tx = watch("updates", axis_name="d", split={"a": True, "b": False})
    updates = {"a": np.arange(1, 17, dtype=np.float32).reshape(8, 2), "b": np.full((8, 3), 2.0, np.float32)}

    def step(updates):
        return tx.update(updates, tx.init(updates), updates)[1]

    state = jax.pmap(step, axis_name="d", devices=jax.devices()[:8])(updates)
    want = np.float32([np.sqrt(np.sum(updates["a"] ** 2)), np.sqrt(12.0)])
    np.testing.assert_allclose(state.norms, np.tile(want, (8, 1)), rtol=1e-6)
    np.testing.assert_allclose(metrics(state)["watch/updates/ratio"], np.ones(8), rtol=1e-6)
    with pytest.raises(ValueError, match="of one device and one run"):
        spikes(state, updates)


ONE = {
    "grads": lambda: watch("grads"),
    "updates": lambda: watch("updates"),
    "chain": lambda: optax.chain(watch("grads"), optax.sgd(0.1)),
    "with zclip by leaf": lambda: optax.chain(watch("grads"), zclip(granularity="leaf")),
    "with zclip": lambda: optax.chain(watch("grads"), zclip()),
}


@pytest.mark.parametrize("name", ONE)
def test_one_all_reduce(name):
    """Of the vector; XLA puts the scalar of `zclip` into the same one, but not yet that of JAX 0.7."""
    tx = ONE[name]()

    def step(grads):
        return tx.update(grads, tx.init(grads), grads)

    mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(SPECS,), out_specs=(SPECS, P()))
    lowered = jax.jit(mapped).lower(PARAMS)
    hlo = lowered.compile().as_text()
    apart = name == "with zclip" and jax.__version_info__ < (0, 8)
    assert len(re.findall(r" all-reduce(?:-start)?\(", hlo)) == 1 + apart
    for other in ("all-gather", "collective-permute", "all-to-all", "reduce-scatter"):
        assert f" {other}(" not in hlo
