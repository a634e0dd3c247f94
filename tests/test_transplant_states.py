"""`transplant` of states without a type, with schedules, of another rule, and as NumPy or numbers."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.cases import fast_jit
from tests.test_transplant_chains import CHAINS, SCHEDULE, check, custom, trained
from zclip_jax import Rule, clip_by_rule, rules, transplant, zclip

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2)}
PLAIN = {
    "array": lambda params: jnp.zeros(3),
    "number": lambda params: jnp.zeros((), jnp.int32),
    "dict": lambda params: {"mean": jnp.zeros(3), "seen": jnp.zeros((), jnp.int32)},
    "tuple": lambda params: (jnp.zeros(3), jnp.zeros((), jnp.int32)),
    "list": lambda params: [jnp.zeros(3), jnp.zeros(3)],
    "tuple of dicts": lambda params: (params, params),
}


def run(tx, norms, state=None):
    """The state after gradients of these norms, and what was allowed at each."""
    update = fast_jit(optax.with_extra_args_support(tx).update)
    state, allowed = tx.init(PARAMS) if state is None else state, []
    for norm in norms:
        grads = {"w": jnp.asarray([norm, 0.0, 0.0]), "b": jnp.zeros(2)}
        updates, state = update(grads, state, PARAMS, value=2.0)
        allowed.append(np.asarray(updates["w"][0]))
    return state, np.asarray(allowed)


NORMS = 1 + 0.1 * np.sin(np.arange(60.0)) + 4 * (np.arange(60) % 13 == 12)


@pytest.mark.parametrize("plain", PLAIN)
def test_fault_3_a_state_of_plain_arrays(plain):
    """It was a RecursionError; the state goes over, and the report says by what."""
    tx = custom(PLAIN[plain])
    old = trained(optax.chain(tx, optax.adam(1e-3)))
    state, report = check(old, trained(optax.chain(zclip(), tx, optax.adam(1e-3))))
    jax.tree.map(np.testing.assert_array_equal, state[1:], old)
    assert report.carried[0].endswith(", by its shape, since it has no type")
    assert report.carried[1:] == ("2/0 ScaleByAdamState",)
    assert report.dropped == ()
    alone, report = check(trained(tx), trained(optax.chain(zclip(), tx)))
    jax.tree.map(np.testing.assert_array_equal, alone[1], trained(tx))
    assert report.fresh == ("0 ClipState: the old chain has none",)


def test_fault_3_a_schedule_in_place_of_a_number_keeps_the_statistics():
    old = zclip(max_grad_norm=1.0)
    new = zclip(max_grad_norm=optax.constant_schedule(1.0))
    before, _ = run(old, NORMS[:40])
    state, report = transplant(before, new.init(PARAMS))
    jax.tree.map(np.testing.assert_array_equal, state.rule_state.rule_state, before.rule_state)
    assert int(state.rule_state.num_updates) == int(state.num_steps) == 40
    assert report.carried == (
        "ClipState",
        "rule_state ScheduledState, at the norms seen so far",
        "rule_state/rule_state ZScoreState",
    )
    assert report.fresh == report.dropped == ()


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (optax.adam(1e-3), "got function at 'init'"),
        ("checkpoints/100", "got str$"),
        ({"opt": object()}, "got object at 'opt'"),
        ((np.asarray(["a"]),), "got ndarray at '0'"),
        (jax.ShapeDtypeStruct((), jnp.float32), "got ShapeDtypeStruct$"),
    ],
)
def test_an_error_says_what_to_pass(wrong, found):
    right = zclip().init(PARAMS)
    for args, name in [((wrong, right), "old_opt_state"), ((right, wrong), "new_opt_state")]:
        with pytest.raises(ValueError, match=found) as error:
            transplant(*args)
        assert str(error.value).startswith(f"{name} must be an optimizer state, such as tx.init")
        assert "\n" not in str(error.value)


SAME_RULES = {
    "zscore": (rules.zscore(), rules.zscore(z_thresh=optax.constant_schedule(2.5))),
    "at_most": (
        rules.at_most(rules.zscore(), 1.0),
        rules.at_most(rules.zscore(alpha=lambda _: 0.97), SCHEDULE),
    ),
    "bounded": (rules.bounded(rules.ema(), 0.1, 2.0), rules.bounded(rules.ema(), lambda step: 0.1, 2.0)),
    "loss_aware": (
        rules.loss_aware(rules.ema(), 0.0),
        rules.loss_aware(rules.ema(a=SCHEDULE), lambda _: 0.0),
    ),
    "level": (rules.level(), rules.at_most(rules.level(), lambda _: jnp.inf)),
    "percentile": (rules.percentile(window=8), rules.percentile(p=lambda _: 10.0, window=8)),
    "fixed": (rules.fixed(1.0), rules.fixed(SCHEDULE)),
}


@pytest.mark.parametrize("name", SAME_RULES)
def test_a_run_decides_as_if_numbers_had_always_been_schedules(name):
    """And back: what it allows after the change is what it had allowed without one."""
    numbers, schedules = (clip_by_rule(rule) for rule in SAME_RULES[name])
    norms = np.insert(NORMS, [5, 50], np.nan)
    whole, allowed = run(schedules, norms)
    for old, new in [(numbers, schedules), (schedules, numbers)]:
        before, first = run(old, norms[:30])
        state, _ = check(before, new.init(PARAMS))
        after, then = run(new, norms[30:], state)
        np.testing.assert_array_equal(np.append(first, then), allowed)
        assert after.num_steps == whole.num_steps
        if new is schedules:
            assert_equal(after, whole)


def test_a_schedule_goes_on_where_there_was_one():
    """Its own count is right also where the first norms were those of an earlier run, or zero."""
    settings = {"warmup_steps": 5, "prior_norms": np.ones(7)}
    ramp = optax.linear_schedule(10.0, 2.0, 50)
    old, _ = run(zclip(z_thresh=ramp, **settings), [1.0, 0.0, np.nan, 1.1])
    state, report = transplant(old, zclip(z_thresh=ramp, max_grad_norm=ramp, **settings).init(PARAMS))
    assert int(state.rule_state.num_updates) == int(state.rule_state.rule_state.num_updates) == 9
    assert report.fresh == report.dropped == ()
    old, _ = run(zclip(**settings), [1.0, np.nan, 1.1])
    state, _ = transplant(old, zclip(z_thresh=ramp, **settings).init(PARAMS))
    assert int(state.rule_state.num_updates) == 9
    old, _ = run(zclip(z_thresh=ramp), [1.0, 0.0, 1.1])
    state, _ = transplant(old, zclip(z_thresh=ramp, max_grad_norm=ramp).init(PARAMS))
    assert int(state.rule_state.num_updates) == int(state.rule_state.rule_state.num_updates) == 2
    state, report = transplant(state, zclip().init(PARAMS))
    assert report.dropped == ("rule_state ScheduledState", "rule_state/rule_state ScheduledState")


class Scaled(NamedTuple):
    rule_state: tuple


def scaled(rule):
    """A combinator of somebody else's: the rule sees ten times the norm."""

    def update(norm, state, /, **extra_args):
        decision, rule_state = rule.update(10 * norm, state.rule_state, **extra_args)
        return dataclasses.replace(decision, threshold=decision.threshold / 10), Scaled(rule_state)

    return Rule(init=lambda: Scaled(rule.init()), update=update)


