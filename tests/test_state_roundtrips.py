"""States that were saved, batched, carried over or counted to the end decide as if nothing had been."""

import functools
import math
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from tests.transformations import (
    COMPOSED,
    GRADS,
    LOSS,
    PARAMS,
    STEPS,
    STOPS,
    TRANSFORMATIONS,
    assert_same,
    clip_states,
    each,
    program,
    spec,
    whole_run,
)
from zclip_jax import clip_by_rule, levelclip, metrics, rules, skip_by_rule, transplant, zclip

pytestmark = pytest.mark.slow

QUICK = [t for t in TRANSFORMATIONS if not t.slow]
LAST = 2**31 - 1


def read_only(x):
    x = np.copy(x)
    x.flags.writeable = False
    return x


WAYS = {
    "read-only numpy": lambda state, like: jax.tree.map(read_only, state),
    "msgpack": lambda state, like: flax.serialization.from_bytes(like, flax.serialization.to_bytes(state)),
    "pickle": lambda state, like: pickle.loads(pickle.dumps(state)),
    "pickle of device arrays": lambda state, like: pickle.loads(pickle.dumps(jax.tree.map(jnp.array, state))),
}


def assert_same_decisions(seen, want):
    """Every decision and count is the same, floats to two units in the last place; updates, behind Adam, to a few.

    Between compiled and op by op: a compiled program may round a product and the sum that follows it once. Most
    rules agree to the bit; window_zscore is one unit off at times, gradient_stabilizer (powers, a root) two.
    """
    for (updates, logged), (want_updates, want_logged) in zip(seen, want, strict=True):
        assert spec((updates, logged)) == spec((want_updates, want_logged))
        for key, x in logged.items():
            if x.dtype.kind in "bi":
                np.testing.assert_array_equal(x, want_logged[key], err_msg=key)
            else:
                np.testing.assert_array_max_ulp(x, want_logged[key], 2)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6), updates, want_updates)


@each(TRANSFORMATIONS)
@pytest.mark.parametrize("stop", [pytest.param(STOPS[0], marks=pytest.mark.slow), STOPS[1]])
def test_a_numpy_state_goes_on(name, stop):
    """Compiled bit for bit as the uninterrupted run, which is the same program; and op by op."""
    state, want = whole_run(name).states[stop], whole_run(name).seen[stop:]
    _, seen = program(name).run(state, range(stop, stop + 8))
    assert_same(seen, want[:8])
    after, seen = program(name).run(state, range(stop, stop + 3), jit=False)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(clip_states(after)))
    assert spec(after) == spec(state)
    assert_same_decisions(seen, want[:3])


@each(QUICK)
@pytest.mark.parametrize("way", WAYS)
def test_a_saved_state_is_the_same(name, way):
    this, whole = program(name), whole_run(name)
    for stop in STOPS:
        restored = WAYS[way](whole.states[stop], this.tx.init(PARAMS))
        assert_same(restored, whole.states[stop])
    if name in COMPOSED:
        assert_same_decisions(this.run(restored, [stop], jit=False)[1], [whole.seen[stop]])


@pytest.fixture(scope="module")
def from_orbax(tmp_path_factory):
    """The states of all quick transformations in one checkpoint, restored."""
    path = tmp_path_factory.mktemp("orbax") / "states"
    saved = {f"{i}": whole_run(t.name).states for i, t in enumerate(QUICK)}
    saved = {i: {str(stop): state for stop, state in states.items()} for i, states in saved.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(path, jax.eval_shape(lambda: saved))
    return {t.name: restored[f"{i}"] for i, t in enumerate(QUICK)}


@each(QUICK)
def test_orbax(name, from_orbax):
    for stop in STOPS:
        restored = from_orbax[name][str(stop)]
        assert_same(restored, whole_run(name).states[stop])
        _, seen = program(name).run(restored, range(stop, stop + 8))
        assert_same(seen, whole_run(name).seen[stop : stop + 8])


@each(TRANSFORMATIONS)
def test_init_gives_every_leaf_a_buffer_of_its_own(name):
    """Else a donated state would be donated twice; and what `jit` gives is what eager code gives."""
    leaves = jax.tree.leaves(program(name).tx.init(PARAMS))
    assert len({x.unsafe_buffer_pointer() for x in leaves if x.size}) == len([x for x in leaves if x.size])
    assert spec(jax.eval_shape(program(name).tx.init, PARAMS)) == spec(program(name).tx.init(PARAMS))


@each(TRANSFORMATIONS)
def test_scan_carries_the_state(name):
    """Structure, shapes, dtypes and weak types of the state are those of `init`, or scan would refuse."""
    this = program(name)

    def steps(params, grads, losses):
        return jax.lax.scan(lambda state, x: this.eager(state, *x), this.tx.init(params), (grads, losses))

    series = jax.tree.map(lambda *x: np.stack(x), *GRADS)
    state, _ = jax.eval_shape(steps, PARAMS, series, LOSS)
    assert spec(state) == spec(this.tx.init(PARAMS))


BATCHED = ("zscore-True", "sigma_skip", "percentile by layer", "skip with counts", "zclip with schedules")


@each([t._replace(slow=t.name not in BATCHED) for t in TRANSFORMATIONS if "MultiSteps" not in t.name])
def test_a_batch_of_states_is_one_by_one(name):
    """Three runs that stand at different places, each at its next step."""
    this, whole, starts = program(name), whole_run(name), (*STOPS, STEPS)
    states = jax.tree.map(lambda *x: np.stack(x), *(whole.states[stop] for stop in starts))
    after = [12, 36, 6]
    grads = jax.tree.map(lambda *x: np.stack(x), *(GRADS[i] for i in after))
    together = jax.jit(jax.vmap(this.eager))(states, grads, LOSS[after])
    for row, (stop, i) in enumerate(zip(starts, after, strict=True)):
        alone = this.jitted(jax.tree.map(jnp.array, whole.states[stop]), GRADS[i], LOSS[i])
        got = jax.tree.map(lambda x, row=row: x[row], together)
        assert spec(got) == spec(alone)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
            if x.dtype.kind in "bi":
                np.testing.assert_array_equal(x, y)
            else:
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7)


