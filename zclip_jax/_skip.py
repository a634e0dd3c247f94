"""Leaves out bad steps whole: parameters and optimizer stay as they were."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zclip_jax._checks import check_count
from zclip_jax._flax import register_with_flax
from zclip_jax._frame import make_frame
from zclip_jax._groups import Granularity, Stacked
from zclip_jax._norm import AxisNames, is_gradient
from zclip_jax._numerics import increment
from zclip_jax._rule import Rule
from zclip_jax._state import ClipState, check_state
from zclip_jax._typing import BoolScalar, IntScalar, PyTree, dataclass

# States that hold the step at which schedules are evaluated, and their fields that follow it.
SCHEDULE_STATES = (
    optax.ScaleByScheduleState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)
SCHEDULE_FIELDS = ("count", "hyperparams", "hyperparams_states")


@dataclass(frozen=True)
class SkipState:
    """State of `skip_by_rule`; read it with `zclip_jax.metrics`.

    Args:
      inner_state: the state of the inner transformation.
      clip_state: what the rule saw and said, as in `clip_by_rule`.
      num_skipped: int32, steps left out so far; the counts stay at 2**31 - 1 once they are there.
      skip_run: int32, consecutive steps left out up to now.
      longest_skip_run: int32, the longest such run so far.
      alarm: bool, whether `skip_run` is at least `max_consecutive`.
    """

    inner_state: PyTree
    clip_state: ClipState
    num_skipped: IntScalar
    skip_run: IntScalar
    longest_skip_run: IntScalar
    alarm: BoolScalar


def skip_by_rule(
    inner: Any,
    rule: Rule,
    *,
    max_consecutive: Any = 10,
    advance_counts: bool | Callable[[Any], Any] = False,
    prior_norms: Any = None,
    granularity: Granularity = "global",
    stacked: Stacked = None,
    axis_name: AxisNames = None,
    split: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner`, except on steps where `rule` fires or the norm is not finite.

    Such a step leaves parameters and the state of `inner` bit for bit as they were, schedules included. The
    updates it returns are negative zeros, which added to a number change nothing, not even the sign of a zero.
    Everything is selected, nothing multiplied. The rule decides only whether a step is skipped; to scale down as
    well put `clip_by_rule` into `inner`. `clip_scale`, `bound` and `capped` in the metrics are what
    `clip_by_rule` would have done.

    A step is never applied because too many were skipped before. Look at `zclip/alarm` in `metrics`.

    Args:
      inner: the optimizer, as a whole chain: an `optax.GradientTransformation`, or `MultiSteps`.
      rule: fires on steps to leave out, such as `rules.sigma_skip()` or `rules.fixed(100.0)`.
      max_consecutive: skipped steps in a row from which on the `alarm` is raised, at least 1.
      advance_counts: let schedules follow the training step and not the number of applied ones: on a skipped
        step, the counts that optax's schedules and `inject_hyperparams` read go on all the same. Adam's count and
        a rule's statistics stay with the steps they have seen. For the counts of other transformations pass a
        function of a leaf's key path in the state of `inner`, which says whether the leaf goes on.
      prior_norms: see `clip_by_rule`.
      granularity: see `clip_by_rule`; the step is skipped if any group's norm is a spike or not finite.
      stacked: see `clip_by_rule`.
      axis_name: see `clip_by_rule`.
      split: see `clip_by_rule`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with a `SkipState`. `value=` and other extra arguments reach
      both the rule and `inner`.

    Raises:
      ValueError: an argument is none of those accepted.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from zclip_jax import metrics, rules, skip_by_rule
      >>> tx = skip_by_rule(optax.adam(0.1), rules.fixed(10.0))
      >>> params = jnp.ones(2)
      >>> state = tx.init(params)
      >>> for grads in [jnp.asarray([3.0, 4.0]), jnp.asarray([jnp.nan, 1.0]), jnp.asarray([30.0, 40.0])]:
      ...     updates, state = tx.update(grads, state, params)
      >>> int(metrics(state)["zclip/num_skipped"]), int(state.inner_state[0].count)
      (2, 1)
    """
    frame = make_frame(rule, prior_norms, granularity, stacked, axis_name, split)
    check_count("max_consecutive", max_consecutive, least=1)
    if not isinstance(advance_counts, bool) and not callable(advance_counts):
        raise ValueError(
            f"advance_counts must be True, False or a function of a leaf's key path, got {advance_counts!r}"
        )
    if isinstance(inner, Rule) or not hasattr(inner, "init") or not hasattr(inner, "update"):
        raise ValueError(f"inner must be an optax.GradientTransformation, got {inner!r}")
    if not isinstance(inner, optax.MultiSteps):  # which takes them, but is no such transformation by type
        inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> PyTree:
        state = SkipState(
            inner_state=inner.init(params),
            clip_state=frame.init(params),
            num_skipped=jnp.zeros((), jnp.int32),
            skip_run=jnp.zeros((), jnp.int32),
            longest_skip_run=jnp.zeros((), jnp.int32),
            alarm=jnp.zeros((), jnp.bool_),
        )
        register_with_flax(state)
        return state

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        check_state(state, SkipState)
        outcome, _, clip_state = frame.decide(updates, state.clip_state, **extra_args)
        skip = jnp.any(outcome.nonfinite | outcome.fired)
        applied, inner_state = inner.update(updates, state.inner_state, params, **extra_args)

        def keep(new, old):
            return jnp.where(skip, old, new)

        def hold(x):
            return x if jax.dtypes.result_type(x) == jax.dtypes.float0 else jnp.where(skip, _nothing(x), x)

        kept = jax.tree.map(keep, inner_state, state.inner_state)
        if callable(advance_counts):
            kept = jax.tree_util.tree_map_with_path(
                lambda path, new, old: new if advance_counts(path) else old, inner_state, kept
            )
        elif advance_counts:
            kept = _advance_schedules(inner_state, kept)
        skip_run = jnp.where(skip, increment(state.skip_run), 0)
        return jax.tree.map(hold, applied), SkipState(
            inner_state=kept,
            clip_state=clip_state,
            num_skipped=increment(state.num_skipped, skip),
            skip_run=skip_run,
            longest_skip_run=jnp.maximum(state.longest_skip_run, skip_run),
            alarm=skip_run >= jnp.asarray(max_consecutive, jnp.int32),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _nothing(x: jax.Array) -> jax.Array:
    """What added to a number changes nothing, not even the sign of a zero."""
    if not is_gradient(x):
        return jnp.zeros_like(x)
    if jnp.iscomplexobj(x):
        part = jnp.full_like(x.real, -0.0)
        return jax.lax.complex(part, part)
    return jnp.full_like(x, -0.0)


def _advance_schedules(new: PyTree, kept: PyTree) -> PyTree:
    """`kept`, with the counts that schedules read, and what they gave, as in `new`."""

    def advance(new, kept):
        if not isinstance(new, SCHEDULE_STATES):
            return kept
        fields = {name: getattr(new, name) for name in SCHEDULE_FIELDS if hasattr(new, name)}
        if hasattr(new, "inner_state"):
            fields["inner_state"] = _advance_schedules(new.inner_state, kept.inner_state)
        return kept._replace(**fields)

    return jax.tree.map(advance, new, kept, is_leaf=lambda x: isinstance(x, SCHEDULE_STATES))
