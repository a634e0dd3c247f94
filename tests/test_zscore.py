"""`rules.zscore` against the published implementation, and where it departs from it on purpose."""

import json
import lzma
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import fast_jit, noisy
from zclip_jax import decide, rules

# What the PyTorch package zclip 1.0.0 decides on seeded traces: its factors and its statistics.
GOLDEN = json.loads(
    lzma.decompress((Path(__file__).parent / "data" / "zclip_pytorch_1_0_0.json.xz").read_bytes())
)
CASES = {f"{case['trace']}-{case['kwargs']}": case for case in GOLDEN["cases"]}


def settings(kwargs):
    """The reference's keywords in ours, with `patience=None` as published."""
    kwargs = dict(kwargs)
    mode, option = kwargs.pop("mode", "zscore"), kwargs.pop("clip_option", "adaptive_scaling")
    strategy = "max" if mode == "percentile" else {"mean": "mean"}.get(option, "reciprocal")
    absorb = "none" if kwargs.pop("skip_update_on_spike", False) else "clipped"
    cap = kwargs.pop("max_grad_norm", 1.0)
    return rules.at_most(rules.zscore(**kwargs, strategy=strategy, absorb=absorb, patience=None), cap)


def run(rule, norms):
    """Outcomes and states after each step, stacked."""

    def step(state, norm):
        outcome, state = decide(rule, norm, state)
        return state, (outcome, state)

    norms = jnp.asarray(norms, jnp.result_type(float))
    return fast_jit(lambda norms: jax.lax.scan(step, rule.init(), norms)[1])(norms)


def reference(case):
    """The reference's factor without its `/(n + 1e-6)`, its mean and its variance; NaN while None."""
    norms = np.array(GOLDEN["traces"][case["trace"]])
    scale = np.array(case["scale"])
    exact = np.where(scale < 1, scale * (norms + 1e-6) / norms, 1.0)
    return norms, exact, np.array(case["mean"], float), np.array(case["var"], float)


def test_golden_has_all_cases():
    assert len(CASES) == 90
    assert {len(trace) for trace in GOLDEN["traces"].values()} == {400}


