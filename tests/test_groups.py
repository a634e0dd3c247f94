"""`granularity`: norms, statistics and decisions of their own for parts of the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.cases import fast_jit, in_mesh
from zclip_jax import clip_by_rule, group_names, metrics, rules, zclip

pytestmark = pytest.mark.usefixtures("strict")


def random_tree(seed, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    return {
        "blocks": {"wq": leaf(3, 4, 4), "scale": leaf(3, 4)},
        "experts": [leaf(2, 2), leaf(2, 2)],
        "head": leaf(8),
        "step": jnp.asarray(7),
    }


def norms(tree):
    return [float(np.linalg.norm(np.ravel(np.asarray(x, np.float64)))) for x in jax.tree.leaves(tree)]


def is_block(path):
    return path[0].key == "blocks"


def kind(path):
    return path[0].key


def test_names():
    tree = random_tree(0)
    leaves = ("blocks/scale", "blocks/wq", "experts/0", "experts/1", "head")
    assert group_names(tree) == leaves
    assert group_names(tree, "global") == ("global",)
    assert group_names(tree, kind) == ("blocks", "experts", "head")
    stacked = ("blocks[0]", "blocks[1]", "blocks[2]", "experts", "head")
    assert group_names(tree, kind, stacked=is_block) == stacked


def test_each_leaf_has_its_norm_and_its_statistics():
    tx = clip_by_rule(rules.at_most(rules.zscore(warmup_steps=2), 1.5), granularity="leaf")
    alone = clip_by_rule(rules.at_most(rules.zscore(warmup_steps=2), 1.5))
    trees = [random_tree(seed) for seed in range(6)]
    trees[5]["head"] = trees[5]["head"] * 50
    state = tx.init(trees[0])
    alone_states = [alone.init(x) for x in jax.tree.leaves(trees[0])[:-1]]
    update, alone_update = fast_jit(tx.update), fast_jit(alone.update)
    for tree in trees:
        updates, state = update(tree, state)
        got = jax.tree.leaves(updates)
        for i, x in enumerate(jax.tree.leaves(tree)[:-1]):
            want, alone_states[i] = alone_update(x, alone_states[i])
            np.testing.assert_allclose(got[i], want, rtol=1e-5)
    assert int(updates["step"]) == 7
    logged = metrics(state)
    assert all(x.shape == (5,) for x in logged.values())
    np.testing.assert_allclose(logged["zclip/grad_norm"], norms(trees[5])[:-1], rtol=1e-6)
    np.testing.assert_array_equal(logged["zclip/fired"], [s.last.fired for s in alone_states])
    assert bool(logged["zclip/fired"][4])


def test_groups_by_label_and_layer():
    tree = random_tree(1)
    tx = clip_by_rule(rules.fixed(1.0), granularity=kind, stacked=is_block)
    updates, state = tx.update(tree, tx.init(tree))
    blocks = tree["blocks"]
    want = [
        *(np.hypot(*(np.linalg.norm(np.ravel(blocks[name][i])) for name in blocks)) for i in range(3)),
        np.hypot(*norms(tree["experts"])),
        norms(tree["head"])[0],
    ]
    np.testing.assert_allclose(state.last.grad_norm, want, rtol=1e-6)
    for i in range(3):
        layer = [updates["blocks"][name][i] for name in blocks]
        np.testing.assert_allclose(np.hypot(*norms(layer)), 1.0, rtol=1e-6)
    np.testing.assert_allclose(np.hypot(*norms(updates["experts"])), 1.0, rtol=1e-6)


def test_a_group_without_gradients_is_left_out():
    """An expert without tokens neither lowers its statistics nor is it clipped."""
    tx = clip_by_rule(rules.zscore(warmup_steps=3), granularity="leaf")
    state = tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})
    for i in range(12):
        idle = i % 2
        grads = {"a": jnp.ones(2), "b": jnp.zeros(2) if idle else jnp.ones(2) * (1 + 0.01 * i)}
        updates, state = tx.update(grads, state)
        if idle:
            np.testing.assert_array_equal(updates["b"], 0.0)
    np.testing.assert_array_equal(state.rule_state.num_norms, [12, 6])
    assert not np.asarray(state.last.fired).any()
    alone = clip_by_rule(rules.zscore(warmup_steps=3))
    busy = alone.init(None)
    for i in range(0, 12, 2):
        _, busy = alone.update(jnp.ones(2) * (1 + 0.01 * i), busy)
    np.testing.assert_allclose(state.rule_state.mean[1], busy.rule_state.mean, rtol=1e-6)


def test_a_nan_stays_in_its_group():
    tree = random_tree(2)
    tree["head"] = tree["head"].at[0].set(jnp.nan)
    tx = clip_by_rule(rules.fixed(100.0), granularity="leaf")
    updates, state = tx.update(tree, tx.init(tree))
    np.testing.assert_array_equal(updates["head"], jnp.zeros(8))
    np.testing.assert_array_equal(updates["blocks"]["wq"], tree["blocks"]["wq"])
    np.testing.assert_array_equal(state.num_nonfinite, [0, 0, 0, 0, 1])


def test_adagc_against_its_equations():
    """Per tensor, with the cap on the global norm during the warm-up."""
    tx = clip_by_rule(rules.adagc(warmup_steps=4, lam=1.05, decay=0.9), granularity="leaf")
    trees = [random_tree(seed, 0.2 if seed else 3.0) for seed in range(8)]
    state = tx.init(trees[0])
    gamma = np.full(5, np.inf)
    for t, tree in enumerate(trees):
        updates, state = tx.update(tree, state)
        n = np.array(norms(tree)[:-1])
        if t < 4:
            h = np.full(5, min(1.0 / np.sqrt(np.sum(n**2)), 1.0))
            gamma = np.minimum(gamma, h * n)
        else:
            h = np.minimum(1.05 * gamma / n, 1.0)
            gamma = 0.9 * gamma + 0.1 * h * n
        np.testing.assert_allclose(norms(updates)[:-1], h * n, rtol=1e-5)
        np.testing.assert_allclose(state.rule_state.ema, gamma, rtol=1e-5)


@pytest.mark.parametrize("checked", [True, False])
def test_one_all_reduce_for_all_groups(checked):
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:8])
    specs = {"a": P("x"), "b": P(None, "y"), "c": P(), "layers": P(None, ("x", "y"))}
    rng = np.random.default_rng(0)
    tree = {name: jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for name in specs}
    tx = clip_by_rule(
        rules.fixed(1.0),
        granularity="leaf",
        stacked=lambda path: path[0].key == "layers",
        axis_name=None if checked else ("x", "y"),
        split=None if checked else specs,
    )
    mapped = jax.shard_map(
        lambda tree: tx.update(tree, tx.init(tree)),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(specs, P()),
        check_vma=checked,
    )
    compiled = jax.jit(mapped).lower(tree).compile()
    updates, state = compiled(tree)
    want = [*(norms(tree[name])[0] for name in "abc"), *(norms(row)[0] for row in tree["layers"])]
    np.testing.assert_allclose(state.last.grad_norm, want, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(updates["layers"], axis=1), 1.0, rtol=1e-6)
    assert compiled.as_text().count(" all-reduce(") == 1


def test_scan_donation_and_wrappers():
    tree = random_tree(3)
    tx = optax.chain(
        optax.masked(
            clip_by_rule(rules.zscore(), granularity="leaf"), lambda t: jax.tree.map(lambda x: x.ndim > 0, t)
        ),
        optax.sgd(0.1),
    )
    state = tx.init(tree)
    step = jax.jit(lambda t, s: tx.update(t, s)[1], donate_argnums=1)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for _ in range(3):
        state = step(tree, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
    assert metrics(state)["zclip/num_steps"].tolist() == [3] * 5


def test_bad_granularity():
    with pytest.raises(
        ValueError, match=r"granularity must be 'global', 'leaf' or a function .* got 'tensor'"
    ):
        group_names({}, "tensor")


def test_bad_stacked():
    with pytest.raises(ValueError, match=r"stacked must be a function .* with granularity='global'"):
        clip_by_rule(rules.fixed(1.0), stacked=is_block)
    tx = clip_by_rule(rules.fixed(1.0), granularity="leaf", stacked=lambda path: True)
    with pytest.raises(ValueError, match="stacked names a, a scalar"):
        tx.init({"a": jnp.asarray(1.0)})


def test_another_tree_than_at_init():
    tx = clip_by_rule(rules.fixed(1.0), granularity="leaf")
    state = tx.init({"a": jnp.ones(2)})
    with pytest.raises(
        ValueError, match=r"the updates have 2 groups, but the state was made for shape \(1,\)"
    ):
        tx.update({"a": jnp.ones(2), "b": jnp.ones(2)}, state)
    with pytest.raises(
        ValueError, match=r"prior_norms must be \[steps, groups\] with granularity 'leaf', got .*\(1,\)"
    ):
        clip_by_rule(rules.fixed(1.0), granularity="leaf", prior_norms=[1.0])
    with pytest.raises(
        ValueError, match=r"prior_norms must have shape \[steps, 1\], for the groups a; got \(5, 2\)"
    ):
        clip_by_rule(rules.fixed(1.0), granularity="leaf", prior_norms=np.ones((5, 2))).init(
            {"a": jnp.ones(2)}
        )


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_fault_in_one_tensor_does_not_reach_the_others_through_the_global_norm(bad):
    tx = clip_by_rule(rules.adagc(warmup_steps=3), granularity="leaf")
    clean = {"a": jnp.full(4, 0.1), "b": jnp.full(4, 0.1)}
    state = tx.init(clean)
    updates, state = tx.update({"a": jnp.full(4, 50.0), "b": jnp.full(4, bad)}, state)
    np.testing.assert_allclose(jnp.linalg.norm(updates["a"]), 1.0, rtol=1e-6)
    for _ in range(5):
        updates, state = tx.update(clean, state)
    np.testing.assert_allclose(updates["a"], clean["a"], rtol=1e-6)


def test_no_groups_at_all():
    tx = clip_by_rule(rules.zscore(), granularity="leaf")
    grads = {"step": jnp.asarray(1)}
    updates, state = tx.update(grads, tx.init(grads))
    assert updates == grads
    assert state.num_steps.shape == (0,)


def test_zclip_takes_granularity():
    tx = zclip(granularity="leaf", max_grad_norm=1.0)
    tree = random_tree(0)
    updates, _ = tx.update(tree, tx.init(tree))
    assert max(norms(updates)[:-1]) <= 1.0 + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jit", "shard_map", "explicit", "vmap"])
def test_more_groups_than_a_compiler_reads_from_one_buffer(kind):
    """300 leaves, whose scales are read from rows of 16, each scaled to its own norm of 1."""
    grads = {f"w{i:03}": jnp.full(8, 0.01 * (i + 1)) for i in range(300)}
    tx = clip_by_rule(rules.fixed(1.0), granularity="leaf")

    def clip(tree):
        return tx.update(tree, tx.init(tree))[0]

    if kind == "jit":
        got = jax.jit(clip)(grads)
    elif kind == "vmap":
        both = jax.tree.map(lambda x: jnp.stack([2 * x, x]), grads)
        got = jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(clip))(both))
    elif kind == "shard_map":
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
        got = jax.jit(jax.shard_map(clip, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(grads)
    else:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:8])
        with in_mesh(mesh):
            got = jax.jit(clip)(jax.device_put(grads, NamedSharding(mesh, P("x"))))
    for i, name in enumerate(grads):
        norm = 0.01 * (i + 1) * np.sqrt(8)
        np.testing.assert_allclose(got[name], np.asarray(grads[name]) * min(1, 1 / norm), rtol=1e-5)
