"""A transformation that changes nothing and remembers: what spiked, when, and in which group of leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zclip_jax._checks import check_choice
from zclip_jax._groups import Granularity, Groups, Stacked, check_granularity, find_groups
from zclip_jax._history import Comparison, History, compare
from zclip_jax._norm import AxisNames, check_split, square_sums
from zclip_jax._numerics import as_float, increment, safe_sqrt
from zclip_jax._rule import Outcome, Rule, check_rule, decide
from zclip_jax._state import check_state
from zclip_jax._typing import PyTree
from zclip_jax._watch_state import LARGEST_SPIKE, Moments, WatchState, check_groups, init_watch_state
from zclip_jax.rules import level

WHAT = ("grads", "updates")


def watch(
    what: str,
    *,
    rule: Rule | None = None,
    granularity: Granularity = "leaf",
    stacked: Stacked = None,
    axis_name: AxisNames = None,
    split: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Changes nothing and remembers what spiked, when, and in which group of leaves.

    Put `watch("grads")` ahead of the clipping, and `watch("updates")` behind the optimizer. The state has, for
    each group, the last norm and a moving mean and variance of its logarithm; and of the last step, the last spike
    and the largest spike the group with the largest share of the squared norm and the group furthest above its own
    history. A large share alone says little: often one tensor has most of the norm on every step. Of the last
    non-finite step the state has which groups were finite and which were not.

    A zero norm is not absorbed into a history, nor is one that is NaN or infinite, and a spike hardly moves it.

    On updates the ratio of their RMS to that of the weights is held against its own history, too.

    Args:
      what: `"grads"` or `"updates"`: what stands at this place of the chain.
      rule: says from the norm of all groups which steps are spikes; `rules.level()` unless given. A group far below
        the level of the others may rise 100 times without being seen by it; `watch/grads/rise_group` and
        `watch/grads/rise` of `metrics` name the group furthest above its own history on every step.
      granularity: as in `clip_by_rule`: what a group is.
      stacked: as in `clip_by_rule`: which leaves hold a layer in each entry of their leading axis.
      axis_name: as in `clip_by_rule`.
      split: as in `clip_by_rule`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `WatchState`. Passes `value=` and other extra arguments of
      `update` on to the rule. On updates, `update` needs the parameters.

    Raises:
      ValueError: an argument is none of those accepted.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from zclip_jax import metrics, watch, zclip
      >>> tx = optax.chain(watch("grads"), zclip(), optax.adamw(1e-3), watch("updates"))
      >>> params = {"head": jnp.ones(2), "body": jnp.ones(2)}
      >>> state = tx.init(params)
      >>> for size in [0.1, 0.1, 0.1, 7.0]:
      ...     grads = {"head": jnp.asarray([30.0, 40.0]), "body": jnp.asarray([3.0, 4.0]) * size}
      ...     _, state = tx.update(grads, state, params)
      >>> logged = metrics(state)
      >>> round(float(logged["watch/grads/norm"]), 1), round(float(logged["watch/grads/rise"]))
      (61.0, 70)
      >>> int(logged["watch/grads/rise_group"]), int(logged["watch/grads/share_group"])
      (0, 1)
    """
    check_choice("what", what, WHAT)
    rule = level() if rule is None else rule
    check_rule(rule)
    check_granularity(granularity, stacked)
    check_split(axis_name, split)

    def find(tree: PyTree) -> Groups:
        groups = find_groups(tree, granularity, stacked)
        if groups.shape and groups.names:
            return groups
        # One group for "global", and of norm 0 where there is nothing, as in a part of a partition without leaves.
        slots = tuple(None if slot is None else 0 for slot in groups.slots)
        return Groups(groups.names or ("none",), (1,), slots)

    def init(params: PyTree) -> PyTree:
        groups = find(params)
        return init_watch_state(rule, groups, with_ratios=what == "updates")

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        check_state(state, WatchState)
        groups = find(updates)
        check_groups(state, groups, what)
        state = jax.tree.map(jnp.asarray, state)  # a checkpoint may hold NumPy arrays
        if what == "grads":
            sizes = _measure(square_sums(updates, groups.slots, groups.shape, axis_name, split))
            measured = [sizes]
        else:
            if params is None:
                raise ValueError(
                    'watch("updates") compares the updates with the parameters: pass them, as in '
                    "tx.update(grads, state, params); got params=None"
                )
            both = _both(updates, params, groups, axis_name, split)
            sizes, weights = (_measure(squares) for squares in jnp.split(both, 2))
            measured = [sizes, _ratios(sizes, weights)]
        extra_args["global_norm"] = jnp.where(jnp.isfinite(sizes.whole), sizes.whole, 0.0)
        outcome, rule_state = decide(rule, sizes.whole, state.rule_state, **extra_args)
        compared, history = compare(
            state.history, jnp.concatenate([jnp.append(x.norms, x.whole) for x in measured])
        )
        return updates, _after(state, outcome, rule_state, history, measured, compared)

    return optax.GradientTransformationExtraArgs(init, update)


