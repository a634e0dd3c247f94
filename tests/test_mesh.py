"""One norm on every mesh: each way of writing the step, against NumPy's norm of the gathered arrays."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.cases import fast_jit
from zclip_jax import clip_by_rule, rules, zclip
from zclip_jax._norm import global_norm

MESHES = {"8": {"x": 8}, "4,2": {"x": 4, "y": 2}, "2,2,2": {"x": 2, "y": 2, "z": 2}}
each_mesh = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)


def make_mesh(sizes, kind=AxisType.Auto):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes), devices=jax.devices()[:8])


def specs_over(names):
    """Ways to split a matrix: over no axis, each one, all on one side, some on each side."""
    first, *rest = names
    out = [P(), P(first), P(None, first), P(tuple(names)), P(None, tuple(reversed(names)))]
    out += [P(name) for name in rest]
    if rest:
        out += [P(first, tuple(rest)), P(rest[-1], first)]
    return out


def make_tree(sizes, dtype=np.float32, seed=0):
    """A leaf per spec, split evenly by it, and the specs."""
    specs = {f"leaf{i}": spec for i, spec in enumerate(specs_over(list(sizes)))}
    rng = np.random.default_rng(seed)
    tree = {
        name: jnp.asarray(rng.standard_normal((8, 16)) * 10.0 ** rng.integers(-2, 2), dtype) for name in specs
    }
    return tree, specs


def numpy_norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))


def put(tree, specs, mesh):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


TX = clip_by_rule(rules.at_most(rules.zscore(), 1.0))


def step(tx, grads, state):
    updates, state = tx.update(grads, state)
    return updates, state


def check(updates, state, tree, rtol=1e-6):
    norm = numpy_norm(tree)
    for shard in state.last.grad_norm.addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data).ravel(), norm, rtol=rtol)
    for name, x in tree.items():
        assert updates[name].dtype == x.dtype
        np.testing.assert_allclose(
            np.asarray(updates[name], np.float32),
            np.asarray((np.asarray(x, np.float32) / np.float32(norm)).astype(x.dtype), np.float32),
            rtol=2e-2 if x.dtype == jnp.bfloat16 else 2e-6,
        )


@each_mesh
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_plain_jit(sizes, dtype, kind):
    mesh = make_mesh(sizes, kind)
    tree, specs = make_tree(sizes, dtype)
    grads = put(tree, specs, mesh)
    state = fast_jit(TX.init, out_shardings=NamedSharding(mesh, P()))(grads)
    updates, after = fast_jit(TX.update)(grads, state)
    check(updates, after, tree)
    for name, spec in specs.items():
        assert updates[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        if kind is AxisType.Explicit:
            assert jax.typeof(updates[name]) == jax.typeof(grads[name])
    if kind is AxisType.Explicit:
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


def shard_mapped(sizes, specs, tx, *, types=None, **kwargs):
    """The update inside shard_map; `types` collects the types of what goes in and comes out."""

    def update(grads):
        state = tx.init(grads)
        updates, after = tx.update(grads, state)
        if types is not None:
            types.extend(jax.tree.map(jax.typeof, t) for t in (grads, updates, state, after))
        return updates, after

    return jax.shard_map(update, mesh=make_mesh(sizes), in_specs=(specs,), out_specs=(specs, P()), **kwargs)


@each_mesh
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_shard_map_by_its_types(sizes, dtype):
    tree, specs = make_tree(sizes, dtype)
    types = []
    updates, state = fast_jit(shard_mapped(sizes, specs, TX, types=types))(tree)
    check(updates, state, tree)
    grads_in, grads_out, state_in, state_out = types
    assert jax.tree.map(str, grads_in) == jax.tree.map(str, grads_out)
    assert jax.tree.map(str, state_in) == jax.tree.map(str, state_out)


@each_mesh
@pytest.mark.parametrize("how", ["specs", "predicate"])
def test_shard_map_without_types(sizes, how):
    tree, specs = make_tree(sizes)
    split = specs if how == "specs" else (lambda path: specs[path[0].key])
    tx = clip_by_rule(rules.fixed(1.0), axis_name=tuple(sizes), split=split)
    updates, state = fast_jit(shard_mapped(sizes, specs, tx, check_vma=False))(tree)
    check(updates, state, tree)


def test_shard_map_with_names_given_needlessly():
    sizes = MESHES["4,2"]
    tree, specs = make_tree(sizes)
    for names in ("x", ("y", "x")):
        tx = clip_by_rule(rules.fixed(1.0), axis_name=names)
        check(*fast_jit(shard_mapped(sizes, specs, tx))(tree), tree)


def test_equal_values_of_varying_type():
    """After an all_gather every device holds the same, though its type says that it varies."""
    sizes = MESHES["4,2"]
    tree, specs = make_tree(sizes)
    split = dict.fromkeys(tree, True) | {"leaf0": False}
    tree = {name: tree[name] for name in ("leaf0", "leaf3")}  # replicated, and split over both axes
    split = {name: split[name] for name in tree}

    def update(grads):
        shard = jax.lax.dynamic_slice_in_dim(grads["leaf0"], jax.lax.axis_index("x") * 2, 2)
        gathered = jax.lax.all_gather(shard, "x", tiled=True)
        assert "x" in str(jax.typeof(gathered))
        tx = clip_by_rule(rules.fixed(1.0), axis_name=("x", "y"), split=split)
        grads = {"leaf0": gathered, "leaf3": grads["leaf3"]}
        return tx.update(grads, tx.init(grads))[1].last.grad_norm

    mapped = jax.shard_map(
        update, mesh=make_mesh(sizes), in_specs=({n: specs[n] for n in tree},), out_specs=P()
    )
    np.testing.assert_allclose(fast_jit(mapped)(tree), numpy_norm(tree), rtol=1e-6)


@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}, {"z"}])
def test_partly_manual_mesh(manual):
    sizes = MESHES["2,2,2"]
    mesh = make_mesh(sizes)
    tree, specs = make_tree(sizes)

    def keep(part):
        names = tuple(n for n in ((part,) if isinstance(part, str) else part or ()) if n in manual)
        return names or None

    inner = {name: P(*map(keep, spec)) for name, spec in specs.items()}

    def update(grads):
        return TX.update(grads, TX.init(grads))

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(inner,), out_specs=(inner, P()), axis_names=manual)
    updates, state = fast_jit(mapped)(put(tree, specs, mesh))
    check(updates, state, tree)


def test_pmap():
    tree = {
        "split": jnp.asarray(np.random.default_rng(0).standard_normal((8, 5)), jnp.float32),
        "same": jnp.full((3,), 2.0),
    }
    want = numpy_norm(tree)
    for split in ({"split": True, "same": False}, lambda path: path[0].key == "split"):
        tx = zclip(axis_name="i", split=split)
        mapped = jax.pmap(
            lambda a, b, tx=tx: tx.update({"split": a, "same": b}, tx.init(a)), "i", in_axes=(0, None)
        )
        updates, state = mapped(tree["split"], tree["same"])
        np.testing.assert_allclose(state.last.grad_norm, np.full(8, want), rtol=1e-6)
        np.testing.assert_allclose(updates["same"], np.full((8, 3), 2.0 / want), rtol=1e-6)


def test_pmap_with_averaged_gradients_needs_nothing():
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((8, 5)), jnp.float32)

    def update(g):
        return TX.update(jax.lax.pmean(g, "i"), TX.init(g))[1].last.grad_norm

    want = numpy_norm(np.asarray(grads).mean(0))
    np.testing.assert_allclose(jax.pmap(update, "i")(grads), np.full(8, want), rtol=1e-6)


def test_a_prefix_and_specs_of_unmapped_axes():
    """Specs may name axes that are not mapped here: over those the arrays are whole."""
    sizes = MESHES["4,2"]
    tree, _ = make_tree(sizes)
    groups = {"a": {"w": tree["leaf1"]}, "b": {"w": tree["leaf0"], "v": tree["leaf0"]}}
    tx = clip_by_rule(rules.fixed(1.0), axis_name=("x", "y"), split={"a": P("x", "elsewhere"), "b": False})
    in_specs = {"a": {"w": P("x")}, "b": {"w": P(), "v": P()}}
    mapped = shard_mapped(sizes, in_specs, tx, check_vma=False)
    _, state = fast_jit(mapped)(groups)
    np.testing.assert_allclose(state.last.grad_norm, numpy_norm(groups), rtol=1e-6)


NAMES = ("x", "y", "z")


@st.composite
def split_trees(draw):
    def axes():
        return st.lists(st.sampled_from(NAMES), unique=True, max_size=3)

    leaves = draw(st.lists(st.tuples(axes(), st.integers(0, 3), st.booleans()), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tree, specs = [], []
    for names, extra, half in leaves:
        at = draw(st.integers(0, len(names)))
        specs.append(P(tuple(names[:at]) or None, tuple(names[at:]) or None))
        shape = (8 * draw(st.integers(1, 2)), 8, *(2,) * extra)
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3)
        tree.append(jnp.asarray(values, jnp.bfloat16 if half else jnp.float32))
    return tree, specs


@pytest.mark.slow
@given(split_trees())
@settings(max_examples=12, deadline=None)
def test_random_trees(case):
    tree, specs = case
    mesh = make_mesh(MESHES["2,2,2"])
    norms = [
        jax.jit(jax.shard_map(global_norm, mesh=mesh, in_specs=(specs,), out_specs=P()))(tree),
        jax.jit(
            jax.shard_map(
                lambda tree: global_norm(tree, NAMES, specs),
                mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False,
            )
        )(tree),
        jax.jit(global_norm)(put(tree, specs, mesh)),
    ]  # fmt: skip
    np.testing.assert_allclose(norms, numpy_norm(tree), rtol=1e-6)


def collectives(compiled):
    return re.findall(
        r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
        compiled.as_text(),
    )


@each_mesh
@pytest.mark.parametrize("copies", [1, 5])
@pytest.mark.parametrize("checked", [True, False])
def test_one_all_reduce_for_any_number_of_leaves(sizes, copies, checked):
    tree, specs = make_tree(sizes)
    tree = {f"{name}{i}": x for name, x in tree.items() for i in range(copies)}
    specs = {f"{name}{i}": x for name, x in specs.items() for i in range(copies)}
    tx = TX if checked else zclip(axis_name=tuple(sizes), split=specs)
    mapped = shard_mapped(sizes, specs, tx, check_vma=checked)
    assert collectives(fast_jit(mapped).lower(tree).compile()) == ["all-reduce"]


@each_mesh
def test_collectives_under_jit_do_not_grow_with_the_leaves(sizes):
    mesh = make_mesh(sizes)
    counts, plain = [], []
    for copies in (1, 6):
        tree, specs = make_tree(sizes)
        tree = {f"{name}{i}": x for name, x in tree.items() for i in range(copies)}
        specs = {f"{name}{i}": specs[name] for name in specs for i in range(copies)}
        grads = put(tree, specs, mesh)
        compiled = fast_jit(TX.update).lower(grads, TX.init(grads)).compile()
        counts.append(len(collectives(compiled)))
        squares = fast_jit(lambda tree: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))
        plain.append(len(collectives(squares.lower(grads).compile())))
    assert counts == plain
    # One for each way of splitting, once XLA has combined them; before JAX 0.10 it did not on CPUs.
    if jax.__version_info__ >= (0, 10):
        assert counts[0] == counts[1] <= len(specs_over(list(sizes)))


def test_an_unbound_axis_is_a_clear_error():
    tx = zclip(axis_name="data")
    with pytest.raises(ValueError, match="axis_name='data' is no mapped axis here"):
        jax.jit(tx.update)(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"leaf0": True}, "split does not match the updates"),
        ([True], "split does not match the updates"),
        (1.0, "split does not match|must give a bool or a PartitionSpec, got 1.0"),
        (lambda path: "x", "split must give a bool or a PartitionSpec, got 'x' for "),
        (P("y"), r"split says that .*leaf0.* is split over 'y', which axis_name=\('x',\) lacks"),
    ],
)
def test_a_bad_split_is_a_clear_error(split, message):
    sizes = MESHES["4,2"]
    tree, specs = make_tree(sizes)
    tx = zclip(axis_name="x", split=split)
    with pytest.raises(ValueError, match=message):
        fast_jit(shard_mapped(sizes, specs, tx, check_vma=False))(tree)


def test_split_alone_is_an_error():
    with pytest.raises(ValueError, match="split needs axis_name"):
        zclip(split=True)


def test_an_unreduced_leaf_is_a_clear_error():
    mesh = make_mesh({"x": 4, "y": 2}, AxisType.Explicit)
    a = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, "x")))
    b = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x", None)))

    def update(a, b):
        grads = {"w": jnp.einsum("ij,jk->ik", a, b, out_sharding=NamedSharding(mesh, P(unreduced={"x"})))}
        return TX.update(grads, TX.init(grads))

    with pytest.raises(ValueError, match=r"gradient \['w'\] is unreduced over \['x'\]"):
        jax.jit(update)(a, b)


def test_devices_agree_over_a_run_with_a_spike():
    """The decisions of eight devices are those of one, step for step."""
    rng = np.random.default_rng(3)
    grads = rng.standard_normal((50, 16, 8)).astype(np.float32)
    grads[40] *= 30
    tx = zclip(max_grad_norm=None, warmup_steps=10)

    def run(grads):
        def body(state, g):
            updates, state = tx.update({"w": g}, state)
            return state, (state.last, updates["w"])

        return jax.lax.scan(body, tx.init(grads), grads)[1]

    alone, updates = fast_jit(run)(jnp.asarray(grads))
    assert bool(alone.fired[40])
    for sizes in MESHES.values():
        spec = P(None, tuple(sizes))
        mapped = jax.shard_map(run, mesh=make_mesh(sizes), in_specs=spec, out_specs=(P(), spec))
        together, split_updates = fast_jit(mapped)(jnp.asarray(grads))
        np.testing.assert_array_equal(together.fired, alone.fired)
        np.testing.assert_allclose(together.clip_scale, alone.clip_scale, rtol=1e-5)
        np.testing.assert_allclose(split_updates, updates, rtol=1e-5)


def test_averaging_over_replicas_comes_first():
    """Gradients of replicas are averaged before the clip, by the user, as before any optimizer."""
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)
    tx = clip_by_rule(rules.fixed(1.0))

    def update(g):
        return tx.update(jax.lax.pmean(g[0], "x"), tx.init(g))[1].last.grad_norm

    mapped = jax.shard_map(update, mesh=make_mesh({"x": 8}), in_specs=P("x"), out_specs=P())
    np.testing.assert_allclose(fast_jit(mapped)(grads), numpy_norm(np.asarray(grads).mean(0)), rtol=1e-6)
