"""Leaves out bad steps whole: parameters and optimizer stay as they were."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zclip_jax._clip import ClipState, check_split, check_state, count, init_clip_state
from zclip_jax._flax import register_with_flax
from zclip_jax._norm import AxisNames, global_norm, is_gradient
from zclip_jax._rule import Rule, check_count, check_rule, decide
from zclip_jax._typing import BoolScalar, IntScalar, PyTree, dataclass


@dataclass(frozen=True)
class SkipState:
    """State of `skip_by_rule`; read it with `zclip_jax.metrics`.

    Args:
      inner_state: the state of the inner transformation.
      clip_state: what the rule saw and said, as in `clip_by_rule`.
      num_skipped: int32, steps left out so far.
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
    advance_counts: bool = False,
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
      advance_counts: let the step counters in the inner state (integer scalars) go on, so that schedules follow
        the training step and not the number of applied ones.
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
    check_rule(rule)
    check_split(axis_name, split)
    check_count("max_consecutive", max_consecutive, least=1)
    if not hasattr(inner, "init") or not hasattr(inner, "update"):
        raise ValueError(f"inner must be an optax.GradientTransformation, got {inner!r}")
    if not isinstance(inner, optax.MultiSteps):  # which takes them, but is no such transformation by type
        inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> PyTree:
        state = SkipState(
            inner_state=inner.init(params),
            clip_state=init_clip_state(rule),
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
        norm = global_norm(updates, axis_name, split)
        seen = state.clip_state
        outcome, rule_state = decide(rule, norm, seen.rule_state, global_norm=norm, **extra_args)
        skip = outcome.nonfinite | outcome.fired

        applied, inner_state = inner.update(updates, state.inner_state, params, **extra_args)

        def keep(new, old):
            if advance_counts and jnp.ndim(old) == 0 and jnp.issubdtype(jnp.result_type(old), jnp.integer):
                return new
            return jnp.where(skip, old, new)

        def hold(x):
            return jnp.where(skip, jnp.full_like(x, -0.0), x) if is_gradient(x) else x

        skip_run = jnp.where(skip, state.skip_run + 1, 0)
        return jax.tree.map(hold, applied), SkipState(
            inner_state=jax.tree.map(keep, inner_state, state.inner_state),
            clip_state=count(seen, outcome, rule_state),
            num_skipped=state.num_skipped + skip.astype(jnp.int32),
            skip_run=skip_run,
            longest_skip_run=jnp.maximum(state.longest_skip_run, skip_run),
            alarm=skip_run >= jnp.asarray(max_consecutive, jnp.int32),
        )

    return optax.GradientTransformationExtraArgs(init, update)
