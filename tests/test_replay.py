"""`replay`: recorded norms through the function that training runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zclip_jax
from tests.cases import LOSSES, RULES, TRACES, noisy
from zclip_jax import clip_by_rule, decide, rules
from zclip_jax._rule import init_state
from zclip_jax.replay import replay, sweep

pytestmark = pytest.mark.usefixtures("strict")


@jax.numpy_dtype_promotion("standard")  # Adam mixes ints and floats
def train(clip, *, num_steps=120):
    """Logged outcomes of a small regression with label noise: real gradients, a spike now and then."""
    key = jax.random.key(0)
    params = {"hidden": jax.random.normal(key, (4, 8)) / 2, "out": jnp.zeros(8)}
    tx = optax.chain(clip, optax.adam(0.05))
    data = np.random.default_rng(0)

    def loss_fn(params, x, y):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["hidden"]) @ params["out"] - y))

    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    state, outcomes, losses = tx.init(params), [], []
    for i in range(num_steps):
        x = data.standard_normal((16, 4)).astype(np.float32)
        y = x.sum(-1) * (20.0 if i in (40, 75, 76) else 1.0)
        y[0] = np.nan if i == 90 else y[0]
        params, state, loss = step(params, state, x, y)
        outcomes.append(state[0].last)
        losses.append(loss)
    return jax.tree.map(lambda *x: np.stack(x), *outcomes), np.stack(losses), state[0]


@pytest.mark.parametrize("case", RULES, ids=[case.name for case in RULES])
def test_replay_of_the_logged_norms_is_what_training_decided(case):
    live, losses, state = train(clip_by_rule(case()))
    replayed = replay(case(), live.grad_norm, value=losses)
    jax.tree.map(np.testing.assert_array_equal, replayed.outcomes, live)
    jax.tree.map(np.testing.assert_array_equal, replayed.state, state.rule_state)
    assert live.nonfinite.sum() == 1
    assert replayed.summary["num_fired"] == int(state.num_fired)
    assert replayed.summary["longest_run"] == int(state.longest_spike_run)


@pytest.mark.parametrize("case", RULES, ids=[case.name for case in RULES])
@pytest.mark.slow
@pytest.mark.parametrize("trace", ["shift", "heavy tail"])
def test_a_scan_rounds_as_a_step_does(case, trace):
    norms, losses = TRACES[trace].astype(np.float32), LOSSES[: len(TRACES[trace])].astype(np.float32)
    rule = case()
    step = jax.jit(lambda norm, state, loss: decide(rule, norm, state, value=loss))
    state, stepped = init_state(rule), []
    for norm, loss in zip(norms, losses, strict=True):
        outcome, state = step(norm, state, loss)
        stepped.append(outcome)
    scanned = replay(rule, norms, value=losses).outcomes
    jax.tree.map(np.testing.assert_array_equal, scanned, jax.tree.map(lambda *x: np.stack(x), *stepped))


@pytest.mark.slow
@pytest.mark.parametrize("case", RULES, ids=[case.name for case in RULES])
def test_groups_round_as_one_norm_does(case):
    """Norms of groups are judged side by side, in a program that fuses otherwise than that of one norm."""
    norms, losses = (
        TRACES["heavy tail"].astype(np.float32),
        LOSSES[: len(TRACES["heavy tail"])].astype(np.float32),
    )
    rule, groups = case(), np.float32([1.0, 0.5, 3.0])

    def together(norm, state, loss):
        return jax.vmap(lambda norm, state: decide(rule, norm, state, value=loss))(norm * groups, state)

    state = jax.tree.map(lambda x: jnp.repeat(x[None], 3, axis=0), init_state(rule))
    step, stepped = jax.jit(together), []
    for norm, loss in zip(norms, losses, strict=True):
        outcome, state = step(norm, state, loss)
        stepped.append(jax.tree.map(lambda x: x[0], outcome))
    alone = replay(rule, norms, value=losses).outcomes
    jax.tree.map(np.testing.assert_array_equal, alone, jax.tree.map(lambda *x: np.stack(x), *stepped))


@pytest.mark.parametrize("rule", [rules.zscore(alpha=0.0), rules.level(alpha=0.0), rules.ema(decay=0.0)])
def test_a_mean_without_memory_is_the_last_norm(rule):
    norms = np.float32([1e4] * 30 + [1e-4] * 30)
    assert replay(rule, norms).outcomes.mean[-1] == np.float32(1e-4)


def test_what_a_rule_closes_over_is_read_anew():
    limit = 2.0

    def make(max_norm):
        return rules.at_most(rules.fixed(limit), max_norm)

    fired = [int(sweep(make, [1.0, 10.0], max_norm=[9.0])[1].summary["num_fired"][0])]
    limit = 50.0
    fired.append(int(sweep(make, [1.0, 10.0], max_norm=[9.0])[1].summary["num_fired"][0]))
    assert fired == [1, 0]


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
        (lambda: sweep(rules.zscore, [1.0], z_thresh=[2.0, -1.0]), "z_thresh must be a number > 0, got -1.0"),
        (lambda: sweep(rules.percentile, [1.0], window=[5, 6]), "window can't be swept"),
        (lambda: replay(zclip_jax.zclip(), [1.0]), "rule must be a Rule such as rules.zscore()"),
        (lambda: sweep(zclip_jax.zclip, [1.0], z_thresh=[2.0]), "rule must be a Rule such as rules.zscore()"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
