"""Records of spikes: names of the groups, plain data, and the line for people."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.cases import fast_jit
from zclip_jax import group_names, metrics, rules, skip_by_rule, spikes, step_record, transplant, watch, zclip

NAMES = ("embed", "head", "layers/wk", "layers/wq", "norm")
LAYERS = 2


def is_stacked(path):
    return path[0].key == "layers"


PARAMS = {
    "embed": np.ones((4, 2), np.float32),
    "layers": {name: np.ones((LAYERS, 3), np.float32) for name in ("wq", "wk")},
    "norm": np.ones(2, np.float32),
    "head": np.ones((2, 4), np.float32),
}
# The head has nearly all of the norm, as it often does.
SIZES = {"embed": 0.1, "head": 50.0, "layers/wq": 0.3, "layers/wk": 0.02, "norm": 0.5}


def grads_of(step, planted=None, factor=1.0):
    """Noisy gradients of these sizes; `planted` is the name of a group whose gradient is multiplied."""
    rng = np.random.default_rng(step)

    def one(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        grad = rng.choice([-1, 1], x.shape) * np.exp(0.1 * rng.standard_normal(x.shape))
        grad = np.float32(grad / np.linalg.norm(grad) * SIZES[name] * np.exp(0.1 * rng.standard_normal()))
        for layer in range(LAYERS):
            if planted == f"{name}[{layer}]":
                grad[layer] *= factor
        return grad * np.float32(factor if planted == name else 1.0)

    return jax.tree_util.tree_map_with_path(one, PARAMS)


def chain(**kwargs):
    return optax.chain(watch("grads", **kwargs), zclip(), optax.sgd(0.1))


WAYS = {
    "chain": chain,
    "MultiSteps": lambda **kwargs: optax.MultiSteps(chain(**kwargs), 1),
    "skip_by_rule": lambda **kwargs: optax.chain(
        watch("grads", **kwargs), skip_by_rule(optax.sgd(0.1), rules.fixed(300.0))
    ),
    "inject_hyperparams": lambda **kwargs: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(watch("grads", **kwargs), optax.sgd(learning_rate))
    )(learning_rate=0.1),
    "partition": lambda **kwargs: optax.partition(
        {"body": chain(**kwargs), "ends": chain(**kwargs)},
        {"embed": "ends", "layers": "body", "norm": "body", "head": "ends"},
    ),
    "masked": lambda **kwargs: optax.masked(
        chain(**kwargs), {"embed": True, "layers": True, "norm": True, "head": False}
    ),
}


SLOW = ("MultiSteps", "skip_by_rule", "inject_hyperparams", "masked")


@pytest.mark.parametrize(
    ("way", "stacked"),
    [
        pytest.param(way, stacked, marks=pytest.mark.slow if stacked and way in SLOW else ())
        for way in WAYS
        for stacked in (None, is_stacked)
    ],
)
def test_a_planted_spike_is_named(way, stacked):
    """In each group in turn, though its share of the norm is small on other steps; a NaN likewise."""
    tx = WAYS[way](stacked=stacked)
    update = fast_jit(tx.update)
    state = tx.init(PARAMS)
    for step in range(30):
        _, state = update(grads_of(step), state, PARAMS)
    for name in group_names(PARAMS, stacked=stacked):
        if (way, name) == ("masked", "head"):
            continue
        factor = 8 * SIZES["head"] / SIZES[name.partition("[")[0]]
        _, after = update(grads_of(30, name, factor), state, PARAMS)
        found = spikes(after, PARAMS, stacked=stacked)
        assert {record["rise"]["group"] for record in found} == {name}
        _, after = update(grads_of(30, name, np.nan), state, PARAMS)
        found = [record for record in spikes(after, PARAMS, stacked=stacked) if record["kind"] == "nonfinite"]
        assert [record["nonfinite"] for record in found] == [[name]]
        assert f"not finite: {name}" in str(found[0])


def test_a_spike_below_the_share_of_the_head():
    """The head keeps the largest share, its own history says that nothing is the matter with it."""
    tx = watch("grads", rule=rules.fixed(0.0))
    update = fast_jit(tx.update)
    state = tx.init(PARAMS)
    for step in range(30):
        _, state = update(grads_of(step), state)
    _, state = update(grads_of(30, "layers/wk", 40.0), state)
    record = step_record(metrics(state), group_names(PARAMS))
    assert (record["share"]["group"], record["rise"]["group"]) == ("head", "layers/wk")
    assert record["share"]["share"] > 0.95
    assert 25 < record["rise"]["times_level"] < 60
    assert " · head: 100 % of it · layers/wk: " in str(record)


def test_no_spike_spoils_the_history():
    """A group that spikes, fails and rests keeps its level, and is named again."""
    tx = watch("grads")
    update = fast_jit(tx.update)
    state = tx.init(PARAMS)
    for step in range(60):
        factor = {20: 1e4, 21: 1e4, 30: np.nan, 31: np.inf, 40: 0.0, 41: 0.0, 59: 5e3}.get(step, 1.0)
        before = state
        _, state = update(grads_of(step, "layers/wk", factor), state)
        if step == 21:
            assert metrics(state)["watch/grads/rise"] > 3e3
        if not np.isfinite(factor) or factor == 0:
            place = NAMES.index("layers/wk")
            for now, then in zip(
                jax.tree.leaves(state.history), jax.tree.leaves(before.history), strict=True
            ):
                assert now[place] == then[place]
    assert spikes(state, PARAMS)[-1]["rise"]["times_level"] > 2500


def test_records_are_plain_and_equal():
    """What `spikes` keeps is what `step_record` gave; JSON takes it; each step is there once."""
    tx = optax.chain(watch("grads"), zclip(), optax.sgd(0.1), watch("updates"))
    update = fast_jit(tx.update)
    state, seen = tx.init(PARAMS), []
    names = group_names(PARAMS)
    for step in range(40):
        planted = {20: ("norm", 900.0), 30: ("head", 3.0), 35: ("embed", np.inf)}.get(step, (None, 1.0))
        _, state = update(grads_of(step, *planted), state, PARAMS)
        records = [step_record(jax.device_get(metrics(state)), names, what) for what in ("grads", "updates")]
        seen += [record for record in records if record]
    kept = spikes(state, PARAMS)
    assert [r["step"] for r in kept if r["watch"] == "grads"] == [21, 31, 36]
    assert all(record in seen for record in kept)
    for record in kept:
        assert json.loads(json.dumps(record, allow_nan=False)) == record
    last = kept[-1] if kept[-1]["watch"] == "grads" else kept[-2]
    assert (last["norm"], last["allowed"], last["times_level"]) == ("inf", "inf", None)
    assert str(last) == "step 36: norm inf · 1 of 5 groups not finite: embed"


def test_the_line_of_updates():
    tx = watch("updates", rule=rules.fixed(1.0))
    update = fast_jit(tx.update)
    state = tx.init(jnp.ones(4))
    for size in [0.1, 0.1, 0.1, 0.8]:
        _, state = update(jnp.full(4, size), state, jnp.ones(4))
    (record,) = spikes(state, jnp.ones(4))
    assert record["ratio_rise"] == pytest.approx(8, rel=1e-3)
    assert record["ratio_group"]["times_level"] == pytest.approx(8, rel=1e-3)
    assert str(record).startswith("step 4 (updates): norm 1.6, 8x its level, allowed 1")
    assert str(record).endswith("updates 0.8 of the weights, 8x their level")


def test_an_overflow_of_the_sum():
    tx = watch("grads")
    grads = {"a": jnp.asarray([1.5e19]), "b": jnp.asarray([1.5e19])}
    _, state = fast_jit(tx.update)(grads, tx.init(grads))
    (record,) = spikes(state, grads)
    assert str(record) == "step 1: norm inf · all 2 groups finite: the sum of their squares overflows"


def test_a_first_step_has_no_history():
    tx = watch("grads", rule=rules.fixed(1.0))
    grads = {"a": jnp.asarray([3.0]), "b": jnp.asarray([4.0])}
    _, state = fast_jit(tx.update)(grads, tx.init(grads))
    (record,) = spikes(state, grads)
    assert (record["times_level"], record["rise"]) == (None, None)
    assert str(record) == "step 1: norm 5, allowed 1 · b: 64 % of it"


def test_other_groups_are_errors():
    tx = watch("grads", stacked=is_stacked)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="4 of its 7 groups are not among"):
        spikes(state, PARAMS)
    with pytest.raises(ValueError, match="no watch in this"):
        spikes(zclip().init(PARAMS), PARAMS)
    _, state = fast_jit(tx.update)(jax.tree.map(lambda x: x * np.nan, PARAMS), state)
    with pytest.raises(ValueError, match="the 7 groups of this watch, got 5"):
        step_record(metrics(state), group_names(PARAMS))
    with pytest.raises(ValueError, match="got 'updates'; values has watch/grads"):
        step_record(metrics(state), NAMES, "updates")


def test_transplanted_by_name():
    """Histories go to the same groups and to no others, be they as many."""
    old = optax.chain(watch("grads"), optax.adam(1e-3))
    _, state = fast_jit(old.update)(grads_of(0), old.init(PARAMS), PARAMS)
    new = optax.chain(watch("grads"), zclip(), optax.adam(1e-3), watch("updates"))
    carried, report = transplant(state, new.init(PARAMS))
    assert "0 WatchState" in report.carried
    assert any(line.startswith("3 WatchState: ") for line in report.fresh)
    np.testing.assert_array_equal(carried[0].norms, state[0].norms)

    renamed = {f"new {name}": x for name, x in PARAMS.items()}
    for make in (lambda x: x, lambda x: optax.MultiSteps(x, 2)):
        wrapped = make(old)
        carried, report = transplant(make(old).init(PARAMS), wrapped.init(renamed))
        assert any(line.endswith("WatchState: the old one holds other groups") for line in report.fresh)

    other = watch("grads", rule=rules.ema())
    carried, report = transplant(state, optax.chain(other, optax.adam(1e-3)).init(PARAMS))
    assert report.fresh == (
        "0 WatchState: the old one has other statistics, only its histories and totals are carried",
    )
    np.testing.assert_array_equal(carried[0].history.log_mean, state[0].history.log_mean)
