"""With flax and Orbax: states saved, restored and carried on without a difference; dynamic loss scales."""

import functools

import flax.serialization
import flax.struct
import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from zclip_jax import Decision, Rule, clip_by_rule, metrics, zclip

NORMS = np.random.default_rng(0).lognormal(0.0, 0.4, 60).astype(np.float32)
PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}


def optimizer(**kwargs):
    return optax.chain(zclip(**kwargs), optax.adamw(1e-2))


def train(tx, norms, params, state):
    """Thresholds of each step, and what the steps leave behind."""

    @jax.jit
    def step(params, state, norm):
        grads = {"w": jnp.asarray([0.6, 0.0, 0.0]) * norm, "b": 0.8 * norm}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    thresholds = []
    for norm in norms:
        params, state = step(params, state, norm)
        thresholds.append(np.asarray(metrics(state)["zclip/threshold"]))
    return thresholds, params, state


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]


def through_orbax(tree, like, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", jax.eval_shape(lambda: like))


def through_msgpack(tree, like, path):
    (path / "state").write_bytes(flax.serialization.to_bytes(tree))
    return flax.serialization.from_bytes(like, (path / "state").read_bytes())


@pytest.mark.parametrize("stop", [10, 30])
@pytest.mark.parametrize("kwargs", [{}, {"robust_warmup": True}], ids=["plain", "robust"])
def test_a_resumed_run_is_the_uninterrupted_one(stop, kwargs, tmp_path):
    """Case 22: Stopped in mid warm-up and after it, bit for bit [brax 655]"""
    tx = optimizer(**kwargs)
    whole = train(tx, NORMS, PARAMS, tx.init(PARAMS))
    first, params, state = train(tx, NORMS[:stop], PARAMS, tx.init(PARAMS))
    fresh = optimizer(**kwargs)
    params, state = through_orbax((params, state), (PARAMS, fresh.init(PARAMS)), tmp_path)
    rest, params, state = train(fresh, NORMS[stop:], params, state)
    np.testing.assert_array_equal(first + rest, whole[0])
    assert_same((params, state), whole[1:])


def test_a_lost_state_is_visible():
    tx = optimizer()
    _, params, state = train(tx, NORMS, PARAMS, tx.init(PARAMS))
    assert int(state[0].rule_state.num_norms) == 60
    assert int(tx.init(params)[0].rule_state.num_norms) == 0


@pytest.mark.parametrize("through", [through_orbax, through_msgpack])
def test_restored_state_has_the_same_types(through, tmp_path):
    """Case 21: [flax 1429, ferminet 105]"""
    tx = optimizer()
    _, _, state = train(tx, NORMS[:5], PARAMS, tx.init(PARAMS))
    old = tx.init(PARAMS)
    restored = jax.tree.map(jnp.asarray, through(state, old, tmp_path))
    chosen = jax.jit(lambda p: jax.lax.cond(p, lambda: restored, lambda: old))(True)
    assert_same(chosen, state)


def test_msgpack_of_another_chain_is_a_clear_error(tmp_path):
    plain, robust = optimizer().init(PARAMS), optimizer(robust_warmup=True).init(PARAMS)
    with pytest.raises(ValueError, match=r"saved state of ZScoreState .* lacks \['warmup_norms'\]"):
        through_msgpack(plain, robust, tmp_path)
    with pytest.raises(ValueError, match=r"saved state of ClipState .* lacks \['last'"):
        through_msgpack(optax.chain(optax.clip(1.0), optax.adamw(1e-2)).init(PARAMS), plain, tmp_path)


def test_flax_keeps_its_own_serialization_of_foreign_states():
    @flax.struct.dataclass
    class State:
        level: jax.Array
        function: object = flax.struct.field(pytree_node=False, default=None)

    def update(norm, state, **extra_args):
        return Decision(threshold=norm, z_score=0.0, fired=False), state

    state = State(jnp.zeros(()), jnp.sin)
    before = flax.serialization.to_bytes(state)
    clip_by_rule(Rule(init=lambda: state, update=update)).init(PARAMS)
    assert flax.serialization.to_bytes(state) == before


def test_train_state():
    tx = optimizer()
    state = TrainState.create(apply_fn=lambda p, x: x, params=PARAMS, tx=tx)
    state = jax.jit(lambda s: s.apply_gradients(grads=PARAMS))(state)
    assert float(metrics(state)["zclip/grad_norm"]) == pytest.approx(3**0.5)
    assert metrics(state).keys() == metrics(state.opt_state).keys()


class Linear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((2, 2)))


