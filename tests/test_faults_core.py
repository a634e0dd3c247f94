"""Faults 1 to 16 of the first version, a test or more each: its input, and the value now. `pytest -s` prints them."""

import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.cases import fast_jit, in_mesh, zscore_oracle
from zclip_jax import (
    Decision,
    Rule,
    clip_by_rule,
    decide,
    group_names,
    metrics,
    rules,
    skip_by_rule,
    transplant,
    unscale,
    zclip,
)
from zclip_jax._numerics import INT32_MAX

ONE = jnp.ones(1)


def tell(number, what, value):
    print(f"fault {number}: {what}: {value}")


def outside(code):
    """What a program of its own prints: without the tests' type checks, and before any device is there."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def drive(tx, norms, state=None, params=ONE, **extra_args):
    """The last update and state after gradients of these norms."""
    state = tx.init(params) if state is None else state
    update = fast_jit(tx.update)
    for norm in norms:
        updates, state = update(jnp.full(1, norm, jnp.float32), state, params, **extra_args)
    return updates, state


def test_1_a_skipped_step_advances_only_what_schedules_read():
    inner = optax.chain(zclip(max_grad_norm=None, warmup_steps=6), optax.sgd(1.0))
    tx = skip_by_rule(inner, rules.fixed(10.0), advance_counts=True)
    updates, state = drive(tx, [1.0, 100.0, 100.0, 100.0, 100.0, 2.0, 2.0, 2.0, 3.0])
    seen = state.inner_state[0].rule_state
    now = float(seen.mean), int(seen.num_norms), float(updates[0])
    tell(1, "mean, num_norms, last update", now)
    assert now == (2.0, 5, -3.0)

    rate = 0.1
    updates, state = drive(
        skip_by_rule(optax.adam(rate), rules.fixed(10.0), advance_counts=True), [99.0] * 20 + [1.0]
    )
    tell(1, "first update of Adam after 20 skipped steps, in learning rates", float(-updates[0] / rate))
    np.testing.assert_allclose(updates[0], -rate, rtol=1e-4)


def test_1_a_predicate_names_the_counts_that_go_on():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)
    _, state = drive(skip_by_rule(adam, rules.fixed(10.0), advance_counts=True), [1.0, 99.0, 99.0])
    assert int(state.inner_state.count) == 3
    assert int(state.inner_state.inner_state[0].count) == 1
    assert float(state.inner_state.hyperparams["learning_rate"]) == 0.5

    def is_adams(path):
        return path[-1] == jax.tree_util.GetAttrKey("count")

    _, state = drive(skip_by_rule(optax.adam(0.1), rules.fixed(10.0), advance_counts=is_adams), [1.0, 99.0])
    assert int(state.inner_state[0].count) == 2


@pytest.mark.parametrize(
    "rule",
    [
        rules.percentile(window=4),
        rules.window_zscore(window=4, warmup_steps=4),
        rules.sigma_skip(window=4, warmup_steps=4),
        rules.zscore(robust_warmup=True, warmup_steps=6),
    ],
    ids=["percentile", "window_zscore", "sigma_skip", "robust_warmup"],
)
def test_2_a_state_of_numpy_arrays_goes_on(rule):
    tx, norms = clip_by_rule(rule), [1.0, 1.1, 0.9, 1.0, 1.2]
    want, _ = drive(tx, [*norms, 5.0])
    _, state = drive(tx, norms)
    updates, after = tx.update(jnp.full(1, 5.0), pickle.loads(pickle.dumps(jax.device_get(state))))
    tell(2, "update after the state was NumPy arrays", float(updates[0]))
    np.testing.assert_allclose(updates, want, rtol=1e-6)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(after))


def test_3_transplant_takes_every_state():
    def bare(state):
        return optax.GradientTransformation(
            lambda params: state, lambda updates, state, params=None: (updates, state)
        )

    for odd in (jnp.ones(3), {"a": jnp.ones(2)}, (jnp.ones(1), jnp.zeros(2))):
        old = optax.chain(bare(odd), optax.adam(0.1))
        _, old_state = drive(old, [1.0])
        state, report = transplant(old_state, optax.chain(bare(odd), zclip(), optax.adam(0.1)).init(ONE))
        tell(3, f"carried beside {jax.tree.map(jnp.shape, odd)}", report.carried)
        assert int(state[2][0].count) == 1
        jax.tree.map(np.testing.assert_array_equal, state[0], odd)

    _, old_state = drive(zclip(max_grad_norm=1.0), [1.0] * 30)
    state, _ = transplant(old_state, zclip(max_grad_norm=optax.constant_schedule(1.0)).init(ONE))
    kept = jax.tree.leaves(state.rule_state, is_leaf=lambda x: hasattr(x, "mean"))[-1]
    tell(3, "norms known after a number became a schedule", int(kept.num_norms))
    assert int(kept.num_norms) == 30


def test_4_a_stacked_layer_axis_split_over_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("layers",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    tx = clip_by_rule(rules.fixed(1.0), granularity="leaf", stacked=lambda path: path[0].key == "blocks")
    grads = {"blocks": jnp.arange(16.0).reshape(8, 2), "head": jnp.asarray([3.0, 4.0])}
    want, _ = tx.update(grads, tx.init(grads))
    with in_mesh(mesh):
        split = jax.device_put(
            grads,
            {
                "blocks": NamedSharding(mesh, PartitionSpec("layers")),
                "head": NamedSharding(mesh, PartitionSpec()),
            },
        )
        updates, state = jax.jit(tx.update)(split, jax.jit(tx.init)(split))
    tell(4, "norms of the layers", state.last.grad_norm.tolist())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, want)


def test_5_no_factory_touches_a_device():
    code = """if True:
        import jax, optax
        from jax._src import xla_bridge
        from zclip_jax import clip_by_rule, levelclip, rules, skip_by_rule, zclip
        names = "ema zscore level percentile window_zscore sigma_skip adagc gradient_stabilizer".split()
        made = [getattr(rules, name)() for name in names]
        made += [rules.fixed(1.0), rules.at_most(made[0], 1.0), rules.bounded(made[0], 0.1, 1.0)]
        made += [rules.loss_aware(made[0]), rules.in_log_space(made[1])]
        clips = [clip_by_rule(rule, granularity="leaf", prior_norms=[[1.0]]) for rule in made]
        clips += [zclip(), levelclip(), zclip(z_thresh=optax.constant_schedule(2.0))]
        clips += [skip_by_rule(optax.adam(1e-3), made[0])]
        print(len(made), len(clips), xla_bridge.backends_are_initialized())
        """
    out = outside(code)
    tell(5, "rules made, transformations made, a device touched", out.strip())
    assert out.split() == ["13", "17", "False"]

    made = []
    jax.jit(lambda x: made.append(rules.ema()) or x)(1.0)
    assert not bool(decide(made[0], 1.0, made[0].init())[0].fired)


def test_6_names_are_no_identity():
    attn = {"attn": dict.fromkeys(("query", "key", "value"), ONE)}
    tell(6, "names", group_names(attn))
    assert group_names(attn) == ("attn/key", "attn/query", "attn/value")
    slashed = {"a/b": jnp.asarray([3.0]), "a": {"b": jnp.asarray([4.0])}}
    tx = clip_by_rule(rules.fixed(10.0), granularity="leaf")
    _, state = tx.update(slashed, tx.init(slashed))
    tell(6, "norms", dict(zip(group_names(slashed), state.last.grad_norm.tolist(), strict=True)))
    assert sorted(state.last.grad_norm.tolist()) == [3.0, 4.0]
    assert len(set(group_names(slashed))) == 2


def test_7_debug_nans():
    with jax.debug_nans(True):
        for rule in (rules.loss_aware(rules.fixed(1.0)), rules.adagc(), rules.zscore()):
            tx = clip_by_rule(rule)
            updates, state = tx.update(jnp.full(1, 2.0), tx.init(ONE), value=1.0)
            tell(7, "update under jax_debug_nans", float(updates[0]))
            assert not any(bool(jnp.isnan(x).any()) for x in jax.tree.leaves(state))


def test_8_strict_promotion_and_no_transfers():
    with jax.numpy_dtype_promotion("strict"):
        grads = unscale(jnp.asarray([1024.0, 2048.0], jnp.float16), 2.0**10)
    tell(8, "unscaled under strict promotion", grads)
    np.testing.assert_array_equal(grads, [1.0, 2.0])
    _, state = drive(zclip(), [2.0])
    with jax.transfer_guard("disallow"):
        logged = metrics(state)
    tell(8, "capped_rate with transfers disallowed", float(logged["zclip/capped_rate"]))
    assert float(logged["zclip/capped_rate"]) == 1.0


def test_9_any_extra_argument_passes():
    _, state = drive(zclip(), [2.0], norm=1.0, rule=2.0, global_norm=3.0)
    tell(9, "norm seen beside norm=, rule= and global_norm=", float(state.last.grad_norm))
    assert float(state.last.grad_norm) == 2.0
    tx = skip_by_rule(optax.sgd(1.0), rules.zscore())
    tx.update(ONE, tx.init(ONE), ONE, norm=1.0, rule=2.0, global_norm=3.0)


def test_10_counts_stay_at_their_largest():
    tx = clip_by_rule(rules.zscore(warmup_steps=4))
    _, state = drive(tx, [1.0, 1.1, 0.9, 1.0])
    full = jax.tree.map(lambda x: jnp.full_like(x, INT32_MAX) if x.dtype == jnp.int32 else x, state)
    full = full.replace(
        spike_run=state.spike_run, rule_state=full.rule_state.replace(spike_run=state.rule_state.spike_run)
    )
    _, state = drive(tx, [9.0], full)
    now = int(state.num_steps), int(state.rule_state.num_norms), bool(state.last.fired)
    tell(10, "num_steps, num_norms and fired after 2**31 - 1 norms", now)
    assert now == (INT32_MAX, INT32_MAX, True)


def test_11_a_nan_threshold_and_a_complex_zero():
    def update(norm, state, **extra_args):
        return Decision(threshold=jnp.nan, fired=False), state

    outcome, _ = decide(rules.at_most(Rule(lambda: (), update), 1.0), 4.0, ())
    now = float(outcome.clip_scale), bool(outcome.bound), bool(outcome.capped)
    tell(11, "scale, bound and capped below a NaN threshold", now)
    assert now == (0.25, False, True)

    params = jnp.asarray([complex(1.0, -0.0)])
    tx = skip_by_rule(optax.sgd(1.0), rules.fixed(1.0))
    updates, _ = jax.jit(tx.update)(jnp.asarray([3.0 + 4.0j]), tx.init(params), params)
    kept = optax.apply_updates(params, updates)
    tell(11, "imaginary part of a skipped parameter", kept[0].imag)
    assert np.signbit(np.asarray(kept.imag)[0])


def test_12_a_loss_that_comes_late_or_is_missing():
    norms = 1 + 0.01 * np.random.default_rng(0).standard_normal(200)
    rule = rules.sigma_skip()
    step = jax.jit(lambda norm, state, **loss: decide(rule, norm, state, **loss))
    state, fired = rule.init(), 0
    for i, norm in enumerate(norms):
        outcome, state = step(norm, state, **({"value": 3.0 + 0.01 * (i % 7)} if i >= 140 else {}))
        fired += bool(outcome.fired)
    tell(12, "good steps called spikes after the loss begins at step 140", fired)
    assert fired == 0


WRONG = {
    "zclip(patience=float('inf'))": "patience must be an integer >= 1 or None, got inf",
    "zclip(alpha='0.9')": "alpha must be a number in [0, 1), got '0.9'",
    "zclip(z_thresh=[2.0])": "z_thresh must be a number > 0, got [2.0]",
    "zclip(strategy=['max'])": "strategy must be one of 'reciprocal', 'max', 'mean', got ['max']",
    "zclip(observe_only='no')": "observe_only must be True or False, got 'no'",
    "zclip(robust_warmup=1)": "robust_warmup must be True or False, got 1",
    "zclip(robust_warmup=True, warmup_steps=2_000_000_000)": "warmup_steps must be at most 10,000,000",
    "zclip(prior_norms=['a'])": "prior_norms must be numbers, one-dimensional, got ['a']",
    "zclip(granularity=3)": "granularity must be 'global', 'leaf' or a function of a leaf's key path, got 3",
    "zclip(axis_name=3)": "axis_name must be a string, a tuple of strings or None, got 3",
    "optax.inject_hyperparams(zclip)(granularity=lambda path: 1.0).init(1.0)": "unless static_args names its",
    "levelclip(multiple=0.5)": "multiple must be a number > 1, got 0.5",
    "clip_by_rule(rules.zscore)": "rule must be a Rule such as rules.zscore(), got <function zscore",
    "rules.at_most(rules.zscore, 1.0)": "rule must be a Rule such as rules.zscore(), got <function zscore",
    "rules.percentile(window=10**9)": "window must be at most 10,000,000",
    "rules.percentile(window=True)": "window must be an integer >= 1, got True",
    "skip_by_rule(rules.sigma_skip(), rules.sigma_skip())": "inner must be an optax.GradientTransformation, got",
    "skip_by_rule(optax.sgd(1.0), rules.fixed(1.0), advance_counts=1)": "advance_counts must be True, False or a",
}


def test_13_errors_name_argument_value_and_what_is_accepted():
    code = f"""if True:
        import optax
        from zclip_jax import *
        for wrong in {list(WRONG)!r}:
            try:
                eval(wrong)
                print("no error")
            except ValueError as error:
                print(str(error).replace(chr(10), " "))
        """
    errors = outside(code).splitlines()
    for (wrong, expected), error in zip(WRONG.items(), errors, strict=True):
        tell(13, wrong, error)
        assert expected in error


def test_14_a_norm_where_alpha_stands_is_not_silent():
    with pytest.warns(UserWarning, match=r"alpha=0.5.*write zclip\(max_grad_norm=0.5\)") as told:
        zclip(0.5)
    tell(14, "zclip(0.5) warns", told[0].message)
    with pytest.raises(ValueError, match=r"alpha must be a number in \[0, 1\), got 1.0"):
        zclip(1.0)


def test_15_a_leafs_scale_costs_the_compiler_no_kernel_of_its_own():
    """Kernels that read another place of an array are others; `tests.benchmarks.overhead` has the time."""
    grads = {f"w{i}": jnp.ones((2, 2)) for i in range(300)}
    tx = clip_by_rule(rules.fixed(1.0), granularity="leaf")
    text = jax.jit(tx.update).lower(grads, tx.init(grads)).compile().as_text()
    slices = set(re.findall(r"slice=\{\[(\d+):(\d+)\]\}", text))
    places = {start for start, end in slices if int(end) == int(start) + 1}
    tell(15, "places that the scales of 300 leaves are read from", len(places))
    assert len(places) == 16


def test_16_a_norm_of_zero_is_no_sample():
    """Where the published rule, which absorbs it, fires on row 25, allowing 1.09905."""
    norms = [0.0, 1.0] * 12 + [0.0, 3.0]
    assert round(zscore_oracle(norms)[25], 5) == 1.09905
    for tx in (zclip(max_grad_norm=None), zclip(max_grad_norm=None, patience=None)):
        _, state = drive(tx, norms)
        tell(16, "norms absorbed, and fired", (int(state.rule_state.num_norms), int(state.num_fired)))
        assert (int(state.rule_state.num_norms), int(state.num_fired)) == (13, 0)
    assert "zero norms leave the statistics alone" in zclip.__doc__
