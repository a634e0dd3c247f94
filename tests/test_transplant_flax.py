"""`transplant` of what flax holds an optimizer state in, and of what has lost its types there."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx, serialization
from flax.training import train_state

from tests.test_transplant import PARAMS, assert_same
from tests.test_transplant_chains import CHAINS
from zclip_jax import metrics, transplant, zclip


def optimizer(tx, width=3):
    return nnx.Optimizer(nnx.Linear(2, width, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)


def trained_optimizer(tx):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    of_model = nnx.Optimizer(model, tx, wrt=nnx.Param)
    of_model.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    return of_model


def test_fault_3_an_nnx_optimizer():
    old, new = trained_optimizer(optax.adam(1e-3)), optimizer(optax.chain(zclip(), optax.adam(1e-3)))
    result, report = transplant(old, new)
    assert isinstance(result, nnx.Optimizer)
    assert jax.tree.structure(result) == jax.tree.structure(new)
    assert report.carried == ("Optimizer", "opt_state/1/0 ScaleByAdamState")
    assert int(result.step[...]) == int(result.opt_state[1][0].count[...]) == 1
    assert_same(result.opt_state[1], old.opt_state)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    result.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    assert int(result.step[...]) == 2
    assert int(metrics(result)["zclip/num_steps"]) == 1
    assert int(new.step[...]) == 0

    opt_state, report = transplant(old.opt_state, new.opt_state)
    assert report.carried == ("1/0 ScaleByAdamState",)
    nnx.update(new, nnx.state(result))
    assert_same(new.opt_state[1], result.opt_state[1])


@pytest.mark.parametrize("as_is", [lambda x: x, nnx.to_pure_dict], ids=["State", "dict"])
def test_fault_3_what_nnx_state_gives_has_no_types(as_is):
    old = as_is(nnx.state(trained_optimizer(optax.chain(zclip(), optax.adam(1e-3)))))
    new = optimizer(optax.chain(zclip(), optax.adam(1e-3)))
    for args, name in [((old, new), "old_opt_state"), ((new, old), "new_opt_state")]:
        with pytest.raises(
            ValueError, match=rf"^{name} .*opt_state of an nnx.Optimizer.*nnx.update\("
        ) as error:
            transplant(*args)
        assert "\n" not in str(error.value)
    if as_is is not nnx.to_pure_dict:
        with pytest.raises(ValueError, match="without the types"):
            transplant(old, old)


def test_what_flax_serialization_restores_without_a_structure():
    old = CHAINS["zclip, adam"].init(PARAMS)
    raw = serialization.msgpack_restore(serialization.msgpack_serialize(serialization.to_state_dict(old)))
    with pytest.raises(ValueError, match=r"^old_opt_state must be .* got a dict without the types"):
        transplant(raw, old)


def test_a_train_state():
    def make(tx):
        return train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

    old = make(optax.adam(1e-3)).apply_gradients(grads=PARAMS)
    new = make(optax.chain(zclip(), optax.adam(1e-3)))
    state, report = transplant(old, new)
    assert state.step == 1
    assert_same(state.params, old.params)
    assert_same(state.opt_state[1], old.opt_state)
    assert report.carried == ("TrainState", "opt_state/1/0 ScaleByAdamState")
