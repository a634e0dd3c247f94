"""`WatchState`: what a watch remembers, made and checked in one place."""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._flax import register_with_flax
from zclip_jax._groups import Groups
from zclip_jax._history import History, init_history
from zclip_jax._numerics import as_float
from zclip_jax._rule import Rule, init_state
from zclip_jax._typing import BoolEach, FloatEach, IntEach, IntScalar, PyTree, dataclass

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


def init_watch_state(rule: Rule, groups: Groups, with_ratios: bool) -> WatchState:
    """The state before the first step, with the histories of the norms, and of the ratios as well."""
    num_norms = len(groups.names) + 1
    state = WatchState(
        rule_state=jax.tree.map(jnp.copy, init_state(rule)),
        num_steps=jnp.zeros((), jnp.int32),
        num_fired=jnp.zeros((), jnp.int32),
        num_nonfinite=jnp.zeros((), jnp.int32),
        group_ids=jnp.asarray(np.array([name_id(name) for name in groups.names], np.int32)),
        norms=as_float(jnp.zeros(groups.shape)),
        nonfinite_groups=jnp.zeros(groups.shape, jnp.bool_),
        history=init_history(2 * num_norms if with_ratios else num_norms),
        moments=_no_moments(),
    )
    register_with_flax(state)
    return state


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


def check_groups(state: WatchState, groups: Groups, what: str) -> None:
    """Raises ValueError for the state of a watch on something else, or on other groups."""
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
