"""`ClipState`: what a rule has seen and said of the updates, made, counted and checked in one place."""

from typing import Any

import jax
import jax.numpy as jnp

from zclip_jax._flax import register_with_flax
from zclip_jax._numerics import as_float, increment
from zclip_jax._rule import Outcome
from zclip_jax._typing import IntEach, PyTree, dataclass


@dataclass(frozen=True)
class ClipState:
    """State of `clip_by_rule`; read it with `zclip_jax.metrics`.

    Fields are scalars, or arrays `[groups]` where each group of leaves has a norm of its own. Counts stay at
    2**31 - 1 once they are there.

    Args:
      rule_state: the rule's own state.
      last: the `Outcome` of the last step; before the first, zeros, with `clip_scale` 1 and `threshold` and
        `trigger` inf.
      num_steps: int32, calls of `update` so far, non-finite ones included.
      num_fired: int32, steps that the rule called spikes.
      num_bound: int32, steps that the rule scaled down.
      num_capped: int32, steps that the cap scaled down further.
      num_nonfinite: int32, steps whose norm was NaN or infinite.
      spike_run: int32, consecutive spikes up to now; a non-finite or zero norm neither extends nor ends it.
      longest_spike_run: int32, the longest such run so far.
    """

    rule_state: PyTree
    last: Outcome
    num_steps: IntEach
    num_fired: IntEach
    num_bound: IntEach
    num_capped: IntEach
    num_nonfinite: IntEach
    spike_run: IntEach
    longest_spike_run: IntEach


TOTALS = (
    "num_steps",
    "num_fired",
    "num_bound",
    "num_capped",
    "num_nonfinite",
    "spike_run",
    "longest_spike_run",
)


def init_clip_state(rule_state: PyTree, shape: tuple[int, ...]) -> ClipState:
    """The state before the first step, of groups of that shape, around a rule's."""
    # A computation of its own for each: a donated state must not share buffers between its leaves.
    state = ClipState(
        rule_state=rule_state,
        last=Outcome(
            **{name: as_float(jnp.zeros(shape)) for name in ("grad_norm", "z_score", "mean", "std")},
            **{name: jnp.zeros(shape, jnp.bool_) for name in ("fired", "bound", "capped", "nonfinite")},
            **{name: as_float(jnp.full(shape, jnp.inf)) for name in ("threshold", "trigger")},
            clip_scale=as_float(jnp.ones(shape)),
        ),
        **{name: jnp.zeros(shape, jnp.int32) for name in TOTALS},
    )
    register_with_flax(state)
    return state


def count(state: ClipState, outcome: Outcome, rule_state: PyTree) -> ClipState:
    """The state after a step with this outcome."""
    absorbed = ~outcome.nonfinite & (outcome.grad_norm > 0)
    extended = jnp.where(outcome.fired, increment(state.spike_run), 0)
    spike_run = jnp.where(absorbed, extended, state.spike_run)
    return ClipState(
        rule_state=rule_state,
        last=jax.tree.map(lambda new, old: new.astype(old.dtype), outcome, state.last),
        num_steps=increment(state.num_steps),
        num_fired=increment(state.num_fired, outcome.fired),
        num_bound=increment(state.num_bound, outcome.bound),
        num_capped=increment(state.num_capped, outcome.capped),
        num_nonfinite=increment(state.num_nonfinite, outcome.nonfinite),
        spike_run=spike_run,
        longest_spike_run=jnp.maximum(state.longest_spike_run, spike_run),
    )


def check_state(state: Any, kind: type) -> None:
    """Raises ValueError for the state of another transformation than the one whose state is a `kind`."""
    if not isinstance(state, kind):
        raise ValueError(
            f"the state of this transformation must be a {kind.__name__}, got a {type(state).__name__}: was the "
            "optimizer state made by another chain?"
        )
