"""`transplant` between any two of many chains: nothing crosses, nothing is untold, nothing changes its shape."""

import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zclip_jax import clip_by_rule, rules, skip_by_rule, transplant, zclip

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2)}
SCHEDULE = optax.constant_schedule(1.0)
LABELS = {"w": "one", "b": "two"}


def custom(make):
    """A transformation whose state is `make(params)`."""
    return optax.GradientTransformation(make, lambda updates, state, params=None: (updates, state))


class Stats(NamedTuple):
    mean: jax.Array
    var: jax.Array


class Wrapped(NamedTuple):
    inner: optax.OptState
    calls: jax.Array


def wrapped(tx):
    return custom(lambda params: Wrapped(tx.init(params), jnp.zeros((), jnp.int32)))


array = custom(lambda params: jnp.zeros(3))
scalar = custom(lambda params: jnp.zeros((), jnp.int32))
mapping = custom(lambda params: {"mean": jnp.zeros(3), "var": jnp.zeros(3)})
pair = custom(lambda params: (jnp.zeros((), jnp.int32), params))
nothing = custom(lambda params: None)
stats = custom(lambda params: Stats(jnp.zeros(()), jnp.zeros(())))
adam = optax.adam(1e-3)

RULES = {
    "zscore": rules.zscore(),
    "zscore, another number": rules.zscore(z_thresh=3.0),
    "zscore, robust": rules.zscore(robust_warmup=True, warmup_steps=5),
    "zscore, scheduled": rules.zscore(z_thresh=SCHEDULE),
    "zscore, twice scheduled": rules.at_most(rules.zscore(z_thresh=SCHEDULE), SCHEDULE),
    "zscore, bounded": rules.bounded(rules.at_most(rules.zscore(), 1.0), 0.1, SCHEDULE),
    "zscore, loss": rules.loss_aware(rules.at_most(rules.zscore(), SCHEDULE), 1.0),
    "zscore of logarithms": rules.in_log_space(rules.zscore()),
    "ema, loss": rules.loss_aware(rules.ema(), SCHEDULE),
    "ema": rules.ema(),
    "level": rules.level(),
    "fixed": rules.fixed(1.0),
    "fixed, scheduled": rules.fixed(SCHEDULE),
    "window": rules.window_zscore(window=4),
    "percentile": rules.percentile(window=4),
    "percentile, longer": rules.percentile(window=8),
}
CHAINS = {
    **{f"rule {name}": clip_by_rule(rule) for name, rule in RULES.items()},
    "leaf": zclip(granularity="leaf"),
    "adam": adam,
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-3),
    "belief": optax.adabelief(1e-3),
    "zclip, adam": optax.chain(zclip(), adam),
    "zclip twice, adam twice": optax.chain(zclip(), adam, zclip(max_grad_norm=SCHEDULE), adam),
    "named": optax.named_chain(("adam", optax.adamw(SCHEDULE)), ("clip", zclip())),
    "masked": optax.chain(zclip(), optax.masked(adam, {"w": True, "b": False})),
    "partition": optax.partition({"one": optax.chain(zclip(), adam), "two": optax.adamw(SCHEDULE)}, LABELS),
    "steps": optax.MultiSteps(optax.chain(zclip(), adam), 4),
    "steps, skipping": optax.MultiSteps(adam, 4, should_skip_update_fn=optax.skip_not_finite),
    "injected": optax.inject_hyperparams(lambda learning_rate: optax.chain(zclip(), optax.adam(learning_rate)))(1e-3),
    "injected schedules": optax.inject_hyperparams(optax.adamw)(SCHEDULE, weight_decay=SCHEDULE),
    "injected zclip": optax.inject_hyperparams(zclip)(z_thresh=SCHEDULE),
    "skip": skip_by_rule(optax.chain(zclip(), adam), rules.sigma_skip(window=4, warmup_steps=2)),
    "skip, scheduled": skip_by_rule(adam, rules.zscore(z_thresh=SCHEDULE)),
    "finite": optax.apply_if_finite(optax.chain(zclip(), adam), 3),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "factored": optax.adafactor(1e-2),
    "wrapped": optax.chain(zclip(), wrapped(adam)),
    "array": array,
    "array alone in a chain": optax.chain(array),
    "array, adam": optax.chain(array, adam),
    "zclip, array": optax.chain(zclip(), array),
    "array twice": optax.chain(array, array, zclip()),
    "dict": mapping,
    "tuple": pair,
    "all plain": optax.chain(array, mapping, pair, scalar, nothing),
    "all plain, zclip": optax.chain(zclip(), array, mapping, pair, scalar, nothing),
    "plain in steps": optax.MultiSteps(optax.chain(mapping, array), 2),
    "stats": optax.chain(stats, scalar),
    "stats, zclip": optax.chain(zclip(), stats, scalar),
    "empty": optax.chain(optax.identity(), nothing),
}  # fmt: skip


