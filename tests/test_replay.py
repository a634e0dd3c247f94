"""`replay`: recorded norms through the function that training runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import LOSSES, RULES, TRACES, noisy
from zclip_jax import clip_by_rule, rules
from zclip_jax.replay import replay, sweep

pytestmark = pytest.mark.usefixtures("strict")


@pytest.mark.parametrize("case", RULES, ids=[case.name for case in RULES])
def test_replay_of_the_logged_norms_is_what_training_decided(case):
    tx = clip_by_rule(case())
    state, live = tx.init(None), []
    update = jax.jit(tx.update)
    norms = np.insert(TRACES["spikes"][:160], 90, np.nan).astype(np.float32)
    losses = LOSSES[: len(norms)].astype(np.float32)
    for norm, loss in zip(norms, losses, strict=True):
        _, state = update({"w": jnp.asarray([0.6, 0.8]) * norm}, state, value=loss)
        live.append(state.last)
    live = jax.tree.map(lambda *x: np.stack(x), *live)
    replayed = replay(case(), live.grad_norm, value=losses)
    for name in ("fired", "bound", "capped", "nonfinite"):
        np.testing.assert_array_equal(getattr(replayed.outcomes, name), getattr(live, name))
    np.testing.assert_allclose(replayed.outcomes.clip_scale, live.clip_scale, rtol=3e-6)
    np.testing.assert_allclose(replayed.outcomes.threshold, live.threshold, rtol=3e-6)
    assert replayed.summary["num_fired"] == int(state.num_fired)
    assert replayed.summary["longest_run"] == int(state.longest_spike_run)


def test_the_final_state_is_that_of_prior_norms():
    norms = TRACES["steady"]
    primed = clip_by_rule(rules.zscore(), prior_norms=norms).init(None)
    jax.tree.map(np.testing.assert_array_equal, replay(rules.zscore(), norms).state, primed.rule_state)


def test_lock_in_is_named():
    norms = noisy(np.r_[np.ones(100), np.full(200, 5.0)], 300)
    assert replay(rules.zscore(patience=None), norms).summary["locked_in_from"] == 100
    assert replay(rules.zscore(), norms).summary["locked_in_from"] == -1
    with_gap = np.insert(norms, 150, np.nan)
    summary = replay(rules.zscore(patience=None), with_gap).summary
    assert (summary["locked_in_from"], summary["longest_run"]) == (100, 200)


def test_sweep_is_a_loop():
    norms = TRACES["heavy tail"]
    settings, together = sweep(rules.zscore, norms, z_thresh=[2.0, 3.0], alpha=[0.9, 0.97])
    assert settings[1] == {"z_thresh": 2.0, "alpha": 0.97}
    for i, setting in enumerate(settings):
        alone = replay(rules.zscore(**setting), norms)
        np.testing.assert_array_equal(together.outcomes.fired[i], alone.outcomes.fired)
        assert together.summary["longest_run"][i] == alone.summary["longest_run"]


def test_vmap_over_traces():
    traces = jnp.asarray(np.stack([TRACES["steady"], TRACES["spikes"]]), jnp.float32)
    together = jax.vmap(lambda norms: replay(rules.zscore(), norms))(traces)
    assert together.summary["num_fired"].shape == (2,)


def test_no_norms():
    summary = replay(rules.zscore(), []).summary
    assert (summary["num_steps"], summary["num_fired"], summary["fired_rate"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replay(rules.zscore(), [[1.0]]), r"norms must be one-dimensional, got .* shape \(1, 1\)"),
        (lambda: replay(rules.zscore(), [1.0], value=[1.0, 2.0]), "value must have 1 steps like norms"),
        (lambda: sweep(rules.zscore, [1.0]), "sweep needs at least one hyperparameter"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
