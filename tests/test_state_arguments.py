"""Arguments: of other people's chains, that are no numbers, of the wrong kind; and names that name two leaves."""

import functools
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zclip_jax
from tests.bad_arguments import CALLS
from tests.transformations import BY_NAME, GRADS, LOSS, PARAMS, TRANSFORMATIONS, assert_same, each, mark_slow
from zclip_jax import clip_by_rule, decide, group_names, metrics, rules, skip_by_rule, zclip

QUICK = [t for t in TRANSFORMATIONS if not t.slow]


def names_of_arguments():
    """Those of every function of the package, and what optax and training loops pass, as far as chains take them."""
    modules = [x for name, x in inspect.getmembers(zclip_jax, inspect.ismodule)]
    modules += [inspect.getmodule(x) for _, x in inspect.getmembers(zclip_jax, callable)]
    modules += [inspect.getmodule(getattr(rules, name)) for name in rules.__all__]
    found = {
        "grad",
        "value_fn",
        "loss",
        "step",
        "count",
        "key",
        "model",
        "batch",
        "global_norm",
        "decision",
        "outcome",
    }
    for module in {m for m in modules if m is not None}:
        for _, function in inspect.getmembers(module, inspect.isfunction):
            found |= set(inspect.signature(function).parameters)
    plain = optax.chain(optax.identity(), optax.identity())

    def is_taken(name):
        try:
            plain.update(1.0, plain.init(1.0), None, **{name: 0})
        except TypeError:
            return False
        return True

    return sorted(name for name in found - {"value"} if is_taken(name))


NAMES = names_of_arguments()


def test_the_names_are_found():
    assert {"norm", "rule", "global_norm", "grad", "value_fn", "decision", "axis_name"} <= set(NAMES)


@each(QUICK)
def test_extra_arguments_of_others_pass(name):
    """All names at once, with what no rule could take, in place of what is ours as well: the program is the same."""
    tx = BY_NAME[name].make()
    state = tx.init(PARAMS)
    bare = functools.partial(tx.update, value=LOSS[0])
    given = functools.partial(bare, **dict.fromkeys(NAMES, object()))
    want = jax.make_jaxpr(bare)(GRADS[0], state, PARAMS)
    assert str(jax.make_jaxpr(given)(GRADS[0], state, PARAMS)) == str(want)


@mark_slow("name", NAMES, ["norm", "rule", "global_norm", "decision", "axis_name"])
def test_each_extra_argument_alone(name):
    for tx in (
        clip_by_rule(rules.adagc(), granularity="leaf"),
        clip_by_rule(rules.at_most(rules.fixed(lambda step: 1.0), 1.0)),
        skip_by_rule(optax.sgd(1.0), rules.loss_aware(rules.fixed(1.0))),
    ):
        state = tx.init(PARAMS)
        step = functools.partial(tx.update, value=LOSS[0])
        want = jax.eval_shape(step, GRADS[0], state, PARAMS)
        assert jax.eval_shape(functools.partial(step, **{name: 7.0}), GRADS[0], state, PARAMS) == want


def test_a_loss_of_another_meaning_is_ignored_by_rules_that_use_none():
    tx = zclip()
    state = tx.init(PARAMS)
    assert_same(tx.update(GRADS[0], state, value="loss"), tx.update(GRADS[0], state))