@pytest.mark.parametrize("change", [rules.in_log_space, scaled])
def test_statistics_of_something_else_than_the_norm(change):
    inner = rules.zscore()
    for old, new in [(inner, change(inner)), (change(inner), rules.zscore(z_thresh=SCHEDULE))]:
        fresh = trained(clip_by_rule(new))
        state, report = check(trained(clip_by_rule(old)), fresh)
        assert state.rule_state is not fresh
        assert_equal(state.rule_state, fresh.rule_state)
        assert report.fresh == ("ClipState: the old one has other statistics, only its totals are carried",)
    old = trained(clip_by_rule(change(inner)))
    state, report = check(
        old, trained(clip_by_rule(rules.at_most(change(rules.zscore(z_thresh=SCHEDULE)), 1.0)))
    )
    assert state.rule_state.rule_state.rule_state.mean is old.rule_state.rule_state.mean
    assert report.fresh == report.dropped == ()


def test_another_rule_begins_anew_with_its_schedules():
    old, _ = run(zclip(z_thresh=SCHEDULE), NORMS[:10])
    fresh = clip_by_rule(rules.percentile(p=lambda step: 10.0, window=4)).init(PARAMS)
    state, report = check(old, fresh)
    assert_equal(state.rule_state, fresh.rule_state)
    assert int(state.num_steps) == 10
    assert report.carried == ()
    assert report.fresh == ("ClipState: the old one has other statistics, only its totals are carried",)
    assert report.dropped == ("rule_state ScheduledState", "rule_state/rule_state ZScoreState")


