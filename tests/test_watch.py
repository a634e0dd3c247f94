"""`watch` against NumPy over any norms, and that it changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.overhead import bytes_accessed, compile_update
from tests.cases import WRAPPERS, fast_jit, level_oracle
from tests.watching import KINDS, watch_oracle
from zclip_jax import WatchState, group_names, metrics, rules, skip_by_rule, watch, zclip

STEPS, NAMES = 48, ("a", "b", "c")
WEIGHTS = np.float32([2.0, 0.5, 0.0])
ZEROS = {name: jnp.zeros(1) for name in NAMES}


@fast_jit
def run(norms, weights):
    """Metrics of each step of both kinds of watch, on leaves of these norms, and their last states."""
    both = [watch(what) for what in KINDS]
    params = {name: weights[i : i + 1] for i, name in enumerate(NAMES)}

    def step(states, x):
        updates = {name: x[i : i + 1] for i, name in enumerate(NAMES)}
        states = tuple(tx.update(updates, state, params)[1] for tx, state in zip(both, states, strict=True))
        return states, metrics(states)

    return jax.lax.scan(step, tuple(tx.init(params) for tx in both), norms)


def series(seed, events):
    """Norms `[steps, groups]` around levels far apart, that fall or rise, with what `events` put into them."""
    rng = np.random.default_rng(seed)
    noise = rng.choice([0.02, 0.1, 0.5], len(NAMES))
    logs = rng.uniform(-10, 10, len(NAMES)) + noise * rng.standard_normal((STEPS, len(NAMES)))
    logs = logs + rng.choice([0.0, -0.1, 0.05], len(NAMES)) * np.arange(STEPS)[:, None]
    norms = np.float32(np.exp(logs))
    with np.errstate(all="ignore"):
        for step, group, value in events:
            norms[step, group] = norms[step, group] * -value if value < 0 else value
    return norms


EVENT = st.tuples(
    st.integers(0, STEPS - 1),
    st.integers(0, len(NAMES) - 1),
    # Negative: times the norm there. 1.5e19 is the largest of which float32 holds the square, but not that of two.
    st.sampled_from([0.0, np.nan, np.inf, 1e-18, -3.0, -30.0, -1e6, -1e-3, 1.5e19, 1e25, -np.inf]),
)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), events=st.lists(EVENT, max_size=40))
def test_every_number_is_that_of_numpy(seed, events):
    norms = series(seed, events)
    states, logged = run(norms, WEIGHTS)
    for what, state in zip(KINDS, states, strict=True):
        want, want_state = watch_oracle(norms, WEIGHTS if what == "updates" else None, level_oracle)
        assert {f"watch/{what}/{name}" for name in [*want, "trigger"]} == {
            k for k in logged if f"/{what}/" in k
        }
        above = np.asarray(logged[f"watch/{what}/norm"]) > logged[f"watch/{what}/trigger"]
        np.testing.assert_array_equal(above & ~want["nonfinite"], want["fired"])
        for name, x in want.items():
            got = np.asarray(logged[f"watch/{what}/{name}"])
            kind = "i" if x.dtype.kind == "u" else x.dtype.kind
            assert got.dtype.kind == kind, name
            np.testing.assert_allclose(got, x, rtol=3e-4, atol=2e-5, err_msg=f"{what} {name}")
        for name, x in want_state.items():
            np.testing.assert_allclose(
                getattr(state.moments, name, getattr(state, name, None)),
                x,
                rtol=3e-4,
                atol=2e-5,
                err_msg=name,
            )


def some(quick, names, others):
    """All pairs, of which all but the `quick` ones are slow."""
    return [
        pytest.param(x, y, marks=() if (x, y) in quick else pytest.mark.slow) for x in names for y in others
    ]


DTYPES = [np.float32, jnp.bfloat16, np.float16, np.complex64]


@pytest.mark.parametrize(
    ("what", "dtype"), some([("grads", np.float32), ("updates", jnp.bfloat16)], KINDS, DTYPES)
)
def test_changes_nothing(what, dtype):
    """The very arrays, whatever is in them."""
    grads = {
        "w": jnp.asarray([1.0, np.nan, -0.0, np.inf, 3e4], dtype),
        "n": jnp.asarray([3]),
        "key": jax.random.key(0),
        "none": np.zeros(2, jax.dtypes.float0),
        "empty": jnp.zeros((0, 2)),
    }
    tx = watch(what)
    updates, state = tx.update(grads, tx.init(grads), grads)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    assert all(x is y for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True))
    logged = metrics(state)
    assert list(group_names(grads)) == ["empty", "w"]
    assert logged[f"watch/{what}/nonfinite_groups"].tolist() == [False, True]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32, np.complex64])
def test_norms_of_any_type(dtype):
    grads = {"a": jnp.asarray([3.0, 4.0], dtype), "b": jnp.full(1000, 100.0, dtype)}
    if dtype == np.complex64:
        grads["a"] = jnp.asarray([3.0j, 4.0])
    tx = watch("updates")
    _, state = fast_jit(tx.update)(grads, tx.init(grads), {"a": grads["a"] * 2, "b": grads["b"]})
    np.testing.assert_allclose(state.norms, [5.0, 100 * 1000**0.5], rtol=1e-5)
    np.testing.assert_allclose(jnp.exp(state.history.log_mean[3:5]), [0.5, 1.0], rtol=1e-5)


def test_sixty_four_bits(x64):
    grads = {"a": jnp.asarray([3e30, 4e30]), "b": jnp.asarray([1.0], jnp.float32)}
    tx = watch("grads")
    _, state = fast_jit(tx.update)(grads, tx.init(grads))
    assert state.norms.dtype == np.float64
    np.testing.assert_allclose(state.norms, [5e30, 1.0])
    assert not state.moments.nonfinite[0]


QUICK = [(name, "updates" if "in" in name else "grads") for name in WRAPPERS]


@pytest.mark.parametrize(("name", "what"), some(QUICK, WRAPPERS, KINDS))
def test_found_in(name, what):
    params = {"a": jnp.ones(2), "b": jnp.ones(())}
    grads = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray(4.0)}
    tx = WRAPPERS[name](watch(what))
    _, state = fast_jit(tx.update)(grads, tx.init(params), params)
    logged = metrics(state)
    assert all(key.startswith(f"watch/{what}/") for key in logged)
    assert float(logged[f"watch/{what}/norm"]) == 5.0
    assert int(logged[f"watch/{what}/num_steps"]) == 1
    assert logged.keys() == jax.jit(metrics)(state).keys()


def test_beside_clips_and_others_of_its_kind():
    tx = optax.chain(
        watch("grads"), zclip(), watch("grads", granularity="global"), optax.sgd(1.0), watch("updates")
    )
    params = {"a": jnp.ones(2), "b": jnp.ones(1)}
    grads = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([4.0])}
    _, state = fast_jit(tx.update)(grads, tx.init(params), params)
    logged = metrics(state)
    assert float(logged["watch/grads/0/norm"]) == 5.0
    assert float(logged["watch/grads/2/norm"]) == 1.0
    assert logged["watch/grads/2/norms"].shape == (1,)
    assert float(logged["watch/updates/norm"]) == 1.0
    assert float(logged["zclip/grad_norm"]) == 5.0


def test_steps_left_out_are_seen_ahead_of_the_skip():
    """Inside, the watch stays with the steps that were applied."""
    inside = skip_by_rule(optax.chain(watch("grads"), optax.sgd(1.0)), rules.fixed(2.0))
    tx = optax.chain(watch("grads"), inside)
    state, update = tx.init(jnp.zeros(1)), fast_jit(tx.update)
    for norm in [1.0, 1.0, 9.0, np.nan, 1.0]:
        _, state = update(jnp.asarray([norm]), state)
    logged = metrics(state)
    assert [int(x) for key, x in logged.items() if key.endswith("grads/0/num_steps")] == [5]
    assert int(logged["watch/grads/1/inner_state/0/num_steps"]) == 3
    assert int(logged["watch/grads/0/num_nonfinite"]) == int(logged["watch/grads/0/num_fired"]) == 1


def test_a_rule_of_another_kind():
    """It gets the loss, and its numbers are shown; the level is the watch's own."""
    seen = []

    def update(norm, state, *, value=None, global_norm=None):
        seen.append(value)
        return rules.fixed(2.0).update(global_norm, state)

    rule = rules.fixed(2.0)._replace(update=update)
    tx = watch("grads", rule=rules.in_log_space(rules.zscore(warmup_steps=2)))
    state, update_ = tx.init(jnp.zeros(1)), fast_jit(tx.update)
    for norm in [4.0, 4.2, 4.1, 90.0]:
        _, state = update_(jnp.asarray([norm]), state)
    logged = metrics(state)
    assert bool(logged["watch/grads/fired"])
    assert 4.0 < float(logged["watch/grads/level"]) < 4.2
    _, state = watch("grads", rule=rule).update(
        jnp.ones(1) * 3, watch("grads", rule=rule).init(jnp.ones(1)), value=7
    )
    assert seen == [7]
    assert float(metrics(state)["watch/grads/allowed"]) == 2.0


