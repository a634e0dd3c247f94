"""Clipping around Muon and AdamW: the numbers of docs/muon.md, and the chains that it recommends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.benchmarks import muon as bench
from zclip_jax import group_names, metrics

LOUD, SPIKED, BOTH = {"loud": 5e7}, {"spiked": bench.MATRIX}, bench.FAULTS["spike in a matrix, loud tensor"]
CAPPED = ("`optax.clip_by_global_norm(1.0)`", "`zclip()`")
GLOBAL, LEAF = "`zclip(max_grad_norm=None)`", '`zclip(granularity="leaf")`'
EACH = "`zclip(max_grad_norm=None)` in each group"
QUIET_CASE, LOUD_CASE, SPIKED_CASE, BOTH_CASE = range(4)


@functools.cache
def updates_of(name):
    """Of the four cases, compiled into one program."""
    return bench.updates_of(bench.chains()[name], [{}, LOUD, SPIKED, BOTH])


@functools.cache
def updates_of_adamw(name):
    """Of AdamW for all tensors, beside the loud one."""
    return bench.updates_of(optax.chain(bench.BEFORE[name](), optax.adamw(3e-4)), [LOUD])


def adam_update(grads, scale, eps=1e-8):
    """The last update of Adam at a learning rate of 1, in float64."""
    first = second = 0.0
    for g in scale * grads.astype(np.float64):
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
    first, second = first / (1 - 0.9 ** len(grads)), second / (1 - 0.999 ** len(grads))
    return first / (np.sqrt(second) + eps)


@pytest.mark.parametrize("name", [pytest.param(CAPPED[0], marks=pytest.mark.slow), *CAPPED[1:]])
def test_a_cap_on_the_norm_of_all_takes_the_update_away_beside_a_loud_tensor(name):
    sizes = bench.size(*(updates_of_adamw(which)["scale"][0] for which in (name, "nothing")))
    scale = 1.0 / 1e8  # the cap over the norm of four entries of 5e7
    want = [
        np.linalg.norm(adam_update(g, scale)) / np.linalg.norm(adam_update(g, 1.0))
        for g in bench.gradients(**LOUD)["scale"]
    ]
    np.testing.assert_allclose(sizes, want, rtol=1e-3)
    assert 0.0013 < sizes.mean() < 0.0017


@pytest.mark.parametrize("name", [pytest.param(GLOBAL, marks=pytest.mark.slow), LEAF])
@pytest.mark.parametrize("tensor", [pytest.param("scale", marks=pytest.mark.slow), "matrix"])
def test_without_a_cap_or_by_leaf_the_update_stays(name, tensor):
    sizes = bench.size(updates_of(name)[tensor][LOUD_CASE], updates_of("nothing")[tensor][LOUD_CASE])
    np.testing.assert_allclose(sizes, 1.0, atol=2e-3)


def deviation(name, case):
    """Of the matrix that has the spike, where the case has one."""
    clean = updates_of("nothing")["matrix"][LOUD_CASE if case == BOTH_CASE else QUIET_CASE]
    return bench.deviation(updates_of(name)["matrix"][case], clean)


def test_a_norm_for_each_tensor_holds_a_spike_where_one_norm_for_all_does_not_see_it():
    for case in (SPIKED_CASE, BOTH_CASE):
        assert (deviation("nothing", case) > 1.3).all()
        assert (deviation(LEAF, case) < 0.3).all()
    assert (deviation(LEAF, QUIET_CASE) < 0.01).all()  # false alarms
    assert (deviation(GLOBAL, SPIKED_CASE) < 0.3).all()
    assert (deviation(GLOBAL, BOTH_CASE) > 1.3).all()


@pytest.mark.parametrize(("width", "want"), [(128, 10), pytest.param(512, 21, marks=pytest.mark.slow)])
def test_a_clip_after_muon_divides_every_update(width, want):
    assert bench.shrunk_after_muon(width) == pytest.approx(want, rel=0.02)


def run_step_by_step(tx, grads):
    """The updates `[steps, ...]`, and the metrics after the spike; the jitted step is compiled once."""
    params = {name: jnp.zeros(shape) for name, shape in bench.SHAPES.items()}
    step = jax.jit(lambda grads, state: tx.update(grads, state, params))
    state, updates = tx.init(params), []
    for i in range(bench.STEPS):
        update, state = step({name: x[i] for name, x in grads.items()}, state)
        updates.append(update)
        if i == bench.SPIKE:
            logged = metrics(state)
    assert step._cache_size() == 1
    return jax.tree.map(lambda *x: np.stack(x), *updates), logged


@pytest.mark.parametrize("name", [bench.RECOMMENDED, pytest.param(EACH, marks=pytest.mark.slow)])
def test_the_chains_of_the_docs_hold_a_spike_beside_a_loud_tensor_and_name_it(name):
    grads = {name: x[0] for name, x in bench.gradients(**BOTH).items()}
    updates, logged = run_step_by_step(bench.chains()[name], grads)

    clean = {tensor: x[LOUD_CASE, :1] for tensor, x in updates_of("nothing").items()}
    moved = {tensor: bench.deviation(x[None], clean[tensor]).item() for tensor, x in updates.items()}
    assert moved["matrix"] < 0.3
    assert moved["scale"] < 0.01

    fired = {key: x.tolist() for key, x in logged.items() if key.endswith("/fired")}
    if name == EACH:
        key = "zclip/inner_states/{}/inner_state/0/fired"
        assert fired == {key.format("muon"): True, key.format("adam"): False}
    else:
        names = group_names(grads)
        assert dict(zip(names, *fired.values(), strict=True)) == {
            tensor: tensor == "matrix" for tensor in bench.SHAPES
        }
        want = [np.linalg.norm(grads[tensor][bench.SPIKE]) for tensor in names]
        np.testing.assert_allclose(logged["zclip/grad_norm"], want, rtol=1e-5)
