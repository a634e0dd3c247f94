"""A transformation that changes nothing and remembers: what spiked, when, and in which group of leaves."""

import dataclasses
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zclip_jax._checks import check_choice
from zclip_jax._flax import register_with_flax
from zclip_jax._groups import Granularity, Groups, Stacked, check_granularity, find_groups
from zclip_jax._history import Comparison, History, compare, init_history
from zclip_jax._norm import AxisNames, check_split, square_sums
from zclip_jax._numerics import as_float, increment, safe_sqrt
from zclip_jax._rule import Outcome, Rule, check_rule, decide, init_state
from zclip_jax._state import check_state
from zclip_jax._typing import BoolEach, FloatEach, IntEach, IntScalar, PyTree, dataclass
from zclip_jax.rules import level

WHAT = ("grads", "updates")
# The steps of `Moments`.
LAST, LAST_SPIKE, LARGEST_SPIKE, LAST_NONFINITE = range(4)


@dataclass(frozen=True)
class Moments:
    """What four steps showed: the last one, the last spike, the largest spike and the last non-finite step.

    Each field is an array `[4]` in this order. The largest spike is the one furthest above its level, as a multiple.

    Args:
      step: int32, the number of updates up to this one, itself included; 0 where there was no such step.
      norm: the norm of all groups; NaN or infinite if that of one is.
      level: the geometric mean of the norms before; 0 before the first.
      allowed: the norm that the rule allowed; `inf` where there was no limit.
      trigger: the norm above which the rule would have called the step a spike.
      fired: bool, the rule called it a spike.
      nonfinite: bool, the norm was NaN or infinite.
      num_nonfinite_groups: int32, groups whose norm was NaN or infinite.
      share_group: int32, the group with the largest share of the squared norm of all finite groups.
      share: that share, 0 to 1; 0 where no group had a finite norm above zero.
      share_norm: the norm of that group.
      rise_group: int32, the group furthest above its own history, in its own standard deviations.
      rise: its norm, as a multiple of its own level; 0 where no group had a history.
      rise_norm: its norm.
      rise_z: how many standard deviations the logarithm of its norm lay above the mean.
      ratio: the RMS of the updates over that of the weights, of all groups; 0 on gradients.
      ratio_rise: this ratio, as a multiple of its own level; 0 where it has no history.
      ratio_group: int32, the group whose ratio is furthest above its own history.
      ratio_group_rise: the ratio of that group, as a multiple of its own level; 0 where none has a history.
    """

    step: IntEach
    norm: FloatEach
    level: FloatEach
    allowed: FloatEach
    trigger: FloatEach
    fired: BoolEach
    nonfinite: BoolEach
    num_nonfinite_groups: IntEach
    share_group: IntEach
    share: FloatEach
    share_norm: FloatEach
    rise_group: IntEach
    rise: FloatEach
    rise_norm: FloatEach
    rise_z: FloatEach
    ratio: FloatEach
    ratio_rise: FloatEach
    ratio_group: IntEach
    ratio_group_rise: FloatEach


MOMENT = tuple(field.name for field in dataclasses.fields(Moments))


@dataclass(frozen=True)
class WatchState:
    """State of `watch`; read it with `zclip_jax.metrics` and `zclip_jax.spikes`.

    Args:
      rule_state: the state of the rule that says what a spike is.
      num_steps: int32, calls of `update` so far; the counts stay at 2**31 - 1 once they are there.
      num_fired: int32, steps that the rule called spikes.
      num_nonfinite: int32, steps whose norm was NaN or infinite.
      group_ids: int32 `[groups]`, a checksum of the name of each group, by which `spikes` finds the names.
      norms: float `[groups]`, the norms of the last step.
      nonfinite_groups: bool `[groups]`, which groups were NaN or infinite on the last non-finite step.
      history: of the norms of the groups and then of all together; on updates also of the ratios, in the same order.
      moments: what the last step and the remembered ones showed.
    """

    rule_state: PyTree
    num_steps: IntScalar
    num_fired: IntScalar
    num_nonfinite: IntScalar
    group_ids: IntEach
    norms: FloatEach
    nonfinite_groups: BoolEach
    history: History
    moments: Moments


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
      rule: says from the norm of all groups which steps are spikes; `rules.level()` unless given.
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
        num_norms = len(groups.names) + 1
        state = WatchState(
            rule_state=jax.tree.map(jnp.copy, init_state(rule)),
            num_steps=jnp.zeros((), jnp.int32),
            num_fired=jnp.zeros((), jnp.int32),
            num_nonfinite=jnp.zeros((), jnp.int32),
            group_ids=jnp.asarray(np.array([name_id(name) for name in groups.names], np.int32)),
            norms=as_float(jnp.zeros(groups.shape)),
            nonfinite_groups=jnp.zeros(groups.shape, jnp.bool_),
            history=init_history(num_norms if what == "grads" else 2 * num_norms),
            moments=_no_moments(),
        )
        register_with_flax(state)
        return state

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        check_state(state, WatchState)
        groups = find(updates)
        _check_groups(state, groups, what)
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


def _no_moments() -> Moments:
    # A computation of its own for each: a donated state must not share buffers between its leaves.
    dtypes = dict.fromkeys(MOMENT, jnp.result_type(float))
    dtypes |= dict.fromkeys(
        ("step", "num_nonfinite_groups", "share_group", "rise_group", "ratio_group"), jnp.int32
    )
    dtypes |= dict.fromkeys(("fired", "nonfinite"), jnp.bool_)
    unlimited = ("allowed", "trigger")
    return Moments(
        **{name: jnp.full(4, np.inf if name in unlimited else 0, dtype) for name, dtype in dtypes.items()}
    )


def _check_groups(state: WatchState, groups: Groups, what: str) -> None:
    num_norms = (len(groups.names) + 1) * (1 if what == "grads" else 2)
    if (jnp.size(state.norms), jnp.size(state.history.num_seen)) != (len(groups.names), num_norms):
        raise ValueError(
            f"the {what} have {len(groups.names)} groups, but the state was made for {jnp.size(state.norms)} groups "
            f"and {jnp.size(state.history.num_seen)} histories: init and update must be of the same watch, and see "
            "trees of the same structure"
        )


def name_id(name: str) -> int:
    """A checksum of a group's name, as a positive int32."""
    return zlib.crc32(name.encode()) >> 1