EMPTY = {"none": {}, "ints": {"n": np.ones(2, np.int32)}, "of no size": {"e": np.zeros(0, np.float32)}}


@pytest.mark.parametrize(
    ("what", "name"), some([("grads", "none"), ("updates", "ints"), ("updates", "of no size")], KINDS, EMPTY)
)
def test_a_tree_without_gradients(what, name):
    tx, tree = watch(what), EMPTY[name]
    _, state = fast_jit(tx.update)(tree, tx.init(tree), tree)
    _, state = fast_jit(tx.update)(tree, state, tree)
    assert float(metrics(state)[f"watch/{what}/norm"]) == 0.0


def test_errors():
    params = {"a": jnp.ones(2)}
    for kwargs, words in [
        ({"what": "weights"}, "'grads', 'updates', got 'weights'"),
        ({"what": "grads", "granularity": "tensor"}, "granularity must be"),
        ({"what": "grads", "split": True}, "split needs axis_name"),
    ]:
        with pytest.raises(ValueError, match=words):
            watch(**kwargs)
    tx = watch("updates")
    state = tx.init(params)
    assert isinstance(state, WatchState)
    with pytest.raises(ValueError, match=r"pass them.*got params=None"):
        tx.update(params, state)
    with pytest.raises(ValueError, match="params must have the structure of the updates"):
        tx.update(params, state, {"b": jnp.ones(2)})
    with pytest.raises(ValueError, match="have 2 groups, but the state was made for 1 groups"):
        tx.update({"a": jnp.ones(2), "b": jnp.ones(1)}, state, params)
    with pytest.raises(ValueError, match="the same watch"):
        watch("grads").update(params, state)
    with pytest.raises(ValueError, match="must be a WatchState, got a ClipState"):
        tx.update(params, zclip().init(params), params)


def test_costs_no_pass_over_the_gradients_beside_a_clip():
    """By XLA's count of bytes: the clip reads them once more than the optimizer, and the watch not at all."""
    params = {f"w{i}": jnp.zeros((512, 256)) for i in range(3)}
    chains = {
        "alone": optax.adamw(1e-3),
        "clip": optax.chain(zclip(), optax.adamw(1e-3)),
        "both": optax.chain(watch("grads"), zclip(), optax.adamw(1e-3)),
    }
    read = {name: bytes_accessed(compile_update(tx, params)[0]) for name, tx in chains.items()}
    once = sum(x.nbytes for x in params.values())
    clip = 4 if jax.__version_info__ < (0, 8) else 1  # as the XLA of JAX 0.7 compiles the clip
    assert (read["clip"] - read["alone"]) / once == pytest.approx(clip, abs=0.02)
    assert (read["both"] - read["clip"]) / once == pytest.approx(0, abs=0.02)