def test_a_rule_around_another_begins_alone():
    old, _ = run(clip_by_rule(rules.ema()), NORMS[:10])
    new = clip_by_rule(rules.loss_aware(rules.at_most(rules.ema(), SCHEDULE)))
    state, report = check(old, new.init(PARAMS))
    assert_equal(state.rule_state.rule_state.rule_state, old.rule_state)
    assert not state.rule_state.has_loss
    assert report.fresh == ("rule_state LossAwareState: the old rule has none",)


def test_statistics_go_with_the_totals_of_their_own_clip_state():
    tx = optax.chain(clip_by_rule(rules.ema()), zclip())
    old = trained(tx)
    state, report = check(
        old, trained(optax.chain(zclip(z_thresh=SCHEDULE), clip_by_rule(rules.ema(a=SCHEDULE))))
    )
    assert state[0].num_steps is old[1].num_steps
    assert state[0].rule_state.rule_state.mean is old[1].rule_state.mean
    assert state[1].num_steps is old[0].num_steps
    assert state[1].rule_state.rule_state.mean is old[0].rule_state.mean
    assert report.dropped == ()


def test_groups():
    """As many groups may be other ones, which the report says; not as many stay fresh."""
    old = trained(zclip(granularity="leaf"))
    state, report = check(old, trained(zclip(granularity=lambda path: str(path[0]), max_grad_norm=None)))
    assert state.rule_state.mean is old.rule_state.mean
    assert report.carried == ("ClipState, provided that its 2 groups are those of the old chain",)
    state, report = check(old, trained(zclip(granularity="leaf", max_grad_norm=SCHEDULE)))
    assert state.rule_state.num_updates.shape == (2,)
    for new in (zclip(), zclip(granularity=lambda path: "all")):
        fresh = trained(new)
        state, report = check(old, fresh)
        assert_equal(state, fresh)
        assert report.fresh == ("ClipState: the old one holds other arrays",)
        assert report.dropped == ("ClipState",)


def test_without_a_type_nothing_is_guessed():
    """Of two alike, one of which has gone, either may have stayed."""
    one, two = custom(PLAIN["array"]), custom(PLAIN["array"])
    old = trained(optax.chain(one, two, optax.adam(1e-3)))
    fresh = trained(optax.chain(zclip(), two, optax.adam(1e-3)))
    state, report = check(old, fresh)
    assert state[1] is fresh[1]
    assert report.fresh[1] == "1 float32[3]: not certain which of the old ones it is"
    assert report.dropped == ("0 float32[3]", "1 float32[3]")
    other = custom(lambda params: {"mean": jnp.zeros(3), "var": jnp.zeros((), jnp.int32)})
    fresh = trained(other)
    state, report = check(trained(custom(PLAIN["dict"])), fresh)
    assert_equal(state, fresh)
    # Half of a state is none: not a count without what it counts.
    fresh = trained(custom(lambda params: (jnp.zeros(4), jnp.zeros((), jnp.int32))))
    state, report = check(trained(custom(PLAIN["tuple"])), fresh)
    assert all(a is b for a, b in zip(state, fresh, strict=True))
    assert report == ((), ("tuple: the old one holds other arrays",), ("tuple",))