@pytest.mark.parametrize("name", CASES)
def test_golden_in_float64(name, x64, strict):
    norms, scale, mean, var = reference(CASES[name])
    outcome, state = run(settings(CASES[name]["kwargs"]), norms)
    np.testing.assert_allclose(outcome.clip_scale, scale, rtol=2e-6)
    np.testing.assert_array_equal(outcome.clip_scale < 1, scale < 1)
    known = ~np.isnan(mean)
    assert known.sum() > 350
    np.testing.assert_allclose(state.mean[known], mean[known], rtol=1e-9)
    np.testing.assert_allclose(state.var[known], var[known], rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_golden_in_float32(name, strict):
    norms, scale, mean, _ = reference(CASES[name])
    outcome, state = run(settings(CASES[name]["kwargs"]), norms)
    np.testing.assert_array_equal(outcome.clip_scale < 1, scale < 1)
    np.testing.assert_allclose(outcome.clip_scale, scale, rtol=1e-4)
    known = ~np.isnan(mean)
    np.testing.assert_allclose(state.mean[known], mean[known], rtol=1e-4)


@pytest.mark.parametrize("strategy", ["reciprocal", "max", "mean"])
def test_default_patience_changes_nothing_that_is_not_locked_in(strategy, x64):
    """Steps differ from the published rule's only after 25 consecutive spikes."""
    traces = jnp.asarray(list(GOLDEN["traces"].values()))
    published, _ = jax.vmap(lambda n: run(rules.zscore(strategy=strategy, patience=None), n))(traces)
    default, state = jax.vmap(lambda n: run(rules.zscore(strategy=strategy), n))(traces)
    learned = np.cumsum(np.asarray(state.spike_run) > 25, axis=1)
    before = learned <= 1  # up to and including the first step whose raw norm was absorbed
    assert before.mean() > 0.8
    np.testing.assert_array_equal(default.fired[before], published.fired[before])
    np.testing.assert_allclose(default.threshold[before], published.threshold[before], rtol=1e-9)


def shifted(factor, steps=2000):
    return noisy(np.r_[np.ones(200), np.full(steps, factor)], 200 + steps, seed=11)


@pytest.mark.parametrize("factor", [1.5, 2, 5, 100])
@pytest.mark.parametrize("strategy", ["reciprocal", "max", "mean"])
def test_a_shift_is_learned(factor, strategy):
    outcome, _ = run(rules.zscore(strategy=strategy), shifted(factor))
    after = np.asarray(outcome.fired)[200 + 25 + 10 :]
    assert after.mean() < 0.02


@pytest.mark.parametrize("factor", [2, 5, 100])
def test_published_behaviour_a_shift_locks_in(factor):
    """Without patience every step after the shift is a spike, for ever."""
    outcome, state = run(rules.zscore(patience=None), shifted(factor))
    assert np.asarray(outcome.fired)[200:].all()
    assert state.mean[-1] < 1.2


def test_patience_counts_consecutive_spikes():
    """With patience 3 the first three spikes are absorbed clipped, the fourth raw."""
    norms = [1.0, 1.1, 0.9, 1.0] + [5.0] * 4
    outcome, state = run(rules.zscore(warmup_steps=4, patience=3), norms)
    mean = np.asarray(state.mean)
    assert np.asarray(outcome.fired)[4:].all()
    assert (mean[4:7] < 1.01).all()
    np.testing.assert_allclose(mean[7], 0.97 * mean[6] + 0.03 * 5.0, rtol=1e-6)


def test_warmup_statistics_are_those_of_its_raw_norms(x64):
    norms = np.random.default_rng(0).lognormal(3.0, 1.0, 25)
    outcome, state = run(rules.at_most(rules.zscore(), 0.1), norms)
    np.testing.assert_allclose(state.mean[-1], np.mean(norms), rtol=1e-12)
    np.testing.assert_allclose(state.var[-1], np.var(norms), rtol=1e-12)
    assert np.asarray(outcome.capped).all()
    assert not np.asarray(outcome.fired).any()


def test_robust_warmup_is_median_and_mad(x64):
    norms = noisy(1.0, 25, seed=3)
    norms[7] = 1e4
    _, state = run(rules.zscore(robust_warmup=True), norms)
    median = np.median(norms)
    std = 1.4826 * np.median(np.abs(norms - median))
    np.testing.assert_allclose(state.mean[-1], median, rtol=1e-12)
    np.testing.assert_allclose(np.sqrt(state.var[-1]), std, rtol=1e-12)


def test_std_in_the_outcome_has_the_floor_in_it():
    outcome, _ = run(rules.zscore(min_rel_std=0.2), [2.0] * 25 + [3.0])
    np.testing.assert_allclose(outcome.std[-1], 0.4, rtol=1e-6)
    np.testing.assert_allclose(outcome.z_score[-1], 2.5, rtol=1e-5)


def test_huge_norms_stay_finite_in_float32():
    """Squares of norms up to the largest that passes the overflow guard still fit the variance."""
    norms = [1.8e19, 1.0, 1.8e19, 1.0] * 10 + [1.8e19] * 60
    outcome, state = run(rules.zscore(warmup_steps=5, patience=2), norms)
    for field in (state.mean, state.var, outcome.z_score, outcome.clip_scale):
        assert np.isfinite(np.asarray(field)).all()


def test_vmap_over_hyperparameters():
    norms = jnp.asarray(noisy(1.0, 300, seed=8), jnp.float32)
    thresholds = jnp.asarray([1.0, 2.0, 3.0])
    fired = jax.vmap(lambda z: run(rules.zscore(z_thresh=z), norms)[0].fired)(thresholds)
    for i, z in enumerate([1.0, 2.0, 3.0]):
        np.testing.assert_array_equal(fired[i], run(rules.zscore(z_thresh=z), norms)[0].fired)
    counts = fired.sum(axis=1)
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 1.0), ("alpha", -0.1), ("alpha", np.nan), ("alpha", "0.9"), ("alpha", True),
        ("z_thresh", 0), ("z_thresh", [1.0, 2.0]),
        ("eps", 0.0), ("eps", -1e-6), ("clip_factor", 0), ("clip_factor", None),
        ("warmup_steps", 0), ("warmup_steps", 2.5), ("patience", 0), ("patience", 1.5),
        ("min_rel_std", -0.1), ("strategy", "percentile"), ("absorb", "cap"),
    ],
)  # fmt: skip
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got ") as error:
        rules.zscore(**{name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [-1.0, np.nan, "1"])
@pytest.mark.parametrize("make", [rules.fixed, lambda x: rules.at_most(rules.zscore(), x)])
def test_bad_max_norm(make, value):
    with pytest.raises(ValueError, match=r"^max_norm must be a number >= 0.*, got "):
        make(value)
