"""`transplant`: optimizer state from one chain into another."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from zclip_jax import clip_by_rule, rules, skip_by_rule, transplant, zclip

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


def test_a_wrapper_of_the_same_kind_goes_over_whole():
    for make in (
        lambda: optax.contrib.schedule_free_adamw(1e-2),
        lambda: optax.inject_hyperparams(optax.adam)(1e-3),
        lambda: skip_by_rule(optax.chain(zclip(), optax.adam(1e-3)), rules.sigma_skip()),
    ):
        old = after(make(), steps=3)
        state, report = transplant(old, make().init(PARAMS))
        assert_same(state, old)
        assert report.fresh == report.dropped == ()


def test_the_arrays_of_a_wrapper_go_over_where_they_fit():
    old = after(optax.MultiSteps(optax.adam(1e-3), 4), steps=3)
    state, report = transplant(old, optax.MultiSteps(optax.chain(zclip(), optax.adam(1e-3)), 4).init(PARAMS))
    assert int(state.mini_step) == 3
    assert_same(state.acc_grads, old.acc_grads)
    assert_same(state.inner_opt_state[1], old.inner_opt_state)
    assert report.dropped == ()


def test_a_clip_state_goes_to_the_same_rule_not_to_the_first():
    old = after(optax.chain(zclip(), optax.adam(1e-3)))
    new = skip_by_rule(optax.chain(zclip(), optax.adam(1e-3)), rules.sigma_skip())
    state, _ = transplant(old, new.init(PARAMS))
    assert_same(state.inner_state, old)
    assert int(state.clip_state.num_steps) == 0


def test_logarithms_are_not_taken_for_norms():
    old = after(clip_by_rule(rules.zscore()))
    fresh = clip_by_rule(rules.in_log_space(rules.zscore())).init(PARAMS)
    state, report = transplant(old, fresh)
    assert_same(state.rule_state, fresh.rule_state)
    assert "only its totals" in report.fresh[0]


def test_parameters_in_a_named_tuple():
    class Params(NamedTuple):
        w: jax.Array

    params = Params(jnp.ones(3))
    tx = optax.adam(1e-3)
    _, old = tx.update(params, tx.init(params), params)
    state, report = transplant(old, optax.chain(zclip(), tx).init(params))
    assert_same(state[1], old)
    assert report.carried == ("1/0 ScaleByAdamState",)
