"""Which rows an update saw, and what each of them did: against one gradient a row, with `jax.grad`."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.cases import in_mesh
from zclip_jax.monitor import RowTracker, row_report
from zclip_jax.monitor._rows import measure

WIDTH = 8


def loss_fn(params, batch):
    """Of a batch of any number of rows, with a weight for each of them."""
    hidden = jnp.tanh(batch["x"] @ params["w"].astype(jnp.float32))
    error = hidden @ params["v"] + params["steps"] * 0 - batch["more"][0]
    return jnp.mean(batch["more"][1] * error**2)


def loss_and_more(params, batch):
    return loss_fn(params, batch), {"not": "an array"}


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "steps": jnp.asarray(7),
        "v": jnp.asarray(rng.standard_normal(WIDTH), jnp.float32),
        "w": jnp.asarray(rng.standard_normal((WIDTH, WIDTH)), jnp.bfloat16),
    }


def make_batch(rows, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((rows, WIDTH)), rng.standard_normal(rows)
    return {"x": np.float32(x), "more": (np.float32(y), np.ones(rows, np.float32))}


def expected(params, batch):
    """Losses and norms, row by row."""
    trained = {name: params[name] for name in ("v", "w")}
    losses, norms = [], []
    for i in range(len(batch["x"])):
        row = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)
        loss, grads = jax.value_and_grad(lambda p, row=row: loss_fn({**params, **p}, row))(trained)
        losses.append(float(loss))
        norms.append(math.sqrt(sum(np.sum(np.float64(np.asarray(g)) ** 2) for g in jax.tree.leaves(grads))))
    return np.array(losses), np.array(norms)


def columns(report):
    """Losses, norms and shares in the order of the batch."""
    rows = sorted(report, key=lambda row: row["position"])
    return [np.array([float(row[name]) for row in rows]) for name in ("loss", "norm", "share")]


@pytest.mark.parametrize(("chunk_size", "function"), [(1, loss_fn), (3, loss_fn), (8, loss_and_more)])
def test_each_row_as_if_alone(chunk_size, function):
    params, batch = make_params(), make_batch(8)
    report = row_report(function, params, batch, chunk_size=chunk_size)
    losses, norms, shares = columns(report)
    expected_losses, expected_norms = expected(params, batch)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-2)  # one of the gradients is in bfloat16
    np.testing.assert_allclose(shares, norms**2 / np.sum(norms**2), rtol=1e-6)
    assert [row["norm"] for row in report] == sorted(norms, reverse=True)
    assert [row["row_id"] for row in report] == [row["position"] for row in report]


@settings(max_examples=20, deadline=None)
@given(at=st.integers(0, 15), size=st.floats(30, 1e4), seed=st.integers(0, 99))
def test_a_corrupt_row_of_16_is_first(at, size, seed):
    batch = make_batch(16, seed)
    batch["more"][0][at] = size
    ids = [f"shard-{i % 3}:{i}" for i in range(16)]
    report = row_report(loss_fn, make_params(), batch, row_ids=ids)
    assert (report[0]["position"], report[0]["row_id"]) == (at, ids[at])
    assert report[0]["share"] > 0.5
    assert str(report).startswith(f"row {ids[at]}: loss ")
    assert str(report).endswith("\nand 11 more")


@settings(max_examples=20, deadline=None)
@given(bad=st.dictionaries(st.integers(0, 15), st.sampled_from([math.nan, math.inf, -math.inf]), max_size=16))
def test_rows_that_are_not_finite_come_first(bad):
    batch = make_batch(16)
    for at, value in bad.items():
        batch["more"][0][at] = value
    report = row_report(loss_fn, make_params(), batch)
    assert [row["position"] for row in report][: len(bad)] == sorted(bad)
    assert all(row["share"] == "nan" for row in report[: len(bad)])
    rest = report[len(bad) :]
    assert sum(row["share"] for row in rest) == pytest.approx(1.0 if rest else 0.0)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert ("not finite" in str(report)) == bool(bad)


def test_rows_without_a_gradient():
    """Shares of nothing are nothing, not NaN."""
    batch = make_batch(16)
    batch["more"] = (batch["more"][0], np.zeros(16, np.float32))
    report = row_report(loss_fn, make_params(), batch)
    assert [(row["position"], row["norm"], row["share"]) for row in report] == [
        (i, 0.0, 0.0) for i in range(16)
    ]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_norms_are_summed_in_float32(dtype):
    """65,536 squares of 4: 512, where the sum of squares is above what float16 holds."""
    params, batch = jnp.zeros(2**16, dtype), jnp.full((2, 1), 2.0, dtype)
    report = row_report(lambda params, batch: jnp.sum(params * batch[0]), params, batch)
    assert [row["norm"] for row in report] == [512.0, 512.0]


def wide_loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["out"]) ** 2)


def test_memory_does_not_grow_with_the_batch():
    params = {
        "in": jax.ShapeDtypeStruct((64, 1024), np.float32),
        "out": jax.ShapeDtypeStruct((1024, 64), np.float32),
    }
    gradient = 4 * sum(math.prod(x.shape) for x in params.values())

    def temporary(rows, chunk_size):
        batch = jax.ShapeDtypeStruct((rows, 64), np.float32)
        compiled = measure.lower(params, batch, wide_loss, chunk_size, (None,), None).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one, many = temporary(8, 1), temporary(128, 1)
    assert many < 2 * gradient
    assert many - one < 0.1 * gradient
    assert temporary(128, 16) < 20 * gradient < 128 * gradient


def plain_loss(params, batch):
    hidden = jnp.tanh(jnp.einsum("rw,wh->rh", batch["x"], params["w"]))
    return jnp.mean((jnp.sum(hidden * params["v"], axis=-1) - batch["more"][0]) ** 2)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_on_a_mesh(axis_type):
    """Parameters and batch are split over eight devices, and the loss asks for rows that are."""
    kind = getattr(AxisType, axis_type)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(kind,) * 2)
    rows = NamedSharding(mesh, P(("data", "fsdp")))

    def split_loss(params, batch):
        if kind is AxisType.Auto:
            batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), batch)
        else:
            assert all(jax.typeof(x).sharding.spec[0] == ("data", "fsdp") for x in jax.tree.leaves(batch))
        return plain_loss(params, batch)

    rng = np.random.default_rng(1)
    params = {
        "v": np.float32(rng.standard_normal(WIDTH)),
        "w": np.float32(rng.standard_normal((WIDTH, WIDTH))),
    }
    specs = {"v": P(), "w": P() if kind is AxisType.Explicit else P("fsdp", "data")}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
    batch = make_batch(16)
    batch["more"][0][11] = 100.0
    with in_mesh(mesh):
        report = row_report(split_loss, placed, jax.device_put(batch, rows), chunk_size=2)
    on_one = row_report(plain_loss, params, batch)
    for found, alone in zip(columns(report), columns(on_one), strict=True):
        np.testing.assert_allclose(found, alone, rtol=1e-5)
    assert report[0]["position"] == 11


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunk_size": 0}, r"chunk_size must be a positive int, got 0"),
        ({"chunk_size": 2.0}, r"chunk_size must be a positive int, got 2\.0"),
        ({"row_ids": [1, 2]}, r"row_ids must have one id for each of the 4 rows of the batch, got 2"),
        ({"batch": {}}, r"batch must hold at least one array, got \{\}"),
        ({"batch": {"x": np.ones((0, 2))}}, r"batch must have at least one row, got none"),
        (
            {"batch": {"x": np.ones((4, 2)), "temperature": 1.0}},
            r"\['temperature'\] is a scalar: give it to loss_fn",
        ),
        ({"batch": (np.ones((4, 2)), np.ones(3))}, r"\[0\] has 4, \[1\] has 3"),
        (
            {"loss_fn": lambda params, batch: batch @ params},
            r"loss_fn must return a scalar.* got shape \(1,\)",
        ),
    ],
)
def test_row_report_refuses(change, said):
    def mean_loss(params, batch):
        return jnp.mean(batch @ params)

    arguments = {"loss_fn": mean_loss, "params": np.ones(2, np.float32), "batch": np.ones((4, 2), np.float32)}
    with pytest.raises(ValueError, match=said):
        row_report(**{**arguments, **change})


@settings(max_examples=50, deadline=None)
@given(
    capacity=st.integers(1, 5),
    added=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.lists(st.integers(), max_size=4))),
)
def test_a_tracker_keeps_the_last_updates(capacity, added):
    tracker, kept = RowTracker(capacity), []
    for update, data_index, row_ids in added:
        tracker.add(update, data_index, np.array(row_ids, object))
        kept = [*(row for row in kept if row[0] != update), (update, data_index, row_ids)][-capacity:]
    for update in range(10):
        assert tracker.find(update) == next((row for row in kept if row[0] == update), None)


def test_a_tracker_copies_what_a_loader_fills_again():
    tracker, ids = RowTracker(), np.arange(4)
    tracker.add(1, {"shard": 3}, ids)
    ids[:] = 0
    tracker.add(2, 5, ("a", 7))
    assert tracker.find(1) == (1, {"shard": 3}, [0, 1, 2, 3])
    assert json.loads(json.dumps(tracker.find(2)._asdict())) == {
        "update": 2,
        "data_index": 5,
        "row_ids": ["a", 7],
    }


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True, "many"])
def test_a_tracker_refuses(capacity):
    with pytest.raises(ValueError, match=f"capacity must be a positive int, got {capacity!r}"):
        RowTracker(capacity)
