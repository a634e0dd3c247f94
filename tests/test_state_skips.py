"""What a skipped step leaves alone, and what losses that start, stop or are NaN in mid run do not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from tests.cases import LOSSES, TRACES, fast_jit
from tests.transformations import ONE_OF_A_KIND, assert_same, bits, mark_slow
from zclip_jax import Decision, Rule, clip_by_rule, decide, metrics, rules, skip_by_rule, zclip

pytestmark = pytest.mark.slow


def decay(step):
    return 1.0 - jnp.asarray(step, jnp.float32) / 64


def injected(**schedules):
    return optax.inject_hyperparams(optax.adam)(**schedules)


INNER = {
    "sgd": lambda: optax.sgd(1.0, momentum=0.9),
    "sgd with a schedule": lambda: optax.sgd(decay),
    "adam": lambda: optax.adam(1e-2),
    "adam with a schedule": lambda: optax.adam(decay),
    "adafactor": lambda: optax.adafactor(1e-2),
    "lion": lambda: optax.lion(decay),
    "rmsprop": lambda: optax.rmsprop(decay),
    "yogi": lambda: optax.yogi(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "lbfgs-like memory": lambda: optax.scale_by_lbfgs(memory_size=2),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(1.0), contrib.reduce_on_plateau(patience=1)),
    "noise": lambda: optax.add_noise(0.1, 0.55, 0),
    "apply_every": lambda: optax.chain(optax.adam(1e-2), optax.apply_every(3)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(1.0)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(decay), 3),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "apply_if_finite around": lambda: optax.conditionally_transform(
        optax.sgd(1.0), lambda step, **_: step > 2
    ),
    "inject_hyperparams": lambda: injected(learning_rate=decay, b1=0.9),
    "inject around clips": lambda: optax.inject_hyperparams(
        lambda rate: optax.chain(clip_by_rule(rules.percentile(50.0, 4)), optax.adam(rate))
    )(rate=decay),
    "clips": lambda: optax.chain(
        zclip(warmup_steps=3), clip_by_rule(rules.window_zscore(4, warmup_steps=2)), optax.adam(decay)
    ),
    "clip by leaf": lambda: optax.chain(
        clip_by_rule(rules.sigma_skip(6.0, 4, 2), granularity="leaf"), optax.sgd(decay)
    ),
    "skip": lambda: skip_by_rule(optax.adam(decay), rules.level()),
    "partition": lambda: optax.partition(
        {"a": optax.adam(decay), "b": optax.sgd(decay)}, {"w": "a", "z": "b"}
    ),
}
PARAMS = {"w": jnp.asarray([0.5, -0.0, 0.0]), "z": jnp.asarray([-1.0, 0.0])}
SCHEDULES = ("ScaleByScheduleState", "InjectHyperparamsState", "InjectStatefulHyperparamsState")


def grads(size, seed):
    rng = np.random.default_rng(seed)
    return {key: jnp.asarray(size * rng.standard_normal(x.shape) / 3, x.dtype) for key, x in PARAMS.items()}


def read_by_schedules(state, inside=False):
    """For each leaf whether it is what a schedule of optax reads or has read: a count, or the values it gave."""
    if type(state).__name__ in SCHEDULES:
        return [
            flag
            for key, x in state._asdict().items()
            for flag in read_by_schedules(x, key in ("count", "hyperparams", "hyperparams_states"))
        ]
    children, _ = jax.tree.flatten(state, is_leaf=lambda x: x is not state)
    if len(children) == 1 and children[0] is state:
        return [inside]
    return [flag for child in children for flag in read_by_schedules(child, inside)]


QUICK = ("adam with a schedule", "noise", "MultiSteps", "inject around clips", "skip")


def inner_and_advance():
    """Those of the quick part advance counts; that all is held otherwise, test_skip.py checks too."""
    for name in INNER:
        for advance in (True, False):
            marks = () if advance and name in QUICK else pytest.mark.slow
            yield pytest.param(
                name, advance, id=f"{name}-{'advance_counts' if advance else 'hold'}", marks=marks
            )


@pytest.mark.parametrize(("name", "advance"), list(inner_and_advance()))
def test_a_skipped_step_leaves_alone_what_no_schedule_reads(name, advance):
    """Whatever integers are inside: counts of moments, of windows, of gradients collected, keys of noise."""
    tx = skip_by_rule(INNER[name](), rules.fixed(100.0), advance_counts=advance)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for i in range(4):
        params, state = step(params, state, grads(1.0, i))
    for bad in (1e4, jnp.nan, jnp.inf):
        after_params, after = step(params, state, grads(bad, 9))
        assert bits(after_params) == bits(params)
        flags = read_by_schedules(state.inner_state) if advance else [False] * len(bits(state.inner_state))
        for (path, old), new, free in zip(
            jax.tree_util.tree_leaves_with_path(state.inner_state),
            jax.tree.leaves(after.inner_state),
            flags,
            strict=True,
        ):
            assert free or bits(old) == bits(new), jax.tree_util.keystr(path)


RATES = {
    "sgd": lambda: optax.sgd(decay),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=decay),
    "inject around sgd": lambda: optax.inject_hyperparams(lambda rate: optax.chain(optax.sgd(rate)))(
        rate=decay
    ),
    "scale_by_schedule": lambda: optax.chain(optax.scale_by_schedule(decay), optax.scale(-1.0)),
    "two in a chain": lambda: optax.chain(optax.scale_by_schedule(lambda step: 1.0), optax.sgd(decay)),
    "behind a clip": lambda: optax.chain(zclip(max_grad_norm=None), optax.sgd(decay)),
    "masked": lambda: optax.masked(optax.sgd(decay), True),
}


@pytest.mark.parametrize("advance", [False, True], ids=["hold", "advance_counts"])
@mark_slow("name", RATES, ["sgd", "inject_hyperparams", "masked"])
def test_the_learning_rate_behind_skipped_steps(name, advance):
    """By the training step where counts advance, else by the number of steps applied."""
    tx = skip_by_rule(RATES[name](), rules.fixed(100.0), advance_counts=advance)
    state, applied = tx.init(jnp.zeros(1)), 0
    update = fast_jit(tx.update)
    for step, size in enumerate([1.0, 1e3, 1e3, np.nan, 2.0, 1e3, 3.0, 1.0]):
        updates, state = update(jnp.full(1, size), state, jnp.zeros(1))
        if size < 100:
            rate = 1 - (step if advance else applied) / 64
            np.testing.assert_allclose(updates, -size * rate, rtol=1e-6)
            applied += 1


def test_advancing_counts_feed_no_statistics():
    """1, 100 four times, 2, 2, 2, 3: the mean of what was applied, in zclip and in a window, and its last update."""
    clips = {
        "zclip": zclip(max_grad_norm=None, warmup_steps=6),
        "window": clip_by_rule(rules.window_zscore(8, warmup_steps=6)),
        "percentile": clip_by_rule(rules.percentile(100.0, 8)),
    }
    for name, clip in clips.items():
        tx = skip_by_rule(optax.chain(clip, optax.sgd(1.0)), rules.fixed(10.0), advance_counts=True)
        state = tx.init(jnp.zeros(1))
        for size in [1.0, 100.0, 100.0, 100.0, 100.0, 2.0, 2.0, 2.0, 3.0]:
            updates, state = tx.update(jnp.full(1, size), state, jnp.zeros(1))
        rule_state = state.inner_state[0].rule_state
        assert int(rule_state.num_norms) == 5, name
        np.testing.assert_allclose(updates, -3.0, rtol=1e-6, err_msg=name)
        if name == "zclip":
            np.testing.assert_allclose(rule_state.mean, 2.0, rtol=1e-6)
        else:
            np.testing.assert_array_equal(np.sort(rule_state.norms), [0, 0, 0, 1, 2, 2, 2, 3])


@pytest.mark.parametrize("make", [optax.adam, optax.nadam, optax.lion, optax.radam])
def test_the_first_update_after_skipped_steps_is_a_first_update(make):
    tx, alone = skip_by_rule(make(1.0), rules.fixed(10.0), advance_counts=True), make(1.0)
    state, g = tx.init(jnp.zeros(2)), jnp.asarray([1.0, -2.0])
    update = fast_jit(tx.update)
    for _ in range(20):
        _, state = update(100 * g, state, jnp.zeros(2))
    got, _ = update(g, state, jnp.zeros(2))
    want, _ = alone.update(g, alone.init(jnp.zeros(2)), jnp.zeros(2))
    np.testing.assert_allclose(got, want, rtol=1e-6)


ZEROS = np.array([complex(a, b) for a in (0.0, -0.0, 1.5) for b in (0.0, -0.0, -2.5)], np.complex64)
LEAVES = {
    "float32": np.float32([0.0, -0.0, 1.0, 2e-38, -1e30]),
    "float16": np.float16([0.0, -0.0, 1.0, 6e-8]),
    "bfloat16": jnp.asarray([0.0, -0.0, 1.0, 2e38], jnp.bfloat16),
    "complex64": ZEROS,
    "a float": np.float32(-0.0),
    "a complex": np.complex64(complex(-0.0, -0.0)),
    "int32": np.int32([3, -7]),
    "none": np.zeros((0, 2), np.float32),
}


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
    "inner", [optax.identity, lambda: optax.sgd(1.0, momentum=0.9)], ids=["identity", "sgd"]
)
def test_parameters_stay_bit_for_bit(inner, jit):
    """Signs of zeros in real and imaginary parts, integers."""
    params = jax.tree.map(jnp.asarray, LEAVES) | {"bad": jnp.asarray([-0.0, 1.0])}
    tx = skip_by_rule(inner(), rules.fixed(100.0))
    update, state = jit(tx.update), tx.init(params)
    for bad in (1e3, np.nan, np.inf):
        poison = jax.tree.map(lambda x: jnp.full_like(x, 5), params) | {"bad": jnp.asarray([1.0, bad])}
        updates, state = update(poison, state, params)
        after = optax.apply_updates(params, updates)
        changed = {name for name, x in after.items() if bits(x) != bits(params[name])}
        assert not changed
        assert {name: x.dtype for name, x in after.items()} == {name: x.dtype for name, x in params.items()}
    assert int(state.num_skipped) == 3


def given(threshold, fired=False):
    """A rule that says the same at each step."""
    return Rule(
        lambda: (), lambda norm, state, **_: (Decision(threshold=threshold, z_score=0.0, fired=fired), state)
    )


WRAPPERS = {
    "at_most": lambda rule: rules.at_most(rule, 1.0),
    "at_most twice": lambda rule: rules.at_most(rules.at_most(rule, 1.0), 2.0),
    "at_most of bounded": lambda rule: rules.at_most(rules.bounded(rule, 0.5, 8.0), 1.0),
    "bounded": lambda rule: rules.bounded(rule, 0.5, 1.0),
    "bounded at_most": lambda rule: rules.bounded(rules.at_most(rule, 1.0), 0.5, 8.0),
    "loss_aware": lambda rule: rules.loss_aware(rules.at_most(rule, 1.0)),
    "capped loss_aware": lambda rule: rules.at_most(rules.loss_aware(rule), 1.0),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("threshold", [np.nan, np.inf, -1.0, 0.0, 0.7, 2.0, 1e30])
def test_what_is_scaled_is_reported(wrapper, threshold):
    """A step that is scaled down is bound or capped, one that is neither passes; NaN is no limit."""
    rule = WRAPPERS[wrapper](given(threshold))
    state = rule.init()
    for norm in (0.1, 0.6, 0.9, 1.0, 1.5, 4.0, 1e18):
        outcome, state = decide(rule, norm, state, value=2.0)
        assert (float(outcome.clip_scale) < 1) == bool(outcome.bound | outcome.capped), norm
        assert not np.isnan(float(outcome.threshold))
        free, _ = decide(WRAPPERS[wrapper](given(np.inf)), norm, state, value=2.0)
        if np.isnan(threshold):
            assert_same(jax.device_get(outcome), jax.device_get(free))


RULE = rules.sigma_skip(6.0, 32, 16)
with_loss = jax.jit(lambda norm, loss, state: decide(RULE, norm, state, value=loss))
without = jax.jit(functools.partial(decide, RULE))


def run(norms, losses):
    """Outcomes of the steps; a loss that is None is not passed."""
    state, seen = RULE.init(), []
    for norm, loss in zip(norms, losses, strict=True):
        outcome, state = without(norm, state) if loss is None else with_loss(norm, loss, state)
        seen.append(outcome)
    seen = jax.device_get(seen)
    return jax.tree.map(lambda *x: np.stack(x), *seen)


STEADY = (2.0 + 0.05 * np.random.default_rng(3).standard_normal(300)).astype(np.float32)
NORMS = np.float32(TRACES["spikes"])
PATTERNS = {
    "starts": lambda i: i >= 140,
    "starts in the warm-up": lambda i: i >= 10,
    "stops": lambda i: i < 120,
    "stops and starts": lambda i: i < 80 or i >= 200,
    "every other": lambda i: i % 2 == 0,
    "every tenth": lambda i: i % 10 == 0,
    "once": lambda i: i == 150,
    "at random": lambda i: np.random.default_rng(i).random() < 0.3,
}


@mark_slow("pattern", PATTERNS, ["starts", "stops and starts", "every tenth"])
@mark_slow("far", [0.0, 1e3, -50.0], [1e3])
def test_losses_now_and_then_change_no_decision_on_norms(pattern, far):
    """Steady losses, near zero or far from it, given at some steps only, fire nothing that norms alone do not."""
    want = run(NORMS, [None] * 300)
    losses = [STEADY[i] + np.float32(far) if PATTERNS[pattern](i) else None for i in range(300)]
    got = run(NORMS, losses)
    np.testing.assert_array_equal(got.fired, want.fired)
    assert_same(got, want)
    assert 3 <= want.fired.sum() <= 6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_no_number_changes_no_later_decision(bad):
    """The step itself may fire; limits and statistics are those of norms, and no other loss becomes a spike."""
    want = run(NORMS, list(STEADY))
    for steps in ([5], [100], range(90, 95), range(3, 300, 7), range(60, 130)):
        losses = STEADY.copy()
        losses[list(steps)] = bad
        got = run(NORMS, list(losses))
        rest = np.setdiff1d(np.arange(300), list(steps))
        np.testing.assert_array_equal(got.fired[rest], want.fired[rest])
        for key in ("threshold", "z_score", "mean", "std", "clip_scale"):
            np.testing.assert_array_equal(getattr(got, key), getattr(want, key), err_msg=key)


@pytest.mark.parametrize("start", [0, 100, 140])
def test_a_spike_of_the_loss_is_seen_however_late_losses_come(start):
    """After as many losses as the warm-up asks for, and not before there are two."""
    losses = [None] * start + list(STEADY[start:])
    losses[start + 1] = np.float32(50.0)  # of one loss nothing is known
    losses[start + 60] = np.float32(9.0)
    got = run(TRACES["steady"].astype(np.float32), losses)
    assert got.fired[start + 60]
    assert not got.fired[start + 1]


@mark_slow("name", [case.name for case in ONE_OF_A_KIND], ["percentile", "sigma_skip", "level"])
def test_loss_aware_leaves_the_statistics_of_its_rule_alone(name):
    """Whatever the losses are; and a step whose loss is no number has the threshold of the rule."""
    case = next(case for case in ONE_OF_A_KIND if case.name == name)
    losses = LOSSES[:120].astype(np.float32)
    losses[[0, 30, 31, 80]] = [np.nan, np.nan, np.inf, -np.inf]
    norms = NORMS[:120]
    alone, rule = case(), rules.loss_aware(case(), form="step")

    @jax.jit
    def both(norms, losses):
        def step(states, x):
            norm, loss = x
            one, first = decide(alone, norm, states[0], value=loss)
            two, second = decide(rule, norm, states[1], value=loss)
            return (first, second), (one, two)

        return jax.lax.scan(step, (alone.init(), rule.init()), (norms, losses))

    (want_state, state), (want, got) = both(norms, losses)
    assert_same(state.rule_state, want_state)
    bad = ~np.isfinite(losses)
    assert np.all((got.threshold <= want.threshold) | np.isnan(want.threshold))
    np.testing.assert_array_equal(got.threshold[bad], want.threshold[bad])
    np.testing.assert_array_equal(got.fired[bad], want.fired[bad])
    assert float(state.last_loss) == losses[-1]


def test_metrics_of_a_skip_say_what_happened():
    """Counts of skipped steps are those of steps without an update, with counts advancing or not."""
    for advance in (False, True):
        tx = skip_by_rule(optax.sgd(decay), rules.fixed(10.0), advance_counts=advance)
        state, skipped = tx.init(jnp.zeros(1)), 0
        for size in [1.0, 50.0, np.nan, 2.0, 50.0]:
            updates, state = tx.update(jnp.full(1, size), state, jnp.zeros(1))
            skipped += not np.any(updates)
            assert int(metrics(state)["zclip/num_skipped"]) == skipped