@pytest.fixture(scope="module")
def errors():
    """What each call of `bad_arguments` raised, in a process where signatures are not checked."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.bad_arguments"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


OF_ARGUMENTS = sorted({name.rpartition("-")[0] for name, call in CALLS.items() if call.optional})


@pytest.mark.parametrize("argument", OF_ARGUMENTS)
def test_a_bad_argument_is_named(argument, errors):
    """Each value is taken and works, or is refused by a ValueError that names the argument and shows the value."""
    for name, call in CALLS.items():
        if name.rpartition("-")[0] == argument and errors[name] is not None:
            kind, message = errors[name]
            assert (kind, [word for word in call.words if word not in message]) == ("ValueError", []), message


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not call.optional])
def test_a_mistake_is_a_clear_error(name, errors):
    assert errors[name] is not None
    kind, message = errors[name]
    assert (kind, [word for word in CALLS[name].words if word not in message]) == ("ValueError", []), message


@pytest.mark.parametrize("norm", [0.1, 0.25, 0.5, 1.0, 5.0])
def test_the_norm_of_clip_by_global_norm_as_first_argument_is_not_silent(norm):
    """`zclip(0.5)` would set alpha: a warning or an error says max_grad_norm."""
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            zclip(norm)
        except ValueError as error:
            said.append(str(error))
    said += [str(warning.message) for warning in caught]
    assert any("max_grad_norm" in text for text in said), said


def test_usual_decays_are_silent():
    for alpha in (0.9, 0.95, 0.97, 0.99):
        zclip(alpha)
        zclip(alpha=alpha, max_grad_norm=0.5)


def norms_by_group(tree, **frame):
    tx = clip_by_rule(rules.fixed(1e9), **frame)
    _, state = tx.update(tree, tx.init(tree))
    return np.sort(np.atleast_1d(metrics(state)["zclip/grad_norm"]))


KEYS = st.sampled_from(["a", "b", "a/b", "a/a", "", "0", "a[0]", "value"])
TREES = st.recursive(
    st.just(0),
    lambda children: st.one_of(
        st.dictionaries(KEYS, children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=2),
    ),
    max_leaves=6,
)


def numbered(tree):
    """The tree with leaves of norms 1, 2, 3, …, `[2, 1]` each."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([np.float32([[i + 1], [0]]) for i in range(len(leaves))])


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(TREES)
@hypothesis.example({"a/b": 0, "a": {"b": 0}})
@hypothesis.example({"a[0]": 0, "a": 0})
@hypothesis.example({"": 0, "value": {"value": 0}})
@hypothesis.example([0, {"0": 0}, {"0/value": 0}])
def test_distinct_leaves_are_distinct_groups(tree):
    """Whatever their names: as many groups as leaves, or layers, and names that differ."""
    tree = numbered(tree)
    count = len(jax.tree.leaves(tree))
    stacked = sum(len(path) % 2 == 1 for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    by_layer = {"granularity": "leaf", "stacked": lambda path: len(path) % 2 == 1}
    for frame, groups in (({"granularity": "leaf"}, count), (by_layer, count + stacked)):
        names = group_names(tree, **frame)
        assert len(names) == len(set(names)) == groups
        assert jax.eval_shape(clip_by_rule(rules.fixed(1.0), **frame).init, tree).num_steps.shape == (groups,)


def test_each_leaf_has_its_own_norm():
    tree = numbered({"a/b": 0, "a": {"b": 0, "a[0]": 0}, "": [0, 0], "0": {"": 0}})
    np.testing.assert_array_equal(norms_by_group(tree, granularity="leaf"), np.arange(1, 7))


def test_a_label_is_no_layer_of_another():
    tree = {"a[0]": np.float32([3.0]), "a": np.float32([[4.0], [5.0]])}
    frame = {"granularity": lambda path: path[0].key, "stacked": lambda path: path[0].key == "a"}
    np.testing.assert_array_equal(norms_by_group(tree, **frame), [3.0, 4.0, 5.0])
    assert len(set(group_names(tree, **frame))) == 3


def test_equal_labels_are_one_group():
    tree = {"a/b": np.float32([3.0]), "a": {"b": np.float32([4.0])}, "c": np.float32([2.0])}
    np.testing.assert_array_equal(norms_by_group(tree, granularity=lambda path: path[0].key[0]), [2.0, 5.0])


def test_names_that_end_in_value_are_kept():
    tree = {"attn": {"query": np.ones(2), "key": np.ones(2), "value": np.ones(2)}, "value": np.ones(1)}
    assert group_names(tree) == ("attn/key", "attn/query", "attn/value", "value")

    class Attention(nnx.Module):
        def __init__(self):
            self.value, self.key = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))

    assert group_names(nnx.state(Attention())) == ("key", "value")
    assert group_names(nnx.to_pure_dict(nnx.state(Attention()))) == ("key", "value")


def test_two_clip_states_never_share_a_metric():
    inner = optax.named_chain(("y", zclip()), ("z", zclip()))
    tx = optax.named_chain(("x", inner), ("x/y", zclip()), ("", zclip()))
    logged = metrics(tx.init(PARAMS))
    assert len(logged) == 4 * len(metrics(zclip().init(PARAMS)))


def test_zero_norms_are_said_where_published_decisions_are_promised():
    """`[0, 1] * 12 + [0, 3]` fires in the published code, whose zeros count; here a zero is no sample."""
    rule = rules.zscore(patience=None)
    state = rule.init()
    for norm in [0.0, 1.0] * 12 + [0.0, 3.0]:
        outcome, state = decide(rule, norm, state)
    assert not bool(outcome.fired)
    assert int(state.num_norms) == 13
    root = pathlib.Path(__file__).parents[1]
    texts = [zclip.__doc__, *((root / name).read_text() for name in ("README.md", "docs/coming-from.md"))]
    for text in texts:
        assert "step for step" in text
        assert re.search(r"\bzero\b", text[text.index("step for step") :][:600])
    patience = rules.zscore.__doc__.partition("patience:")[2].partition("robust_warmup:")[0]
    assert "None" in patience
    assert "published" not in patience or "zero" in patience
