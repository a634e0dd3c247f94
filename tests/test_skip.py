"""`skip_by_rule`: a bad step leaves parameters and inner state bit for bit as they were."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from zclip_jax import clip_by_rule, metrics, rules, skip_by_rule, zclip

PARAMS = {"w": jnp.asarray([[0.5, -0.0], [0.0, 2.0]]), "b": jnp.asarray([-0.0, 1.0])}


def grads(scale, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype), PARAMS)


def sha256(tree):
    digest = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()


INNER = {
    "adamw": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: contrib.muon(1e-3),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2),
    "clip and adam": lambda: optax.chain(zclip(), optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("bad", ["nan", "inf", "large"])
def test_a_bad_step_changes_nothing(name, bad):
    tx = skip_by_rule(INNER[name](), rules.fixed(100.0))

    @jax.jit
    def step(params, state, g):
        updates, state = tx.update(g, state, params, value=jnp.asarray(1.0))
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for i in range(3):
        params, state = step(params, state, grads(1.0, i))
    poison = grads(1e4)
    if bad != "large":
        poison["b"] = poison["b"].at[0].set(float(bad))
    before = sha256(params), sha256(state.inner_state)
    assert before[0] != sha256(PARAMS)
    params, state = step(params, state, poison)
    assert (sha256(params), sha256(state.inner_state)) == before
    after = step(params, state, grads(1.0, 7))
    assert sha256(after[0]) != before[0]
    logged = metrics(state)
    assert int(logged[next(key for key in logged if key.endswith("num_skipped"))]) == 1


def test_negative_zeros_survive():
    """-0.0 plus 0.0 would be 0.0: also the sign of a zero stays."""
    tx = skip_by_rule(optax.sgd(1.0), rules.fixed(1.0))
    updates, _ = tx.update(grads(100.0), tx.init(PARAMS), PARAMS)
    assert sha256(optax.apply_updates(PARAMS, updates)) == sha256(PARAMS)


def test_equals_the_run_without_the_bad_steps():
    """Schedules, moments and counts go on as if the step had not been."""
    inner = optax.adamw(optax.linear_schedule(1e-1, 1e-3, 20))
    tx = skip_by_rule(inner, rules.fixed(100.0))
    params, state = PARAMS, tx.init(PARAMS)
    want, want_state = PARAMS, inner.init(PARAMS)
    for i in range(10):
        bad = i in (2, 3, 7)
        g = grads(jnp.nan if i == 2 else 1e5 if bad else 1.0, i)
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        if not bad:
            updates, want_state = inner.update(g, want_state, want)
            want = optax.apply_updates(want, updates)
    assert sha256(params) == sha256(want)
    assert sha256(state.inner_state) == sha256(want_state)
    logged = metrics(state)
    assert int(logged["zclip/num_skipped"]) == 3
    assert int(logged["zclip/longest_skip_run"]) == 2
    assert int(logged["zclip/num_nonfinite"]) == 1
    assert int(logged["zclip/num_fired"]) == 2


def test_the_counts_of_schedules_may_advance():
    """Adam's count stays with its moments."""
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    tx = skip_by_rule(optax.adam(schedule), rules.fixed(100.0), advance_counts=True)
    state = tx.init(PARAMS)
    _, state = tx.update(grads(1.0), state, PARAMS)
    moments = sha256(state.inner_state[0].mu)
    _, state = tx.update(grads(jnp.nan), state, PARAMS)
    assert sha256(state.inner_state[0].mu) == moments
    assert [int(x.count) for x in state.inner_state] == [1, 2]


def test_alarm():
    tx = skip_by_rule(optax.sgd(1.0), rules.fixed(1.0), max_consecutive=3)
    state, alarms = tx.init(PARAMS), []
    for scale in [100.0] * 4 + [1e-3] + [100.0] * 2:
        updates, state = tx.update(grads(scale), state, PARAMS)
        alarms.append(bool(metrics(state)["zclip/alarm"]))
        if scale == 100.0:
            assert not any(jnp.any(x != 0) for x in jax.tree.leaves(updates))
    assert alarms == [False, False, True, True, False, False, False]


