"""Kinds of runs that a watch must tell the truth about, against NumPy."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import fast_jit
from tests.watching import history_oracle
from zclip_jax import group_names, metrics, spikes, step_record, watch

NUM = 6
NAMES = tuple(f"g{i}" for i in range(NUM))
PARAMS = {name: jnp.ones(2) for name in NAMES}
TX = watch("grads")


@functools.cache
def runner():
    """A run of many steps, compiled once."""

    def run(state, norms):
        def step(state, each):
            _, state = TX.update(
                {name: jnp.stack([x, 0 * x]) for name, x in zip(NAMES, each, strict=True)}, state
            )
            return state, metrics(state)

        return jax.lax.scan(step, state, norms)

    return fast_jit(run)


STEPS = 64


def logged(norms):
    """The state after the steps, and the metrics of each; steps that are missing to STEPS have zero norms."""
    rows = np.zeros((STEPS, NUM), np.float32)
    rows[: len(norms)] = norms
    state, logs = runner()(TX.init(PARAMS), rows)
    logs = {name.removeprefix("watch/grads/"): np.asarray(x)[: len(norms)] for name, x in logs.items()}
    return state, logs


def noise(seed, scale, steps=STEPS):
    return np.exp(scale * np.random.default_rng(seed).normal(size=(steps, NUM)))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    exponents=st.lists(st.integers(-6, 6), min_size=NUM, max_size=NUM),
    order=st.permutations(range(NUM)),
    times=st.sampled_from([4.0, 30.0, 1e4]),
)
def test_a_group_is_named_whatever_its_base(seed, exponents, order, times):
    norms = noise(seed, 0.1) * 10.0 ** np.array(exponents)
    places = {30 + 5 * i: group for i, group in enumerate(order)}
    for step, group in places.items():
        norms[step, group] = times * 10.0 ** exponents[group]
    _, logs = logged(norms)
    for step, group in places.items():
        assert logs["rise_group"][step] == group
        assert logs["rise"][step] == pytest.approx(times, rel=0.4)
        assert logs["share_group"][step] == np.argmax(norms[step])
        squares = np.float64(norms[step]) ** 2
        assert logs["share"][step] == pytest.approx(squares.max() / squares.sum(), rel=1e-3)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    quiet=st.integers(0, NUM - 1),
    steps=st.integers(20, 60),
    size=st.sampled_from([0.5, 1.0, 300.0]),
)
def test_a_group_that_was_zero_has_no_history(seed, quiet, steps, size):
    """As an expert that gets its first tokens, or an adapter that was frozen: no other group is named for it."""
    norms = noise(seed, 0.05)[: steps + 2]
    norms[:steps, quiet] = 0
    norms[steps, quiet] = size
    norms[steps + 1, quiet] = 50 * size
    state, logs = logged(norms)
    assert logs["rise_group"][steps] != quiet
    assert logs["rise"][steps] < 1.5
    assert (logs["rise_group"][steps + 1], round(float(logs["rise"][steps + 1]))) == (quiet, 50)
    values = {f"watch/grads/{name}": x[steps] for name, x in logs.items()}
    record = step_record(values, NAMES)
    if record is not None:
        assert record["share"]["group"] == NAMES[quiet]
        others = set(NAMES) - {NAMES[quiet]}
        assert not any(name in str(record) for name in others)
        assert NAMES[quiet] in str(record)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.history))


@settings(max_examples=20, deadline=None)
@given(
    bad=st.sets(st.integers(0, NUM - 1), min_size=1, max_size=NUM - 1),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    data=st.data(),
)
def test_a_spike_beside_what_is_not_finite(bad, value, data):
    """Both groups are named: the one that spiked may be why the other is NaN."""
    spiked = data.draw(st.sampled_from(sorted(set(range(NUM)) - bad)))
    norms = noise(1, 0.05)[:40]
    norms[30, sorted(bad)] = value
    norms[30, spiked] = 40.0
    state, logs = logged(norms)
    assert np.flatnonzero(logs["nonfinite_groups"][30]).tolist() == sorted(bad)
    assert not logs["nonfinite_groups"][31].any()
    (record,) = [x for x in spikes(state, PARAMS) if x["kind"] == "nonfinite"]
    assert (record["step"], record["nonfinite"]) == (31, [NAMES[i] for i in sorted(bad)])
    assert record["rise"]["group"] == record["share"]["group"] == NAMES[spiked]
    assert f"{len(bad)} of {NUM} groups not finite: {NAMES[min(bad)]}" in str(record)
    assert f"{NAMES[spiked]}: " in str(record)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_a_quiet_group_is_not_named_beside_what_is_not_finite():
    norms = noise(2, 0.05)[:40]
    norms[30, 2] = math.nan
    state, _ = logged(norms)
    (record,) = spikes(state, PARAMS)
    assert str(record) == f"step 31: norm nan · 1 of {NUM} groups not finite: g2"


@pytest.mark.parametrize("spiked", range(NUM))
def test_while_norms_fall_a_thousand_times(spiked):
    """As over the first steps of a run; and not one of them is a spike."""
    fall = 10.0 ** (3 - 3 * np.minimum(np.arange(60), 50) / 50)[:, None]
    norms = noise(3, 0.02, 60) * fall * np.arange(1, NUM + 1)
    _, calm = logged(norms)
    assert not calm["fired"].any()
    for step in (5, 20, 40, 58):
        planted = norms.copy()
        planted[step, spiked] *= 10
        _, logs = logged(planted)
        assert logs["rise_group"][step] == spiked


def test_a_level_that_shifts_is_followed_and_hides_no_other():
    norms = np.ones((STEPS, NUM))
    norms[10:, 1] = 10
    norms[-1, 4] = 10
    _, logs = logged(norms)
    rise = logs["rise"][10:-1]
    assert rise[0] == pytest.approx(10)
    assert np.all(np.diff(rise) < 1e-5)
    assert rise[-1] < 2
    assert (logs["rise_group"][10], logs["rise_group"][-1]) == (1, 4)


def test_spikes_in_a_row_are_told_one_by_one():
    norms = np.ones((STEPS, NUM))
    norms[30:34, 3] = 100
    state, logs = logged(norms)
    assert np.flatnonzero(logs["fired"]).tolist() == [30, 31, 32, 33]
    np.testing.assert_allclose(logs["rise"][:34], history_oracle(norms[:34, 3])[1], rtol=1e-4)
    assert logs["rise"][30:34].min() > 80
    first, last = spikes(state, PARAMS)
    assert (first["step"], last["step"]) == (31, 34)
    assert first["times_level"] > last["times_level"]


def test_values_that_a_record_cannot_be_made_of():
    _, logs = logged(np.where(np.arange(40)[:, None] == 30, np.nan, 1.0) * np.ones(NUM))
    values = {f"watch/grads/{name}": x[30] for name, x in logs.items()}
    # As read back from a log, with words for what JSON has no number for.
    words = {
        name: x.tolist() if x.ndim else str(float(x)) if not np.isfinite(x) else x.item()
        for name, x in values.items()
    }
    del words["watch/grads/norms"]
    record = step_record(json.loads(json.dumps(words, allow_nan=False)), NAMES)
    assert record is not None
    assert record["nonfinite"] == list(NAMES)
    scalars = {name: x for name, x in values.items() if x.ndim == 0}
    with pytest.raises(ValueError, match="watch/grads/nonfinite_groups"):
        step_record(scalars, NAMES)
    seeds = jax.tree.map(lambda x: np.stack([x, x]), values)
    with pytest.raises(ValueError, match=r"one step of one run.*\(2,\)"):
        step_record(seeds, NAMES)


WRAPPED = {
    "named_chain": lambda tx: optax.named_chain(("w", tx), ("s", optax.sgd(1.0))),
    "inject": lambda tx: optax.inject_hyperparams(lambda lr: optax.chain(tx, optax.sgd(lr)))(lr=0.1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(optax.chain(tx, optax.sgd(1.0)), 3),
    "masked": lambda tx: optax.masked(tx, dict.fromkeys(NAMES, True)),
    "multi_steps": lambda tx: optax.MultiSteps(optax.chain(tx, optax.sgd(1.0)), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("what", ["grads", "updates"])
def test_inside_of(name, what):
    """Scanned, with a donated state and one compilation, it names the group that spiked."""
    tx = WRAPPED[name](watch(what))
    state, traces = tx.init(PARAMS), []

    def step(grads, state):
        traces.append(1)
        return tx.update(grads, state, PARAMS)[1]

    compiled = jax.jit(step, donate_argnums=1)
    for i in range(24):
        size = [1.0] * 3 + [300.0 if i in (20, 21) else 1.0] + [1.0] * 2
        state = compiled({name: jnp.full(2, x) for name, x in zip(NAMES, size, strict=True)}, state)
    assert len(traces) == 1
    (record,) = spikes(state, PARAMS)[:1]
    assert record["step"] == (11 if name == "multi_steps" else 21)
    assert record["rise"]["group"] == record["share"]["group"] == "g3"
    assert step_record(metrics(state), group_names(PARAMS), what) is None


@pytest.mark.slow
@pytest.mark.parametrize(("what", "most"), [("grads", 16), ("updates", 32)])
def test_the_program_grows_by_a_few_instructions_a_leaf(what, most):
    """Where each operation on the groups gathers the sums of all leaves, 2,000 leaves compile for minutes."""
    tx, num = watch(what), {}
    for leaves in (20, 60):
        params = {f"w{i}": jnp.ones(4) for i in range(leaves)}
        update = jax.jit(lambda grads, state, params: tx.update(grads, state, params)[1])
        text = update.lower(params, tx.init(params), params).compile().as_text()
        num[leaves] = text.count(" = ")
    assert num[60] - num[20] <= most * 40