def counting(state, number):
    """`state` with every count of ours at `number`; those of optax have other names."""

    def change(path, x):
        name = str(getattr(path[-1], "name", getattr(path[-1], "key", "")))
        ours = x.dtype == np.int32 and (name.startswith("num_") or name.endswith("_run"))
        return np.full_like(x, number) if ours else x

    return jax.tree_util.tree_map_with_path(change, state)


def windows(state):
    """The lengths of the buffers in a state, whose places go by the count."""
    return [x.shape[-1] for x in jax.tree.leaves(state) if x.ndim and x.shape[-1] > 3]


@each(TRANSFORMATIONS)
@pytest.mark.parametrize("before", [0, 3], ids=["at the last count", "three before it"])
def test_counters_stay_at_the_last_count(name, before):
    """From there on it decides as at a billion, the window at the same place; no count falls or turns negative."""
    state = whole_run(name).states[34]
    turn = math.lcm(*windows(state))
    mature = LAST - before - turn * (10**9 // turn)
    steps = [*range(34, 44), *range(28, 37), *range(28, 37)]
    last, seen = program(name).run(counting(state, LAST - before), steps)
    _, want = program(name).run(counting(state, mature), steps)
    for (updates, logged), (want_updates, want_logged) in zip(seen, want, strict=True):
        for key in want_logged:
            field = key.rpartition("/")[2]
            if field in ("num_steps",):
                assert np.all(logged[key] >= LAST - before)
            if logged[key].dtype.kind == "i":
                assert np.all(logged[key] >= 0), key
            elif not field.endswith("_rate"):
                np.testing.assert_allclose(logged[key], want_logged[key], rtol=1e-5, atol=1e-6, err_msg=key)
            else:
                assert np.all((logged[key] >= 0) & (logged[key] <= 1)), key
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, updates, want_updates)
    # A count with a sign may have gone below zero by steps, no count by wrapping.
    assert all(np.all(x >= -len(steps)) for x in jax.tree.leaves(last) if x.dtype == jnp.int32)
    totals = [x for key, x in seen[-1][1].items() if key.endswith("num_steps")]
    assert any(np.all(x == LAST) for x in totals)


@each(QUICK)
def test_transplant_into_the_same_chain_is_the_same_state(name):
    """Saved as NumPy, carried into a fresh chain: nothing is left fresh, nothing dropped."""
    saved = whole_run(name).states[34]
    state, report = transplant(saved, program(name).tx.init(PARAMS))
    assert_same(state, saved)
    assert report.fresh == report.dropped == ()


def made_of(state):
    """A transformation with this state, whatever it is, that counts its updates in it."""
    return optax.GradientTransformation(
        lambda params: state,
        lambda updates, state, params=None: (updates, jax.tree.map(lambda x: x + 1, state)),
    )


BARE = {
    "array": jnp.zeros(()),
    "NumPy array": np.zeros(3, np.float32),
    "dict": {"a": jnp.zeros(2), "b": {"c": jnp.zeros(())}},
    "tuple of arrays": (jnp.zeros(2), jnp.zeros(())),
    "list": [jnp.zeros(2), [jnp.zeros(3)]],
    "none": None,
    "empty": (),
    "dict of states": {"adam": optax.ScaleByAdamState(jnp.zeros((), jnp.int32), jnp.zeros(2), jnp.zeros(2))},
}