def test_what_fits_a_larger_state_whole_is_not_given_away():
    steps = optax.MultiSteps(optax.adam(1e-3), 4)
    old = trained(optax.chain(steps, optax.adam(1e-3)))
    state, report = check(old, trained(optax.chain(optax.adam(1e-3), steps)))
    assert state[0][0].mu["w"] is old[1][0].mu["w"]
    assert state[1].inner_opt_state[0].mu["w"] is old[0].inner_opt_state[0].mu["w"]
    assert report.carried == ("0/0 ScaleByAdamState", "1 MultiStepsState")


class ModelState(NamedTuple):
    w: jax.Array


def test_moments_do_not_cross():
    """A field of one state is none of another, also where parameters are of a class that is called a state."""
    params = ModelState(jnp.ones(3))
    for old, new in [
        (optax.adam(1e-3), optax.sgd(1e-3, momentum=0.9)),
        (optax.lion(1e-3), optax.adabelief(1e-3)),
    ]:
        fresh = new.init(params)
        state, report = transplant(old.init(params), fresh)
        assert all(a is b for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True))
        assert report.carried == ()


def test_a_label_of_a_partition_keeps_its_state():
    labels = {"w": "one", "b": "two"}
    make = lambda *names: optax.partition({name: optax.scale_by_schedule(SCHEDULE) for name in names}, labels)  # noqa: E731
    old, new = trained(make("one", "two", "other")), trained(make("another", "one", "two"))
    state, report = check(old, new)
    for label in ("one", "two"):
        assert state.inner_states[label].inner_state.count is old.inner_states[label].inner_state.count
    assert len(report.carried) == 3


@pytest.mark.parametrize("name", ["zclip, adam", "steps", "injected", "skip", "leaf", "array, adam"])
def test_restored_as_python_numbers_or_on_device(name):
    """A state read back from a file: numbers in place of scalars, and NumPy in place of JAX."""
    tx = CHAINS[name]
    old = trained(tx)
    numbers = jax.tree.map(lambda x: x.item() if x.ndim == 0 else x, old)
    for restored in (numbers, jax.tree.map(jnp.asarray, old)):
        state, report = transplant(restored, tx.init(PARAMS))
        assert_equal(state, old)
        assert report.fresh == report.dropped == ()
        for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(tx.init(PARAMS)), strict=True):
            assert isinstance(x, (jax.Array, np.ndarray))
            assert (x.shape, x.dtype) == (like.shape, like.dtype)


def test_no_buffer_stands_in_two_places():
    tx = optax.chain(zclip(), optax.adam(1e-3))
    zeros = jnp.zeros(())
    old = tx.init(zeros)
    old = (old[0], (old[1][0]._replace(mu=zeros, nu=zeros), old[1][1]))
    state, _ = transplant(old, tx.init(zeros))
    assert_equal(state, old)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)
    jax.jit(lambda state: jax.tree.map(lambda x: x, state), donate_argnums=0)(state)


def test_inside_jit_and_with_keys():
    tx = optax.chain(optax.add_noise(1.0, 0.5, key=jax.random.key(3)), zclip())
    old, _ = run(tx, NORMS[:3])
    new = optax.chain(zclip(max_grad_norm=SCHEDULE), optax.add_noise(1.0, 0.5, key=jax.random.key(0)))
    eager, _ = transplant(old, new.init(PARAMS))
    jitted = jax.jit(lambda old, new: transplant(old, new)[0])(old, new.init(PARAMS))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), eager, jitted)
    assert all(jax.tree.leaves(same._replace() if hasattr(same, "_replace") else same))
    assert int(eager[0].num_steps) == int(eager[1].count) == 3


def test_hyperparameters_in_a_state_are_told():
    old = trained(optax.inject_hyperparams(optax.adam)(1e-3))
    state, report = check(old, trained(optax.inject_hyperparams(optax.adam)(1e-4)))
    assert state.hyperparams["learning_rate"] is old.hyperparams["learning_rate"]
    assert report.carried == ("InjectStatefulHyperparamsState, with the old hyperparameters",)