def trained(tx):
    """A state in which no two leaves are the same object, as NumPy arrays, which are carried as they are."""
    leaves, structure = jax.tree.flatten(tx.init(PARAMS))
    return structure.unflatten([np.full(np.shape(x), i + 2, x.dtype) for i, x in enumerate(leaves)])


@pytest.fixture(scope="module")
def states():
    return {name: (trained(tx), trained(tx)) for name, tx in CHAINS.items()}


def named_paths(tree):
    return {path_of(path): (path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def path_of(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def meaning(tree, path):
    """The innermost state around a leaf that has a name of its own, and the way from there."""
    found, node = ("", path_of(path)), tree
    for i, key in enumerate(path):
        if hasattr(node, "_fields") or dataclasses.is_dataclass(node):
            found = type(node).__name__, path_of(path[i:])
        node = (
            getattr(node, key.name)
            if hasattr(key, "name")
            else node[getattr(key, "key", getattr(key, "idx", None))]
        )
    return found


def line_of(leaf, lines):
    """The line of a report that speaks of this leaf: that of the longest path."""
    heads = [re.split("[,:] ", line)[0].rpartition(" ")[0] for line in lines]
    fitting = [(len(head), line) for head, line in zip(heads, lines, strict=True) if is_in(leaf, head)]
    return max(fitting, default=(0, ""))[1]


def is_in(leaf, path):
    return not path or f"{leaf}/".startswith(f"{path}/")


def dict_keys(path):
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def check(old, new):
    """The state and report of `transplant`, which keeps its promises."""
    state, report = transplant(old, new)
    assert jax.tree.structure(state) == jax.tree.structure(new)
    leaves, like = named_paths(state), named_paths(new)
    of_old = {id(x): (name, path) for name, (path, x) in named_paths(old).items()}
    schedules = [x for name, (_, x) in named_paths(old).items() if name.endswith("num_updates")]
    assert len({id(x) for _, x in leaves.values()}) == len(leaves)
    for name, (path, x) in leaves.items():
        assert (x.shape, x.dtype) == (like[name][1].shape, like[name][1].dtype)
        line = line_of(name, report.carried + report.fresh)
        if x is like[name][1]:
            assert line in report.fresh
            continue
        assert line in report.carried or line.endswith("only its totals are carried")
        if id(x) not in of_old:
            assert name.endswith("num_updates")
            assert any(np.array_equal(x, seen) for seen in schedules) or line.endswith(
                "at the norms seen so far"
            )
        elif "since it has no type" in line:
            assert dict_keys(of_old[id(x)][1]) == dict_keys(path)
        else:
            assert meaning(old, of_old[id(x)][1]) == meaning(new, path)
    carried = {of_old[id(x)][0] for _, x in leaves.values() if id(x) in of_old}
    assert all(name in carried or line_of(name, report.dropped) for name in named_paths(old))
    return state, report


@pytest.mark.parametrize("old", CHAINS)
def test_between_any_two_chains(old, states):
    for new in CHAINS:
        check(states[old][0], states[new][1])


@pytest.mark.parametrize("name", CHAINS)
def test_into_the_same_chain_all_is_carried(name, states):
    old, new = states[name]
    state, report = check(old, new)
    assert all(a is b for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(old), strict=True))
    assert report.fresh == report.dropped == ()


BASES = {"zscore": rules.zscore, "ema": rules.ema, "level": rules.level, "fixed": lambda: rules.fixed(1.0)}
AROUND = {
    "at_most": lambda rule: rules.at_most(rule, 1.0),
    "at_most, scheduled": lambda rule: rules.at_most(rule, SCHEDULE),
    "bounded, scheduled": lambda rule: rules.bounded(rule, 0.1, SCHEDULE),
    "loss": lambda rule: rules.loss_aware(rule),
    "loss, scheduled": lambda rule: rules.loss_aware(rule, SCHEDULE),
    "log": rules.in_log_space,
}
nests = st.tuples(st.sampled_from(sorted(BASES)), st.lists(st.sampled_from(sorted(AROUND)), max_size=4))


@settings(deadline=None, max_examples=60)
@given(old=nests, new=nests)
def test_a_rule_keeps_its_statistics_in_any_nest(old, new):
    """Of the same norms, or of as many logarithms of logarithms; and its schedules are at the norms seen."""

    def make(base, around):
        return trained(
            clip_by_rule(functools.reduce(lambda rule, name: AROUND[name](rule), around, BASES[base]()))
        )

    before, fresh = make(*old), make(*new)
    state, report = check(before, fresh)

    def innermost(rule_state):
        while hasattr(rule_state, "rule_state"):
            rule_state = rule_state.rule_state
        return rule_state

    same = old[0] == new[0] and old[1].count("log") == new[1].count("log")
    kept, was, like = (innermost(x.rule_state) for x in (state, before, fresh))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(was if same else like), strict=True):
        assert a is b
    assert state.num_steps is before.num_steps
    if same and new[0] != "fixed":
        assert report.carried[0] == "ClipState"
        assert not any("ScheduledState" in line for line in report.fresh)