@nnx.jit
def nnx_step(model, optimizer, x):
    grads = nnx.grad(lambda model: jnp.sum((x @ model.w[...]) ** 2))(model)
    optimizer.update(model, grads)
    return metrics(optimizer)


def test_nnx_optimizer():
    model = Linear()
    opt = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)
    inside = nnx_step(model, opt, jnp.ones((1, 2)))
    for state in (opt, opt.opt_state, nnx.state(opt), nnx.to_pure_dict(nnx.state(opt))):
        logged = metrics(state)
        assert logged.keys() == inside.keys()
        for key, x in logged.items():
            assert isinstance(x, jax.Array)
            assert x == inside[key]
    assert float(inside["zclip/grad_norm"]) == pytest.approx(8.0)
    assert int(inside["zclip/num_steps"]) == 1


def test_nnx_checkpoint(tmp_path):
    """Case 15: One step, save, restore, one step equals two steps [flax 4423]"""

    def fresh():
        model = Linear()
        return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    x = jnp.asarray([[1.0, 2.0]])
    model, opt = fresh()
    nnx_step(model, opt, x)
    saved = (nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(opt)))
    second = nnx_step(model, opt, x)

    model2, opt2 = fresh()
    like = (nnx.to_pure_dict(nnx.state(model2)), nnx.to_pure_dict(nnx.state(opt2)))
    restored = through_orbax(saved, like, tmp_path)
    for node, values in zip((model2, opt2), restored, strict=True):
        state = nnx.state(node)
        nnx.replace_by_pure_dict(state, values)
        nnx.update(node, state)
    again = nnx_step(model2, opt2, x)
    assert_same(again, second)
    assert_same(jax.tree.leaves(nnx.state(model2)), jax.tree.leaves(nnx.state(model)))
    assert int(again["zclip/num_steps"]) == 2


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_lower_precision_model_in_nnx(jit):
    """The clip state stays float32 beside bfloat16 parameters."""
    tx = optimizer()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    state = tx.init(params)
    _, state = jit(functools.partial(tx.update))(params, state, params)
    assert {x.dtype.name for x in jax.tree.leaves(state[0])} == {"float32", "int32", "bool"}


def test_dynamic_loss_scale():
    """float16 gradients under flax's DynamicScale: true norms are seen, overflows are no samples."""
    tx = optax.chain(zclip(), optax.sgd(0.1))
    scale = flax.training.dynamic_scale.DynamicScale(scale=jnp.float32(2.0**16), growth_interval=3)
    params, state = jnp.ones(4, jnp.float32), tx.init(jnp.ones(4))
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0], jnp.float16)

    def loss(params, factor):
        return jnp.sum((params.astype(jnp.float16) * x * factor).astype(jnp.float32) ** 2) / 60

    norms, scales = [], set()
    for i in range(12):
        factor = jnp.float16(200.0 if i == 8 else 1.0)
        scale, finite, _, grads = scale.value_and_grad(loss)(params, factor)
        before = state[0]
        updates, state = tx.update(grads, state, params)
        scales.add(float(scale.scale))
        if finite:
            norms.append(float(state[0].last.grad_norm))
        else:
            jax.tree.map(np.testing.assert_array_equal, state[0].rule_state, before.rule_state)
            np.testing.assert_array_equal(updates, jnp.zeros(4))
    assert len(scales) > 1
    assert 0 < int(state[0].num_nonfinite) == 12 - len(norms)
    assert int(state[0].num_fired) == 0
    want = float(jnp.linalg.norm(jax.grad(loss)(params, jnp.float16(1.0))))
    np.testing.assert_allclose(norms, want, rtol=1e-3)