@pytest.mark.parametrize("restored", [False, True], ids=["device", "numpy"])
@pytest.mark.parametrize("kind", BARE)
def test_transplant_beside_a_state_that_is(kind, restored):
    old, new = zclip(warmup_steps=2), zclip(warmup_steps=2, max_grad_norm=None)
    old = optax.chain(old, made_of(BARE[kind]), optax.adam(1e-3))
    new = optax.chain(new, made_of(BARE[kind]), optax.adam(1e-2))
    state = old.init(PARAMS)
    for grads in GRADS[:5]:
        _, state = old.update(grads, state, PARAMS)
    state = jax.device_get(state) if restored else state
    got, report = transplant(state, new.init(PARAMS))
    assert_same(got[0], state[0])
    assert_same(got[2], state[2])
    assert any("ClipState" in name for name in report.carried)
    assert spec(got) == spec(state)


# Old chain, new chain: the numbers become schedules or others, a combinator comes or goes; statistics stay.
CHANGES = {
    "number to schedule": (lambda: zclip(max_grad_norm=1.0), lambda: zclip(max_grad_norm=lambda step: 1.0)),
    "schedule to number": (lambda: zclip(z_thresh=lambda step: 2.5), zclip),
    "two schedules to one": (
        lambda: zclip(z_thresh=lambda step: 2.5, max_grad_norm=lambda step: 1.0),
        lambda: zclip(max_grad_norm=lambda step: 1.0),
    ),
    "level to a schedule": (levelclip, lambda: levelclip(alpha=lambda step: 0.95)),
    "into loss_aware": (
        lambda: clip_by_rule(rules.percentile(50.0, 12)),
        lambda: clip_by_rule(rules.loss_aware(rules.percentile(50.0, 12), eta=0.0)),
    ),
    "out of loss_aware": (
        lambda: clip_by_rule(rules.loss_aware(rules.window_zscore(12, warmup_steps=8), eta=0.0)),
        lambda: clip_by_rule(rules.window_zscore(12, warmup_steps=8)),
    ),
    "into skip_by_rule": (
        lambda: skip_by_rule(optax.sgd(1.0), rules.zscore()),
        lambda: skip_by_rule(optax.sgd(1.0), rules.at_most(rules.zscore(), lambda step: 1e9)),
    ),
    "into inject_hyperparams": (zclip, lambda: optax.inject_hyperparams(zclip)(z_thresh=2.5)),
    "by leaf, to a schedule": (
        lambda: zclip(granularity="leaf"),
        lambda: zclip(granularity="leaf", z_thresh=lambda step: 2.5),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_transplant_keeps_statistics(change):
    """The run goes on as if the old chain had not been changed, since the new numbers are the old ones."""
    old, new = (make() for make in CHANGES[change])
    update, go_on = jax.jit(old.update), jax.jit(new.update)
    state = old.init(PARAMS)
    for grads, loss in zip(GRADS[:34], LOSS, strict=False):
        _, state = update(grads, state, PARAMS, value=loss)
    carried, _ = transplant(jax.device_get(state), new.init(PARAMS))
    assert spec(carried) == spec(new.init(PARAMS))
    for grads in GRADS[34:]:
        want, state = update(grads, state, PARAMS, value=np.float32(2.0))
        got, carried = go_on(grads, carried, PARAMS, value=np.float32(2.0))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)
        logged, want_logged = metrics(carried), metrics(state)
        for key in ("num_steps", "num_fired", "num_bound", "fired", "mean", "std"):
            np.testing.assert_allclose(logged[f"zclip/{key}"], want_logged[f"zclip/{key}"], rtol=1e-6)


class Linear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))


GIVEN = {"Optimizer": lambda x: x, "opt_state": lambda x: x.opt_state, "nnx.state": nnx.state}


@pytest.mark.parametrize("kind", GIVEN)
def test_transplant_of_an_nnx_optimizer(kind):
    """Carried into one of the same kind, or refused with one line that says what to pass."""
    model = Linear()
    old = nnx.Optimizer(model, optax.chain(zclip(), optax.adam(1e-3)), wrt=nnx.Param)
    for _ in range(3):
        old.update(model, nnx.state(model, nnx.Param))
    new = nnx.Optimizer(model, optax.chain(zclip(max_grad_norm=None), optax.adam(1e-2)), wrt=nnx.Param)
    refused = None
    try:
        state, _ = transplant(GIVEN[kind](old), GIVEN[kind](new))
    except ValueError as error:
        refused = str(error)
    if refused is None:
        assert int(metrics(state)["zclip/num_steps"]) == 3
        assert [int(x) for x in jax.tree.leaves(state) if x.dtype == jnp.int32].count(3) >= 3
    else:
        assert "opt_state" in refused
        assert len(refused.splitlines()) == 1
