"""Faults 2 and 3 of the first version, where flax holds the state. `pytest -s` prints inputs and values."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from zclip_jax import clip_by_rule, rules, transplant, zclip

EACH = {
    "percentile": rules.percentile(window=4),
    "window_zscore": rules.window_zscore(window=4, warmup_steps=4),
    "sigma_skip": rules.sigma_skip(window=4, warmup_steps=4),
    "robust_warmup": rules.zscore(robust_warmup=True, warmup_steps=6),
}


@pytest.mark.parametrize("name", EACH)
def test_2_a_state_from_msgpack_goes_on(name):
    tx = clip_by_rule(EACH[name])
    state = tx.init(jnp.ones(1))
    for norm in [1.0, 1.1, 0.9, 1.0, 1.2]:
        _, state = tx.update(jnp.full(1, norm), state)
    want, _ = tx.update(jnp.full(1, 5.0), state)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    updates, after = tx.update(jnp.full(1, 5.0), restored)
    print(f"fault 2: update after from_bytes: {float(updates[0])}")
    np.testing.assert_array_equal(updates, want)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(after))


def test_3_transplant_of_an_nnx_optimizer():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    new = nnx.Optimizer(model, optax.chain(zclip(), optax.adam(0.1)), wrt=nnx.Param)
    _, report = transplant(optimizer, new)
    print(f"fault 3: carried from an nnx.Optimizer: {report.carried}")
    assert "opt_state/1/0 ScaleByAdamState" in report.carried
    # nnx.state keeps no types, so that Adam's moments could be AdaBelief's.
    with pytest.raises(ValueError, match=r"^old_opt_state must be .*opt_state of an nnx.Optimizer") as error:
        transplant(nnx.state(optimizer), new)
    print(f"fault 3: said to nnx.state: {error.value}")
