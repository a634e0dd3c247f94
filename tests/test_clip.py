"""`clip_by_rule` and `zclip` beside the cases: derivatives, imports, errors, prior norms, watching alone."""

import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zclip_jax import ClipState, Decision, Rule, clip_by_rule, metrics, rules, zclip


def test_debug_nans_stays_quiet():
    """Nothing inside computes a NaN or divides 0 by 0, also in branches not taken."""
    with jax.debug_nans(True):
        for kwargs in ({}, {"strategy": "mean"}, {"robust_warmup": True, "warmup_steps": 3}):
            tx = zclip(**kwargs)
            state = tx.init(jnp.zeros(1))
            for norm in [0.0, 1.0, 1.0, 1.0, 0.0, 5.0]:
                _, state = tx.update(jnp.asarray([norm]), state)


def test_derivatives_through_the_update_are_finite():
    """Training loops are differentiated too: roots at 0 and bad norms leave no NaN behind."""
    tx = zclip(max_grad_norm=None, warmup_steps=3)

    def loop(h, norms):
        state, total = tx.init(0), 0.0
        for norm in norms:
            updates, state = tx.update(h * norm, state)
            total = total + updates.sum()
        return total

    def slope(norms):
        f = functools.partial(loop, norms=[jnp.asarray([n], jnp.float32) for n in norms])
        step = 1e-2
        numeric = (f(1.0 + step) - f(1.0 - step)) / (2 * step)
        return float(jax.grad(f)(1.0)), float(numeric)

    for norms in ([0.0], [1.0, 1.0], [1.0, 0.9, 1.1, 1.0, 3.0, 1.0]):
        analytic, numeric = slope(norms)
        np.testing.assert_allclose(analytic, numeric, rtol=1e-3)
    state = tx.init(0)
    _, state = tx.update(jnp.asarray([1.0]), state)
    after_overflow = lambda h: tx.update(h, tx.update(h * 3e19, state)[1])[0].sum()  # noqa: E731
    assert float(jax.grad(after_overflow)(jnp.ones(1))[0]) == 1.0


def test_debug_nans_with_a_bad_gradient():
    """The gradient itself is the only thing to complain about."""
    with jax.debug_nans(True):
        tx = zclip()
        updates, _ = tx.update(jnp.asarray([jnp.inf, 1.0]), tx.init(0))
    np.testing.assert_array_equal(updates, [0.0, 0.0])


def test_nothing_heavy_is_imported():
    """The core brings in jax, optax and chex, and what those need: no trainer, no plots."""
    code = (
        "import sys, zclip_jax; "
        "heavy = {'flax', 'orbax', 'matplotlib', 'grain', 'rich', 'tensorboard', 'tensorboardX', 'wandb'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"nonfinite": "skip"}, "nonfinite must be one of 'zero', 'propagate', got 'skip'"),
        ({"prior_norms": 3.0}, r"prior_norms must be one-dimensional, got an array of shape \(\)"),
        ({"max_grad_norm": -1}, "max_grad_norm must be a number >= 0 or None, got -1"),
        ({"alpha": 2}, r"alpha must be a number in \[0, 1\), got 2"),
    ],
)
def test_errors_of_zclip(kwargs, message):
    with pytest.raises(ValueError, match=message):
        zclip(**kwargs)


def test_the_state_of_another_chain_is_a_clear_error():
    tx = optax.chain(zclip(), optax.sgd(1.0))
    old = optax.chain(optax.clip(1.0), optax.sgd(1.0)).init(jnp.zeros(1))
    with pytest.raises(ValueError, match="must be a ClipState, got a EmptyState"):
        tx.update(jnp.ones(1), old)


def rule_of(threshold=1.0, fired=False, init=lambda: jnp.zeros(())):
    return Rule(
        init=init,
        update=lambda norm, state, **_: (Decision(threshold=threshold, z_score=0.0, fired=fired), state),
    )


def test_odd_answers_of_a_rule():
    """A negative threshold cannot turn gradients round, and a count is as good as a bool."""
    grads = jnp.asarray([3.0, 4.0])
    for rule, norm, fired in ((rule_of(-1.0), 0.0, False), (rule_of(1.0, jnp.int32(2)), 1.0, True)):
        tx = clip_by_rule(rule)
        updates, state = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(jnp.linalg.norm(updates), norm)
        assert int(state.num_fired) == fired
    tx = clip_by_rule(rule_of(jnp.ones(1)))
    with pytest.raises(ValueError, match=r"must hold scalars, got threshold of shape \(1,\)"):
        tx.update(grads, tx.init(grads))
    state = clip_by_rule(rule_of(init=lambda: {"level": 1.0, "seen": 0})).init(grads)
    assert not any(x.weak_type for x in jax.tree.leaves(state))


def test_huge_prior_norms_count_as_overflows():
    state = zclip(prior_norms=[1e20, 1.0] * 20).init(None)
    assert int(state.rule_state.num_norms) == 20
    np.testing.assert_allclose(state.rule_state.mean, 1.0)


def test_a_factory_is_no_rule():
    unchecked = inspect.unwrap(clip_by_rule)  # as outside the tests, without type checks
    with pytest.raises(ValueError, match=r"rule must be a Rule such as rules.zscore\(\), got <func"):
        unchecked(rules.zscore)


def test_robust_warmup_needs_a_static_length():
    tx = optax.inject_hyperparams(zclip)(robust_warmup=True)
    with pytest.raises(ValueError, match="static_args"):
        jax.jit(tx.init)(jnp.zeros(1))
    tx = optax.inject_hyperparams(zclip, static_args="warmup_steps")(robust_warmup=True)
    assert tx.init(jnp.zeros(1)).inner_state.rule_state.warmup_norms.shape == (25,)


def test_prior_norms_stand_in_for_a_warmup():
    """Starting from a history equals having run through it; non-finite entries are passed over."""
    norms = np.random.default_rng(1).normal(1.0, 0.1, 60)
    tx = zclip()
    lived, update = tx.init(jnp.zeros(1)), jax.jit(tx.update)
    for norm in norms:
        _, lived = update(jnp.asarray([norm], jnp.float32), lived, jnp.zeros(1))
    primed = zclip(prior_norms=np.insert(norms, 30, np.nan)).init(jnp.zeros(1))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        primed.rule_state,
        lived.rule_state,
    )
    assert isinstance(primed, ClipState)
    assert int(primed.num_steps) == 0
    updates, state = zclip(prior_norms=norms, max_grad_norm=None).update(jnp.asarray([9.0]), primed)
    assert bool(state.last.fired)


def test_observe_only():
    tx = zclip(observe_only=True, warmup_steps=2)
    state = tx.init(jnp.zeros(1))
    for norm in [1.0, 1.1, 50.0, np.nan]:
        grads = jnp.asarray([norm])
        updates, state = tx.update(grads, state)
        assert updates is grads
    logged = metrics(state)
    assert int(logged["zclip/num_fired"]) == 1
    assert int(logged["zclip/num_nonfinite"]) == 1