class _Sizes(NamedTuple):
    """Norms or ratios: of each group, and of all together."""

    norms: jax.Array
    whole: jax.Array


def _measure(squares: jax.Array) -> _Sizes:
    # Else XLA gathers the sums of all leaves anew in each of the many operations on them, and compiles for minutes.
    squares = jax.lax.optimization_barrier(squares)
    return _Sizes(as_float(safe_sqrt(squares)), as_float(safe_sqrt(jnp.sum(squares))))


def _ratios(sizes: _Sizes, weights: _Sizes) -> _Sizes:
    """Of as many entries, so that the ratio of the norms is that of the RMS; 0 where the weights are zero."""
    return _Sizes(*map(_times, sizes, weights))


def _both(updates: PyTree, params: PyTree, groups: Groups, axis_name: AxisNames, split: Any) -> jax.Array:
    """The square sums of the groups of the updates and then of the parameters, in one all-reduce."""
    if jax.tree.structure(params) != jax.tree.structure(updates):
        raise ValueError(
            f"params must have the structure of the updates, {jax.tree.structure(updates)}; got "
            f"{jax.tree.structure(params)}"
        )
    num_groups = len(groups.names)
    shifted = tuple(None if slot is None else np.add(slot, num_groups) for slot in groups.slots)
    if split is not None:
        given = split
        split = (lambda path: given(path[1:])) if callable(given) else (given, given)
    return square_sums((updates, params), groups.slots + shifted, (2 * num_groups,), axis_name, split)


def _after(
    state: WatchState,
    outcome: Outcome,
    rule_state: PyTree,
    history: History,
    measured: list[_Sizes],
    compared: Comparison,
) -> WatchState:
    """The state after a step."""
    norms, whole = measured[0]
    num_groups = norms.size
    own, above = _part(compared, 0, num_groups), _part(compared, num_groups, num_groups + 1)
    rise_group = jnp.argmax(jnp.where(own.known, own.z_score, -jnp.inf))
    finite = jnp.where(jnp.isfinite(norms), norms, 0.0)
    share_group, share_norm = jnp.argmax(finite), jnp.max(finite)
    bad = ~jnp.isfinite(norms)
    num_steps = increment(state.num_steps)
    seen: dict[str, Any] = {
        "step": num_steps,
        "norm": whole,
        "level": above.level[0],
        "allowed": outcome.threshold,
        "trigger": outcome.trigger,
        "fired": outcome.fired,
        "nonfinite": outcome.nonfinite,
        "num_nonfinite_groups": jnp.sum(bad),
        "share_group": share_group,
        "share": _share(share_norm, finite),
        "share_norm": share_norm,
        "rise_group": rise_group,
        "rise": own.times_level[rise_group],
        "rise_norm": jnp.where(own.known[rise_group], norms[rise_group], 0.0),
        "rise_z": own.z_score[rise_group],
        "ratio": 0.0,
        "ratio_rise": 0.0,
        "ratio_group": 0,
        "ratio_group_rise": 0.0,
    }
    if len(measured) == 2:
        first = num_groups + 1
        ratios = _part(compared, first, first + num_groups)
        ratio_group = jnp.argmax(jnp.where(ratios.known, ratios.z_score, -jnp.inf))
        seen |= {
            "ratio": measured[1].whole,
            "ratio_rise": compared.times_level[-1],
            "ratio_group": ratio_group,
            "ratio_group_rise": ratios.times_level[ratio_group],
        }
    old = state.moments
    larger = (old.step[LARGEST_SPIKE] == 0) | (
        _times(whole, above.level[0]) > _times(old.norm[LARGEST_SPIKE], old.level[LARGEST_SPIKE])
    )
    now = jnp.stack([jnp.asarray(True), outcome.fired, outcome.fired & larger, outcome.nonfinite])
    moments = {
        name: jnp.where(now, jnp.asarray(x, getattr(old, name).dtype), getattr(old, name))
        for name, x in seen.items()
    }
    new = WatchState(
        rule_state=rule_state,
        num_steps=num_steps,
        num_fired=increment(state.num_fired, outcome.fired),
        num_nonfinite=increment(state.num_nonfinite, outcome.nonfinite),
        group_ids=state.group_ids,
        norms=norms,
        nonfinite_groups=jnp.where(outcome.nonfinite, bad, state.nonfinite_groups),
        history=history,
        moments=Moments(**moments),
    )
    return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), new, state)


def _part(compared: Comparison, start: int, end: int) -> Comparison:
    return Comparison(*(x[start:end] for x in compared))


def _share(largest: jax.Array, norms: jax.Array) -> jax.Array:
    """Of the largest norm in the squares of all; over the largest, since squares may overflow or be too small."""
    over = _times(norms, largest)
    return jnp.where(largest > 0, 1 / jnp.maximum(jnp.sum(over * over), 1.0), 0.0)


def _times(norm: jax.Array, level: jax.Array) -> jax.Array:
    """The norm over the level; 0 where there is none."""
    return jnp.where(level > 0, norm / jnp.where(level > 0, level, 1.0), 0.0)
