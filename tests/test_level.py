"""`rules.level`: what is a spike on steady runs, on heavy tails, and after the level or the tail has changed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zclip_jax import decide, rules
from zclip_jax._rule import decide_all

DEFAULTS = {"multiple": 1.65, "alpha": 0.95, "patience": 25, "num_std": 2.9}
STEPS, SEEDS = 1500, 4


@functools.cache
def compiled():
    """One program for each shape, whatever the settings."""
    return jax.jit(jax.vmap(lambda norms, given: decide_all(rules.level(**given), norms), (0, None)))


def run(norms, **given):
    """The outcomes `[traces, steps]` of the rule on each of the traces, and its last states."""
    return jax.tree.map(np.asarray, compiled()(jnp.asarray(norms, jnp.float32), DEFAULTS | given))


def log_normal(scale, seeds=SEEDS, steps=STEPS, seed=0):
    return np.exp(scale * np.random.default_rng(seed).standard_normal((seeds, steps)))


@pytest.mark.parametrize("factor", [2.0**-50, 1e-9, 3.7, 1e9, 2.0**50])
def test_a_constant_factor_changes_no_decision(factor):
    norms = np.concatenate([log_normal(scale, 2) for scale in (0.1, 1.5)])
    norms[:, 700:] *= 6
    norms[:, [40, 300, 1200]] *= 9
    want, got = run(norms)[0], run(norms * factor)[0]
    np.testing.assert_array_equal(got.fired, want.fired)
    np.testing.assert_allclose(got.clip_scale, want.clip_scale, rtol=1e-3)
    np.testing.assert_allclose(got.trigger[:, 1:], want.trigger[:, 1:] * factor, rtol=1e-3)


@pytest.mark.parametrize("scale", [0.3, 0.5, 0.7, 1.0, 1.5])
def test_few_steps_of_a_heavy_tail_fire(scale):
    norms = log_normal(scale)
    fired = run(norms)[0].fired
    assert fired[:, 100:].mean(1).max() <= 0.02
    assert fired[:, :100].sum(1).max() <= 15
    alone = run(norms, num_std=0.0)[0].fired
    assert (alone.sum(1) > 2 * fired.sum(1)).all()


@pytest.mark.parametrize("scale", [0.3, 0.7, 1.0])
def test_spikes_beyond_a_heavy_tail_fire(scale):
    norms = log_normal(scale)
    at = np.arange(150, STEPS, 90)
    norms[:, at] = 3 * np.exp(2.326 * scale)  # three times the norm that 1 % exceed
    assert run(norms)[0].fired[:, at].mean() > 0.97


@pytest.mark.parametrize("factor", [2.0, 3.0, 40.0, 1e6])
def test_exactly_the_spikes_of_a_steady_run_fire(factor):
    norms = log_normal(0.05)
    at = np.r_[5, 13, 60:STEPS:20]
    norms[:, at] = factor
    outcome, _ = run(norms)
    assert outcome.fired[:, at].all()
    assert not np.delete(outcome.fired, at, axis=1).any()
    # The tail that they leave stays below the floor.
    assert (outcome.trigger[:, 1000:] < 1.75 * outcome.mean[:, 1000:]).all()


@pytest.mark.parametrize("first", [1.0, 40.0])
def test_spikes_among_the_first_norms_fire(first):
    norms = log_normal(0.05)
    norms[:, 0] = first
    at = [12, 20, 30] if first == 1 else [30]
    norms[:, at] *= 4
    fired = run(norms)[0].fired
    assert fired[:, at].all()
    assert fired.sum() == len(at) * SEEDS


def test_a_rise_from_the_first_step_is_forgotten():
    norms = log_normal(0.05) * np.minimum(1, 0.05 + np.arange(STEPS) / 20)
    outcome, _ = run(norms)
    assert not outcome.fired.any()
    assert (outcome.trigger[:, 20] < 12).all()
    assert (outcome.trigger[:, 160:] < 1.8).all()


@pytest.mark.parametrize("fall", [3.0, 10.0, 60.0])
def test_a_fall_from_the_first_step_leaves_no_tail(fall):
    level = 13 * np.exp(-np.arange(STEPS) / fall) + 0.3
    norms = level * log_normal(0.08)
    norms[:, 200::100] *= 3
    outcome, alone = run(norms)[0], run(norms, num_std=0.0)[0]
    assert not outcome.fired[:, :200].any()
    assert outcome.fired[:, 200::100].all()
    jax.tree.map(np.testing.assert_array_equal, outcome, alone)


@pytest.mark.parametrize("noise", [0.05, 0.1])
@pytest.mark.parametrize("factor", [1.5, 2.0, 5.0, 100.0, 0.5, 0.1, 0.01])
def test_a_shift_is_learned(factor, noise):
    norms = log_normal(noise)
    norms[:, 400:] *= factor
    at = [435, 450, 500, 600]
    norms[:, at] = 2.5 * factor
    fired = run(norms)[0].fired
    assert fired[:, 400:435].sum(1).max() <= DEFAULTS["patience"] + 1
    assert not fired[:, 430:435].any()
    assert not np.delete(fired, at, axis=1)[:, 435:].any()
    assert fired[:, at[1:] if factor < 0.1 else at].all()


def test_patience_says_how_long_a_shift_takes():
    norms = log_normal(0.05)
    norms[:, 400:] *= 50
    for patience in (1, 5, 40):
        fired = run(norms, patience=patience)[0].fired
        np.testing.assert_array_equal(fired.sum(1), patience + 1)


def test_a_heavy_tail_survives_a_shift():
    norms = log_normal(0.7)
    norms[:, 700:] *= 30
    fired = run(norms)[0].fired
    assert fired[:, 700:720].mean() > 0.3
    assert fired[:, 760:].mean() < 0.02


def test_a_new_tail_is_learned_and_an_old_one_forgotten():
    norms = np.concatenate([log_normal(0.1), log_normal(1.0, seed=1)], axis=1)[:, 700:2300]
    fired = run(norms)[0].fired
    assert not fired[:, 100:800].any()
    assert fired[:, 800:900].mean() > 0.1
    assert fired[:, 1000:].mean() < 0.02
    outcome = run(norms[:, ::-1])[0]
    assert (outcome.trigger[:, 700] > 4 * outcome.mean[:, 700]).all()
    assert (outcome.trigger[:, 1200:] < 1.8 * outcome.mean[:, 1200:]).all()


def test_without_deviations_the_multiple_alone_counts():
    outcome, _ = run(log_normal(1.0), num_std=0.0)
    mean, count = outcome.mean[:, 1:], np.arange(1, 20)
    np.testing.assert_allclose(
        outcome.trigger[:, 1:20], mean[:, :19] * (1 + 0.65 * (1 + 1 / count)), rtol=1e-5
    )


@pytest.mark.parametrize("scale", [0.05, 0.5, 1.5])
def test_trigger_z_score_and_threshold_agree(scale):
    outcome, _ = run(log_normal(scale))
    fired = outcome.fired
    assert fired.any() == (scale > 0.1)
    np.testing.assert_array_equal(fired, outcome.grad_norm > outcome.trigger)
    np.testing.assert_array_equal(fired, outcome.z_score > 1)
    assert (outcome.threshold[fired] <= outcome.trigger[fired]).all()
    assert np.isinf(outcome.threshold[~fired]).all()
    assert np.isinf(outcome.trigger[:, 0]).all()
    assert np.isfinite(outcome.trigger[:, 1:]).all()
    np.testing.assert_allclose(outcome.trigger[:, 1:], (outcome.mean + outcome.std)[:, 1:], rtol=1e-6)


def finite(tree):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-19, 19), min_size=64, max_size=64), st.integers(1, 3))
def test_every_sequence_of_norms_leaves_finite_numbers(exponents, repeats):
    norms = 10.0 ** np.stack([np.roll(np.repeat(exponents, repeats)[:64], 16 * i) for i in range(SEEDS)])
    outcome, state = run(norms)
    assert finite((outcome.z_score, outcome.mean, outcome.std, outcome.clip_scale, state))
    assert finite(outcome.trigger[:, 1:])
    assert (state.rise >= 0).all()
    assert (state.mean > 0).all()


def test_the_smallest_norms_leave_no_nan():
    norms = 10.0 ** np.random.default_rng(0).uniform(-45, -36, (SEEDS, 64))
    for leaf in jax.tree.leaves(run(norms)):
        assert not np.isnan(leaf).any()


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1))
def derivatives(given, norms):
    """Of all that comes out of the rule, by its settings and by the norms."""
    outcomes, state = decide_all(rules.level(**given), norms)
    return jnp.sum(outcomes.clip_scale) + state.mean + state.rise


@pytest.mark.parametrize("scale", [0.05, 1.5, 40.0])
def test_derivatives_are_finite(scale):
    norms = np.clip(log_normal(scale, 1, 64)[0], 1e-18, 1e18).astype(np.float32)
    assert finite(derivatives({name: DEFAULTS[name] for name in ("multiple", "alpha", "num_std")}, norms))


def test_counters_do_not_wrap():
    most = np.iinfo(np.int32).max
    rule = rules.level(patience=most)
    update = jax.jit(functools.partial(decide, rule))
    _, state = update(1.0, rule.init())
    for num_off, norm in ((most, 50.0), (-most, 1e-3), (3, 1.0), (-3, 1.0)):
        worn = state.replace(num_norms=jnp.int32(most), num_off=jnp.int32(num_off))
        outcome, after = update(norm, worn)
        assert int(after.num_norms) == most
        assert int(after.num_off) == (num_off if norm != 1.0 else num_off - np.sign(num_off))
        assert bool(outcome.fired) == (norm > 2)


@pytest.mark.parametrize("num_std", [-0.1, np.nan, np.inf, "2", None, [1.0, 2.0]])
def test_deviations_that_are_none_are_refused(num_std):
    with pytest.raises(ValueError, match=r"num_std must be a finite number >= 0, got"):
        rules.level(num_std=num_std)
