"""`transplant`: optimizer state from one chain into another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zclip_jax import clip_by_rule, rules, transplant, zclip

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2)}
GRADS = {"w": jnp.asarray([0.1, 0.2, 0.3]), "b": jnp.asarray([0.4, 0.5])}
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 100)


def after(tx, steps=5):
    state = tx.init(PARAMS)
    for i in range(steps):
        grads = jax.tree.map(lambda x, i=i: x * (1 + 0.1 * i), GRADS)
        _, state = tx.update(grads, state, PARAMS)
    return state


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_adding_zclip():
    old = after(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)))
    new = optax.chain(zclip(), optax.adamw(SCHEDULE))
    state, report = transplant(old, new.init(PARAMS))
    assert_same(state[1], old[1])
    assert_same(state[0], new.init(PARAMS)[0])
    assert [name.split()[1] for name in report.carried] == ["ScaleByAdamState", "ScaleByScheduleState"]
    assert report.fresh == ("0 ClipState: the old chain has none",)
    assert report.dropped == ()


def test_removing_zclip():
    old = after(optax.chain(zclip(), optax.adamw(SCHEDULE)))
    new = optax.adamw(SCHEDULE)
    state, report = transplant(old, new.init(PARAMS))
    assert_same(state, old[1])
    assert report.dropped == ("0 ClipState",)


def test_the_same_rule_goes_on():
    """Numbers may change, statistics stay: the run decides as if it had always been so."""
    old = after(optax.chain(zclip(), optax.adam(1e-3)))
    new = optax.named_chain(("adam", optax.adam(1e-3)), ("clip", zclip(z_thresh=2.0, max_grad_norm=None)))
    state, report = transplant(old, new.init(PARAMS))
    assert_same(state["clip"], old[0])
    assert_same(state["adam"], old[1])
    assert len(report.carried) == 2


def test_another_rule_keeps_the_totals():
    old = after(clip_by_rule(rules.percentile(10.0, window=10)))
    for rule in (rules.percentile(10.0, window=20), rules.zscore()):
        fresh = clip_by_rule(rule).init(PARAMS)
        state, report = transplant(old, fresh)
        assert int(state.num_steps) == 5
        assert int(state.num_fired) == int(old.num_fired) > 0
        assert_same(state.rule_state, fresh.rule_state)
        assert "only its totals are carried" in report.fresh[0]


def test_into_wrappers_and_by_order():
    old = after(optax.chain(optax.adam(1e-3), optax.scale_by_schedule(SCHEDULE), optax.adam(1e-2)))
    new = optax.MultiSteps(optax.chain(zclip(), optax.adam(1e-3), optax.masked(optax.adam(1e-2), True)), 2)
    state, report = transplant(old, new.init(PARAMS))
    assert_same(state.inner_opt_state[1][0], old[0][0])
    assert_same(state.inner_opt_state[2].inner_state[0].mu, old[2][0].mu)
    assert report.dropped == ("1 ScaleByScheduleState",)
    assert int(state.mini_step) == 0


def test_another_model_stays_fresh():
    old = after(optax.adam(1e-3))
    fresh = optax.adam(1e-3).init({"w": jnp.ones(4)})
    state, report = transplant(old, fresh)
    assert_same(state, fresh)
    assert report.carried == ()
    assert report.fresh == ("0 ScaleByAdamState: the old one holds other arrays",)
