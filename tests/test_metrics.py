"""`metrics` out of every nesting that optax offers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.cases import WRAPPERS, fast_jit
from zclip_jax import clip_by_rule, metrics, rules, zclip

PARAMS = {"a": jnp.zeros(2), "b": jnp.zeros(())}
GRADS = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray(4.0)}

NAMES = {
    "grad_norm", "threshold", "trigger", "z_score", "clip_scale", "mean", "std", "fired", "bound", "capped",
    "nonfinite", "num_steps", "num_fired", "num_bound", "num_capped", "num_nonfinite", "spike_run",
    "longest_spike_run", "fired_rate", "bound_rate", "capped_rate",
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPERS)
def test_found_in(name):
    tx = WRAPPERS[name](zclip())
    _, state = fast_jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
    outside, inside = metrics(state), jax.jit(metrics)(state)
    assert set(outside) == set(inside) == {f"zclip/{name}" for name in NAMES}
    assert all(x.shape == () for x in outside.values())
    assert float(outside["zclip/grad_norm"]) == 5.0
    assert float(outside["zclip/threshold"]) == 1.0
    assert float(outside["zclip/capped_rate"]) == 1.0
    assert int(outside["zclip/num_steps"]) == 1


def test_several_get_their_path():
    tx = optax.chain(
        optax.partition({"x": zclip(), "y": zclip(max_grad_norm=None)}, {"a": "x", "b": "y"}),
        optax.named_chain(("after", clip_by_rule(rules.fixed(1.0)))),
    )
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    logged = metrics(state)
    norms = {key: float(x) for key, x in logged.items() if key.endswith("/grad_norm")}
    assert norms == {
        "zclip/0/inner_states/x/inner_state/grad_norm": 3.0,
        "zclip/0/inner_states/y/inner_state/grad_norm": 4.0,
        "zclip/1/after/grad_norm": pytest.approx(17**0.5),
    }
    assert len(logged) == 3 * len(NAMES)


@pytest.mark.parametrize("state", [optax.adam(1e-3).init(PARAMS), (), None, {"loss": 1.0}])
def test_none_is_an_error(state):
    with pytest.raises(ValueError, match=r"no clip state in this .*zclip\(\)"):
        metrics(state)


def test_totals_and_rates():
    tx = zclip(warmup_steps=4, max_grad_norm=1.005)
    grads = functools.partial(jnp.multiply, jnp.asarray([0.6, 0.8]))
    state = tx.init(grads(1.0))
    update = fast_jit(tx.update)
    norms = [0.9, 1.1, 1.0, 1.0, 1.003, 5.0, jnp.nan, 7.0, 1.0, 6.0]
    for norm in norms:
        _, state = update(grads(norm), state)
    logged = {key.removeprefix("zclip/"): np.asarray(x).item() for key, x in metrics(state).items()}
    assert logged["num_steps"] == 10
    assert logged["num_nonfinite"] == 1
    assert logged["num_fired"] == logged["num_bound"] == 3
    # The warm-up's 1.1, and the spikes whose reciprocal threshold lies above the cap.
    assert logged["num_capped"] == 1 + sum(threshold > 1.005 for threshold in spike_thresholds(norms))
    assert logged["spike_run"] == 1
    assert logged["longest_spike_run"] == 2  # 5.0 and 7.0: the NaN between them is no step
    assert logged["fired_rate"] == pytest.approx(0.3)


def spike_thresholds(norms):
    """What the rule alone would allow at its three spikes."""
    tx = zclip(warmup_steps=4, max_grad_norm=None)
    state, thresholds = tx.init(jnp.zeros(1)), []
    for norm in norms:
        _, state = tx.update(jnp.asarray([norm]), state)
        if state.last.fired:
            thresholds.append(float(state.last.threshold))
    assert len(thresholds) == 3
    return thresholds


def test_a_fresh_state_reads_as_zeros():
    logged = metrics(zclip().init(PARAMS))
    assert float(logged["zclip/clip_scale"]) == 1.0
    assert float(logged["zclip/threshold"]) == float(logged["zclip/trigger"]) == np.inf
    rest = set(logged) - {"zclip/clip_scale", "zclip/threshold", "zclip/trigger"}
    assert not any(float(logged[key]) for key in rest)


def test_several_in_one_object():
    """A state that holds a second optimizer state beside `opt_state` is searched whole."""

    class Both(NamedTuple):
        opt_state: tuple
        critic_opt_state: tuple

    both = Both(zclip().init(PARAMS), optax.chain(zclip(), optax.sgd(1.0)).init(PARAMS))
    assert {key.rpartition("/")[0] for key in metrics(both)} == {
        "zclip/opt_state",
        "zclip/critic_opt_state/0",
    }
