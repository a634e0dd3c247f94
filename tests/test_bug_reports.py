"""Small inputs that broke other clipping code, each with the right value; who met it in brackets.

The cases are numbered; 15, 21 and 22 are in test_checkpoint.py, 20 in test_skip.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.cases import fast_jit
from zclip_jax import clip_by_rule, decide, metrics, rules, zclip

SGD = functools.partial(optax.sgd, 1.0)


def fixed(max_norm=1.0, **kwargs):
    return clip_by_rule(rules.fixed(max_norm), **kwargs)


def feed(tx, norms, state=None):
    """Updates of one entry with the given norms; returns the last update and state."""
    update = fast_jit(tx.update)
    state = tx.init(jnp.zeros(1)) if state is None else state
    for norm in norms:
        updates, state = update(jnp.asarray([norm], jnp.float32), state, jnp.zeros(1))
    return updates, state


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_threshold_of_exactly_zero():
    """Case 1: 0/0 [optax 1752]"""
    for tx in (
        fixed(0.0),
        zclip(max_grad_norm=0.0),
        optax.inject_hyperparams(zclip)(max_grad_norm=optax.constant_schedule(0.0)),
    ):
        for grads in (jnp.zeros(3), jnp.ones(3)):
            updates, _ = tx.update(grads, tx.init(grads), grads)
            np.testing.assert_array_equal(updates, jnp.zeros(3))


def test_float16_squares_do_not_overflow():
    """Case 2: [burn 5699]"""
    grads = jnp.asarray([300.0], jnp.float16)
    updates, state = fixed().update(grads, fixed().init(grads))
    assert float(state.last.grad_norm) == 300.0
    np.testing.assert_array_equal(updates, jnp.asarray([1.0], jnp.float16))


def test_finite_gradients_whose_squares_overflow():
    """Case 3: [ferx-core 1112]"""
    _, before = feed(zclip(), np.full(40, 0.5))
    grads = jnp.asarray([3e19, 4e19], jnp.float32)
    updates, after = zclip().update(grads, before)
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert_same(after.rule_state, before.rule_state)
    logged = metrics(after)
    assert np.isinf(logged["zclip/grad_norm"])
    assert int(logged["zclip/num_nonfinite"]) == 1
    assert int(logged["zclip/num_capped"]) == int(logged["zclip/num_bound"]) == 0

    tiny = jnp.asarray([3e-23, 4e-23], jnp.float32)
    updates, _ = zclip().update(tiny, before)
    np.testing.assert_array_equal(updates, tiny)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinite_gradients(bad):
    """Case 4: [pytorch 46849, tensorflow 21363]"""
    tx = zclip(prior_norms=np.tile([0.9, 1.1], 100))
    state = tx.init(jnp.zeros(2))
    updates, after = tx.update(jnp.asarray([bad, 1.0]), state)
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert_same(after.rule_state, state.rule_state)
    assert int(metrics(after)["zclip/num_nonfinite"]) == 1


def test_nonfinite_propagate():
    tx = zclip(nonfinite="propagate")
    grads = {"f": jnp.asarray([jnp.inf, 1.0]), "c": jnp.asarray([2 + 1j])}
    updates, state = tx.update(grads, tx.init(grads))
    assert_same(updates, grads)
    assert_same(state.rule_state, tx.init(grads).rule_state)


def test_nan_does_not_poison_statistics():
    """Case 5: [mlx-lm 1658, icefall 1292]"""
    tx = zclip(max_grad_norm=None)
    _, before = feed(tx, np.ones(40))
    _, after = feed(tx, [np.nan], before)
    assert_same(after.rule_state, before.rule_state)
    updates, _ = feed(tx, [*np.ones(5), 10.0], after)
    np.testing.assert_allclose(updates, [1.0], rtol=1e-6)


def check_dtypes(grad_dtype):
    tx = zclip()
    grads = jnp.ones(3, grad_dtype)
    state = tx.init(grads)
    for _ in range(3):
        updates, new_state = tx.update(grads, state)
        assert updates.dtype == grad_dtype
        assert [x.dtype for x in jax.tree.leaves(new_state)] == [x.dtype for x in jax.tree.leaves(state)]
        state = new_state


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_without_x64(dtype, strict):
    """Case 6: [optax 1051, flax 924]"""
    check_dtypes(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_dtypes_with_x64(dtype, x64, strict):
    """Case 6: [optax 1051, flax 924]"""
    check_dtypes(dtype)


def test_bfloat16_in_multi_steps_and_as_a_scan_carry():
    """Case 7: [optax 377]"""
    tx = optax.MultiSteps(zclip(), 2)
    params = jnp.ones(4, jnp.bfloat16)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(params, state, params)
        return (optax.apply_updates(params, updates), state), updates.dtype.name

    (params, state), _ = jax.lax.scan(
        lambda carry, x: (step(carry, x)[0], None), (params, tx.init(params)), None, length=4
    )
    assert params.dtype == jnp.bfloat16
    assert int(metrics(state)["zclip/num_steps"]) == 2
    assert tx.update(params, state, params)[0].dtype == jnp.bfloat16


def test_no_weak_types_and_one_trace():
    """Case 8: [optax 1440]"""
    tx = zclip()
    state = tx.init(jnp.ones(2))
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    traces = []

    @jax.jit
    def update(grads, state):
        traces.append(1)
        return tx.update(grads, state)

    for _ in range(4):
        _, state = update(jnp.ones(2), state)
    assert len(traces) == 1


@pytest.mark.parametrize("kwargs", [{}, {"robust_warmup": True}, {"prior_norms": np.ones(30)}])
@pytest.mark.parametrize("jit_init", [False, True])
def test_donation_straight_from_init(kwargs, jit_init):
    """Case 9: [optax 1059]"""
    tx = optax.chain(zclip(**kwargs), optax.adam(1e-3))
    params = {"w": jnp.ones(3)}
    state = (jax.jit(tx.init) if jit_init else tx.init)(params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
    assert len(set(pointers)) == len(pointers)
    step = jax.jit(lambda p, s: tx.update(p, s, p), donate_argnums=(0, 1))
    for _ in range(3):
        params, state = step(params, state)


def test_threshold_is_mean_plus_k_std():
    """Case 10: Not k std alone [OLMo-core 43]"""
    rule = rules.zscore(z_thresh=6.0, strategy="max")
    state = rule.init()
    for norm in np.tile([99.0, 101.0], 200):
        _, state = decide(rule, norm, state)
    np.testing.assert_allclose([state.mean, jnp.sqrt(state.var)], [100.0, 1.0], rtol=0.02)
    fired = {norm: bool(decide(rule, norm, state)[0].fired) for norm in (107.0, 105.0, 50.0, 1.0)}
    assert fired == {107.0: True, 105.0: False, 50.0: False, 1.0: False}


@pytest.mark.parametrize(
    ("norm", "published", "floored"),
    [(1.00001, True, False), (1.000002, False, False), (10.0, True, True)],
)
def test_zero_variance_after_warmup(norm, published, floored, x64):
    """Case 11: Published: 2.5e-6 above a constant is a spike; a floor on the standard deviation ends that."""
    for rule, fires in (
        (rules.zscore(), published),
        (rules.zscore(min_rel_std=0.05), floored),
    ):
        state = rule.init()
        for _ in range(25):
            _, state = decide(rule, 1.0, state)
        outcome, _ = decide(rule, norm, state)
        assert bool(outcome.fired) == fires
    if norm == 10.0:
        outcome, _ = decide(rules.zscore(), norm, state)
        assert float(outcome.threshold) == 1.0


def test_frozen_parameters_do_not_count():
    """Case 12: [maxtext 5290, scenic 1102]"""
    grads = {"train": jnp.asarray([3.0, 4.0]), "frozen": jnp.asarray([100.0])}
    masked = optax.masked(fixed(), {"train": True, "frozen": False})
    partitioned = optax.partition(
        {"train": fixed(), "frozen": optax.set_to_zero()}, {"train": "train", "frozen": "frozen"}
    )
    for tx, frozen in ((masked, 100.0), (partitioned, 0.0)):
        updates, state = tx.update(grads, tx.init(grads), grads)
        assert float(metrics(state)["zclip/grad_norm"]) == 5.0
        np.testing.assert_allclose(updates["train"], [0.6, 0.8], rtol=1e-6)
        assert float(updates["frozen"][0]) == frozen


@pytest.mark.parametrize("grads", [{}, (), jnp.zeros((0, 3)), {"a": None}])
def test_empty_trees(grads):
    """Case 13: [optax 1065, Megatron 5529]"""
    tx = zclip()
    updates, state = tx.update(grads, tx.init(grads))
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    assert float(state.last.grad_norm) == 0.0
    assert int(state.rule_state.num_norms) == 0


def test_odd_leaves():
    """Case 14: [equinox 69]"""
    grads = {
        "int": jnp.asarray([100, 100], jnp.int8),
        "float": jnp.asarray([3.0, 0.0]),
        "float0": np.zeros(2, jax.dtypes.float0),
        "python": 4.0,
        "bool": True,
        "none": None,
        "key": jax.random.key(0),
    }
    updates, state = fixed().update(grads, fixed().init(grads))
    assert float(state.last.grad_norm) == 5.0
    for name in ("int", "float0", "bool", "key"):
        assert updates[name] is grads[name]
    np.testing.assert_allclose(updates["float"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(updates["python"], 0.8, rtol=1e-6)


def test_float0_gradients_of_integer_parameters():
    def loss(params):
        return jnp.sum(params["w"] * params["n"])

    params = {"w": jnp.asarray([3.0, 4.0]), "n": jnp.asarray([1, 1])}
    grads = jax.grad(loss, allow_int=True)(params)
    updates, _ = fixed().update(grads, fixed().init(params))
    assert updates["n"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(jnp.linalg.norm(updates["w"]), 1.0, rtol=1e-6)


def test_accumulation():
    """Case 16: One clipped update and one sample per applied step, inside MultiSteps [transformers 986, gpt-jax 2]"""
    params = jnp.zeros(2)
    grads = [jnp.asarray([2.0, 0.0]), jnp.asarray([0.0, 2.0])]

    def total(tx):
        state, moved = tx.init(params), jnp.zeros(2)
        for g in grads:
            updates, state = tx.update(g, state, params)
            moved = moved + updates
        return moved, state

    moved, state = total(optax.MultiSteps(optax.chain(zclip(), SGD()), 2))
    np.testing.assert_allclose(moved, [-0.70711, -0.70711], atol=1e-5)
    assert int(metrics(state)["zclip/num_steps"]) == 1
    moved, state = total(optax.chain(zclip(), optax.MultiSteps(SGD(), 2)))
    np.testing.assert_allclose(moved, [-0.5, -0.5], atol=1e-5)
    assert int(metrics(state)["zclip/num_steps"]) == 2


def test_sharded_norm():
    """Case 17: The root of the sum over all devices, not a mean of roots [Automodel 3816, DeepSpeed 8478]"""
    tx = fixed(axis_name="x")
    mapped = jax.pmap(lambda g: tx.update(g, tx.init(g))[1].last.grad_norm, "x")
    np.testing.assert_array_equal(mapped(jnp.asarray([3.0, 4.0, 0.0, 0.0])), np.full(4, 5.0))
    norms = mapped(jnp.sqrt(jnp.asarray([20.0, 100.0])))
    np.testing.assert_allclose(norms, np.full(2, np.sqrt(120)), rtol=1e-6)


def test_sharded_norm_in_shard_map():
    tx = fixed(axis_name="x")
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("x",), (auto,), devices=jax.devices()[:4])
    update = jax.shard_map(
        lambda g: tx.update(g, tx.init(g)), mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P())
    )
    updates, state = jax.jit(update)(jnp.asarray([3.0, 4.0, 0.0, 0.0]))
    assert float(state.last.grad_norm) == 5.0
    np.testing.assert_allclose(updates, [0.6, 0.8, 0.0, 0.0], rtol=1e-6)


def test_average_first_then_clip():
    """Case 18."""
    grads = jnp.asarray([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])

    def clip(g):
        return fixed().update(g, fixed().init(g))[0]

    right = jax.pmap(lambda g: clip(jax.lax.pmean(g, "x")), "x")(grads)
    wrong = jax.pmap(lambda g: jax.lax.pmean(clip(g), "x"), "x")(grads)
    np.testing.assert_allclose(right[0], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(wrong[0], [0.15, 0.2], rtol=1e-6)


def test_loss_scale_is_taken_out_first():
    """Case 19: An overflow under the old scale leaves the statistics as they were [Lightning 9330, flax 2547]"""
    tx = zclip()
    state = tx.init(jnp.zeros(2))
    grads = jnp.asarray([0.6, 0.8])
    _, once = tx.update(grads, state)
    for scale in (2.0**15, 2.0**14):
        _, state = tx.update((grads * scale) / scale, state)
    assert float(state.rule_state.mean) == pytest.approx(1.0)
    assert float(state.rule_state.var) == 0.0
    _, after = tx.update(jnp.full(2, jnp.inf), once)
    assert_same(after.rule_state, once.rule_state)


def test_state_bytes_are_constant():
    """Case 27: [autoclip 6]"""
    tx = zclip(robust_warmup=True)
    state = tx.init(jnp.zeros(1))

    def step(state, norm):
        return tx.update(norm[None], state)[1], None

    last, _ = jax.lax.scan(step, state, jnp.ones(100_000))
    assert int(last.num_steps) == 100_000
    assert sum(x.nbytes for x in jax.tree.leaves(last)) == sum(x.nbytes for x in jax.tree.leaves(state))


def test_injected_equals_direct():
    """Case 23: [optax 1532]"""
    norms = np.random.default_rng(0).lognormal(0.0, 0.3, 200)
    direct, injected = zclip(), optax.inject_hyperparams(zclip)()
    state, injected_state = direct.init(jnp.zeros(1)), injected.init(jnp.zeros(1))
    update, injected_update = jax.jit(direct.update), jax.jit(injected.update)
    for norm in norms:
        grads = jnp.asarray([norm], jnp.float32)
        want, state = update(grads, state, grads)
        got, injected_state = injected_update(grads, injected_state, grads)
        np.testing.assert_array_max_ulp(np.asarray(got), np.asarray(want), maxulp=1)


def test_lock_in():
    """Case 24: [Megatron 5394, senpai 978]"""
    norms = [*np.tile([0.9, 1.1], 60), *np.full(2000, 10.0)]
    fired = {}
    for patience in (None, 25):
        rule = rules.zscore(patience=patience)
        state, outcomes = jax.lax.scan(
            lambda s, n, rule=rule: decide(rule, n, s)[::-1], rule.init(), jnp.asarray(norms)
        )
        fired[patience] = np.asarray(outcomes.fired)[120:]
    assert fired[None].all()
    assert fired[25][:25].all()
    assert not fired[25][25 + 10 :].any()


def test_lock_in_published_mean():
    """From mean 1 and variance 0.01 the published rule absorbs next to nothing of two thousand tens."""
    rule = rules.zscore(patience=None)
    state = rule.init().replace(num_norms=jnp.int32(25), mean=jnp.float32(1.0), var=jnp.float32(0.01))
    state, outcomes = jax.lax.scan(lambda s, n: decide(rule, n, s)[::-1], state, jnp.full(2000, 10.0))
    assert np.asarray(outcomes.fired).all()
    np.testing.assert_allclose(state.mean, 1.00696, atol=1e-5)


def test_spike_in_warmup():
    """Case 25."""
    norms = np.ones(25)
    norms[12] = 100.0
    for kwargs, mean, std in (({}, 4.96, 19.40), ({"robust_warmup": True}, 1.0, 0.0)):
        _, state = feed(zclip(max_grad_norm=None, **kwargs), norms)
        np.testing.assert_allclose(state.rule_state.mean, mean, atol=1e-5)
        np.testing.assert_allclose(jnp.sqrt(state.rule_state.var), std, atol=5e-3)
    rule, (_, state) = rules.zscore(), feed(zclip(max_grad_norm=None), norms)
    assert not decide(rule, 53.4, state.rule_state)[0].fired
    assert decide(rule, 53.5, state.rule_state)[0].fired


def test_metrics_show_that_clipping_works():
    """Case 26: [DeepSpeed 7220, trl 3312]"""
    updates, state = feed(zclip(), [10.0])
    logged = metrics(state)
    assert float(logged["zclip/grad_norm"]) == 10.0
    assert float(updates[0]) == 1.0
    assert float(logged["zclip/threshold"]) == 1.0
    assert bool(logged["zclip/capped"])


def test_returned_arrays_have_the_reported_norm():
    """Case 28: [aprender 2112]"""
    tx = zclip(max_grad_norm=None)
    state = tx.init(jnp.zeros(2))
    direction = jnp.asarray([0.6, 0.8])
    for norm in np.random.default_rng(0).normal(1.0, 0.05, 40):
        _, state = tx.update(direction * norm, state)
    grads = jnp.asarray([30.0, 40.0])
    updates, state = tx.update(grads, state)
    assert bool(state.last.fired)
    norm = float(jnp.linalg.norm(updates))
    np.testing.assert_allclose(norm, state.last.threshold, rtol=1e-6)
    np.testing.assert_allclose(jnp.vdot(updates, grads) / (norm * 50), 1.0, rtol=1e-6)