def test_skip_that_is_one():
    """Case 20: 1.0, then NaN: Adam's count, mu, nu and the parameters stay [levanter 973]"""
    tx = skip_by_rule(optax.chain(zclip(), optax.adam(0.1)), rules.sigma_skip())
    params = jnp.ones(1)
    updates, state = tx.update(jnp.ones(1), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    adam = state.inner_state[1][0]
    updates, after = tx.update(jnp.full(1, jnp.nan), state, params)
    assert sha256(after.inner_state[1][0]) == sha256(adam)
    assert int(after.inner_state[1][0].count) == 1
    assert float(optax.apply_updates(params, updates)[0]) == float(params[0])
    keys = {key.rpartition("/")[0] for key in metrics(after)}
    assert len(keys) == 2


def test_a_spike_of_the_loss_skips():
    tx = skip_by_rule(optax.sgd(1.0), rules.sigma_skip(warmup_steps=8))
    state = tx.init(PARAMS)
    for i in range(10):
        _, state = tx.update(grads(1.0), state, PARAMS, value=jnp.asarray(2.0 + 0.01 * (i % 3)))
    _, spiked = tx.update(grads(1.0), state, PARAMS, value=jnp.asarray(9.0))
    _, broken = tx.update(grads(1.0), state, PARAMS, value=jnp.asarray(jnp.nan))
    assert int(state.num_skipped) == 0
    assert int(spiked.num_skipped) == int(broken.num_skipped) == 1


def test_one_compilation_scan_and_donation():
    tx = skip_by_rule(optax.adam(1e-2), rules.zscore(warmup_steps=3))
    traces = []

    def step(params, state, scale):
        traces.append(1)
        updates, state = tx.update(jax.tree.map(lambda x: x * scale, grads(1.0)), state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    for scale in [1.0, 1.1, 0.9, 1.0, 50.0, jnp.nan, 1.0]:
        params, state = jitted(params, state, jnp.float32(scale))
    assert len(traces) == 1
    assert int(state.num_skipped) == 2
    (last, _), _ = jax.lax.scan(lambda c, s: (step(*c, s), None), (params, state), jnp.ones(3))
    assert jax.tree.structure(last) == jax.tree.structure(params)


def test_bad_arguments():
    with pytest.raises(ValueError, match="max_consecutive must be an integer >= 1, got 0"):
        skip_by_rule(optax.sgd(1.0), rules.fixed(1.0), max_consecutive=0)
    with pytest.raises(ValueError, match=r"inner must be an optax.GradientTransformation, got 1"):
        skip_by_rule(1, rules.fixed(1.0))
    tx, other = skip_by_rule(optax.sgd(1.0), rules.fixed(1.0)), clip_by_rule(rules.fixed(1.0)).init(PARAMS)
    with pytest.raises(ValueError, match="must be a SkipState, got a ClipState"):
        tx.update(PARAMS, other, PARAMS)


def test_keys_of_the_metrics():
    tx = skip_by_rule(optax.chain(zclip(), optax.adam(1e-3)), rules.sigma_skip())
    logged = metrics(tx.init(PARAMS))
    assert {"zclip/alarm", "zclip/num_skipped", "zclip/inner_state/0/grad_norm"} <= set(logged)


def test_the_loss_reaches_the_inside_of_multi_steps():
    inner = optax.MultiSteps(optax.chain(clip_by_rule(rules.loss_aware(rules.fixed(1.0))), optax.sgd(1.0)), 2)
    tx = skip_by_rule(inner, rules.fixed(100.0))
    _, state = tx.update(grads(1.0), tx.init(PARAMS), PARAMS, value=jnp.asarray(1.0))
    assert int(state.num_skipped) == 0
