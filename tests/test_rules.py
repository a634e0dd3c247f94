"""Every rule of `cases.RULES`: its oracle, and the contract that all rules share."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.cases import LOSSES, RULES, TRACES, WRAPPERS, fast_jit
from zclip_jax import clip_by_rule, decide, metrics

each_rule = pytest.mark.parametrize("case", RULES, ids=[case.name for case in RULES])

# One setting of each rule, and the one with a buffer of its own: the contract costs a compilation a test.
ONE_OF_A_KIND = [*{case.make: case for case in RULES}.values(), RULES[7]]
each_kind = pytest.mark.parametrize("case", ONE_OF_A_KIND, ids=[case.name for case in ONE_OF_A_KIND])


@functools.cache
def compiled(rule):
    """One program for all norms of a length that the rule is run over."""

    def step(state, inputs):
        norm, loss = inputs
        return decide(rule, norm, state, value=loss)[::-1]

    return fast_jit(lambda state, inputs: jax.lax.scan(step, state, inputs))


def run(rule, norms, losses=LOSSES):
    """All outcomes of `rule` over `norms`, stacked, and the last state."""
    dtype = jnp.result_type(float)
    inputs = jnp.asarray(norms, dtype), jnp.asarray(losses[: len(norms)], dtype)
    state, outcomes = compiled(rule)(rule.init(), inputs)
    return outcomes, state


def gradients(norm, dtype=jnp.float32):
    """Two leaves whose joint norm is `norm`."""
    return {"a": jnp.asarray([0.6, 0.0], dtype) * norm, "b": jnp.asarray(0.8, dtype) * norm}


def spec(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree), jax.tree.structure(tree)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@functools.cache
def rule_of(name):
    """The rule of a case, the same each time, so that it is compiled once."""
    return next(case for case in RULES if case.name == name)()


@each_rule
@pytest.mark.parametrize("trace", TRACES)
def test_oracle(case, trace, x64, strict):
    norms = TRACES[trace]
    outcomes, _ = run(rule_of(case.name), norms)
    allowed = case.allowed(norms)
    np.testing.assert_allclose(outcomes.threshold, allowed, rtol=1e-9)
    scale = allowed / norms if case.raises else np.minimum(1, allowed / norms)
    np.testing.assert_allclose(outcomes.clip_scale, scale, rtol=1e-9)


@each_rule
def test_a_rule_fires_above_its_trigger_and_nowhere_else(case, x64):
    """On the norms themselves, and on others in their place; losses say nothing here."""

    def step(state, norm):
        outcome, new_state = decide(rule, norm, state, value=2.0)
        trigger = jnp.where(jnp.isfinite(outcome.trigger), outcome.trigger, 1e15)
        others = [decide(rule, trigger * part, state, value=2.0)[0] for part in (1 - 1e-6, 1 + 1e-6)]
        return new_state, (outcome, [other.fired for other in others], [other.trigger for other in others])

    rule = case()
    scan = fast_jit(lambda norms: jax.lax.scan(step, rule.init(), norms)[1])
    for norms in TRACES.values():
        outcome, (below, above), triggers = scan(jnp.asarray(norms))
        clear = np.abs(norms / outcome.trigger - 1) > 1e-9  # of rounding
        np.testing.assert_array_equal(outcome.fired[clear], (norms > outcome.trigger)[clear])
        assert not np.any(below)
        np.testing.assert_array_equal(above, np.isfinite(outcome.trigger))
        for other in triggers:  # no norm moves its own trigger
            np.testing.assert_array_equal(other, outcome.trigger)


@each_kind
def test_state_keeps_structure_shapes_and_types(case, strict):
    rule = case()
    state = rule.init()
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    for norm in [1.0, np.float64(2.0), 3, jnp.bfloat16(1.5), jnp.nan]:
        _, new_state = decide(rule, norm, state, value=1.0)
        assert spec(new_state) == spec(state)


@each_kind
def test_state_keeps_its_types_under_x64(case, x64, strict):
    rule = case()
    state = rule.init()
    assert all(x.dtype != jnp.float32 for x in jax.tree.leaves(state))
    for norm in [jnp.float32(1.0), jnp.float64(2.0)]:
        outcome, new_state = decide(rule, norm, state, value=1.0)
        assert outcome.clip_scale.dtype == jnp.float64
        assert spec(new_state) == spec(state)


@each_kind
def test_jit_eager_and_scan_agree(case, strict):
    rule, norms = case(), TRACES["spikes"][25:66].astype(np.float32)
    scanned, last = run(rule, norms)
    jitted = jax.jit(functools.partial(decide, rule))
    state_eager = state_jit = rule.init()
    # The same to float32 rounding: compiled, a product and a sum may be rounded once, together.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for i, norm in enumerate(norms):
        loss = np.float32(LOSSES[i])
        eager, state_eager = decide(rule, norm, state_eager, value=loss)
        compiled, state_jit = jitted(norm, state_jit, value=loss)
        jax.tree.map(close, eager, compiled)
        jax.tree.map(close, jax.tree.map(lambda x, i=i: x[i], scanned), compiled)
    jax.tree.map(close, last, state_jit)


@each_kind
def test_vmap_is_a_loop(case, strict):
    rule = case()
    batch = np.stack([TRACES["steady"], TRACES["spikes"], TRACES["decay"]]).astype(np.float32)
    together = jax.vmap(lambda norms: run(rule, norms)[0])(jnp.asarray(batch))
    for i, norms in enumerate(batch):
        alone, _ = run(rule, norms)
        np.testing.assert_array_equal(together.fired[i], alone.fired)
        np.testing.assert_allclose(together.clip_scale[i], alone.clip_scale, rtol=3e-6)


@each_kind
def test_bad_norms_leave_the_state_alone(case):
    rule, norms = case(), TRACES["spikes"][:150].astype(np.float32)
    want, _ = run(rule, norms)
    bad = [(i, x) for i in [0, 3, 24, 25, 61, 140] for x in [np.nan, np.inf, -np.inf]]
    traces = np.stack([np.insert(norms, i, x) for i, x in bad])
    losses = np.stack([np.insert(LOSSES, i, np.nan) for i, _ in bad])
    outcomes, states = jax.vmap(lambda n, losses: run(rule, n, losses))(traces, losses)
    clean = jax.vmap(lambda n: run(rule, n))(np.stack([norms] * len(bad)))
    assert_same(states, clean[1])
    for row, (i, _) in enumerate(bad):
        got = jax.tree.map(lambda x, row=row: x[row], outcomes)
        assert got.nonfinite[i]
        assert got.clip_scale[i] == 0
        assert not (got.fired | got.bound | got.capped)[i]
        np.testing.assert_array_equal(np.delete(got.fired, i), want.fired)


@each_kind
def test_a_zero_norm_is_no_sample(case, strict):
    rule = case()
    _, state = run(rule, TRACES["steady"][:40])
    outcome, after = decide(rule, 0.0, state, value=1.0)
    assert_same(after, state)
    assert float(outcome.clip_scale) == 1.0


@each_kind
def test_unknown_extra_arguments_are_ignored(case, strict):
    tx = clip_by_rule(case())
    grads = gradients(2.0)
    want = tx.update(grads, tx.init(grads), value=jnp.asarray(1.0))
    got = tx.update(grads, tx.init(grads), grads, value=jnp.asarray(1.0), another=object())
    assert_same(got, want)


@each_kind
def test_one_compilation_with_donation(case):
    tx = optax.chain(clip_by_rule(case()), optax.adam(1e-3))
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, norm):
        traces.append(1)
        updates, opt_state = tx.update(gradients(norm), opt_state, params, value=norm)
        return optax.apply_updates(params, updates), opt_state

    params = gradients(1.0)
    opt_state = tx.init(params)
    for norm in TRACES["spikes"][:50]:
        params, opt_state = step(params, opt_state, jnp.float32(norm))
    assert len(traces) == 1
    assert int(metrics(opt_state)["zclip/num_steps"]) == 50


@each_kind
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_low_precision_gradients(case, dtype, strict):
    tx = clip_by_rule(case())
    state = tx.init(gradients(1.0, dtype))
    update = jax.jit(tx.update)
    norms = [0.5] * 30 + [100.0]
    for norm in norms:
        grads = gradients(dtype(norm), dtype)
        updates, state = update(grads, state, value=jnp.float32(1.0))
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    true_norm = np.sqrt(sum(np.sum(np.square(np.float64(x))) for x in jax.tree.leaves(grads)))
    logged = metrics(state)
    np.testing.assert_allclose(logged["zclip/grad_norm"], true_norm, rtol=1e-6)
    scale = float(logged["zclip/clip_scale"])
    assert scale < 1
    for got, grad in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(got, jnp.float32(scale * np.float32(grad)).astype(dtype))


@each_kind
def test_multi_steps_takes_one_sample_per_applied_update(case):
    inner = clip_by_rule(case())
    tx = optax.MultiSteps(inner, every_k_schedule=2)
    params = gradients(1.0)
    state, want_state = tx.init(params), inner.init(params)
    update, want_update = fast_jit(tx.update), fast_jit(inner.update)
    for norm in TRACES["spikes"][:40]:
        grads = gradients(jnp.float32(norm))
        want, want_state = want_update(grads, want_state, value=norm)
        for _ in range(2):
            updates, state = update(grads, state, params, value=norm)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), updates, want)
    assert int(metrics(state)["zclip/num_steps"]) == 40


@each_kind
def test_inject_hyperparams(case):
    @functools.wraps(case.make)
    def factory(*args, **kwargs):
        return clip_by_rule(case.make(*args, **kwargs))

    static = [name for name in inspect.signature(case.make).parameters if name == "window"]
    if "robust_warmup" in case.kwargs:
        static.append("warmup_steps")
    tx = optax.inject_hyperparams(factory, static_args=static)(**case.kwargs)
    direct = clip_by_rule(case())
    params = gradients(1.0)
    state, want_state = tx.init(params), direct.init(params)
    update, want_update = fast_jit(tx.update), fast_jit(direct.update)
    for norm in TRACES["spikes"][:200]:
        grads = gradients(jnp.float32(norm))
        updates, state = update(grads, state, params, value=norm)
        want, want_state = want_update(grads, want_state, params, value=norm)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), updates, want)


@each_kind
@pytest.mark.parametrize("mapped", ["shard_map", pytest.param("pmap", marks=pytest.mark.slow)])
def test_eight_devices_decide_as_one(case, mapped):
    """A gradient split over eight devices, under both ways of mapping."""
    grads = np.random.default_rng(0).standard_normal((40, 8, 4)).astype(np.float32) / 6
    grads[30] *= 20
    tx = clip_by_rule(case(), axis_name="x" if mapped == "pmap" else None)

    def steps(tx, grads):
        def step(state, inputs):
            g, loss = inputs
            updates, state = tx.update({"w": g}, state, value=loss)
            return state, (updates["w"], state.last)

        losses = jnp.asarray(LOSSES[: len(grads)], jnp.float32)
        return jax.lax.scan(step, tx.init({"w": grads[0]}), (grads, losses))[1]

    want, last = fast_jit(functools.partial(steps, clip_by_rule(case())))(grads)
    if mapped == "pmap":
        got, got_last = jax.pmap(functools.partial(steps, tx), "x", in_axes=1, out_axes=(1, 0))(grads)
        got_last = jax.tree.map(lambda x: x[0], got_last)
    else:
        mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,), devices=jax.devices()[:8])
        split = P(None, "x")
        together = jax.shard_map(
            functools.partial(steps, tx), mesh=mesh, in_specs=split, out_specs=(split, P())
        )
        got, got_last = fast_jit(together)(grads)
    np.testing.assert_array_equal(got_last.fired, last.fired)
    np.testing.assert_allclose(got_last.clip_scale, last.clip_scale, rtol=2e-5)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_rule_in_every_wrapper(wrapper):
    """State of the same types after as before, the same decisions as alone, metrics readable."""
    grads = [gradients(jnp.float32(norm)) for norm in TRACES["spikes"][58:61]]

    def steps(tx, losses):
        state = tx.init(grads[0])
        before = spec(state)
        for g, loss in zip(grads, losses, strict=True):
            _, state = tx.update(g, state, g, value=loss)
        assert spec(state) == before
        return metrics(state)

    losses = [jnp.float32(loss) for loss in LOSSES[: len(grads)]]
    for case in ONE_OF_A_KIND:
        got = fast_jit(lambda losses, case=case: steps(WRAPPERS[wrapper](clip_by_rule(case())), losses))(
            losses
        )
        want = fast_jit(lambda losses, case=case: steps(clip_by_rule(case()), losses))(losses)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
        assert int(got["zclip/num_steps"]) == len(grads)
