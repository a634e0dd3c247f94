"""A rule looks at one gradient norm and says what norm is allowed; `decide` turns that into a scale."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zclip_jax._numerics import as_float
from zclip_jax._typing import BoolEach, FloatEach, Numeric, PyTree, dataclass


@dataclass(frozen=True)
class Decision:
    """What a rule says of one norm. Every field is a scalar.

    Args:
      threshold: the norm allowed this step, in the norm's own unit; `inf` where the rule sets no limit.
      fired: whether the rule calls this step a spike.
      trigger: the norm above which the rule would have called this step a spike, known whether it does or not;
        `inf` where no norm would have been one, as in a warm-up.
      z_score: how many standard deviations the norm lies above the mean; 0 where the rule has no such
        number, and during its warm-up.
      mean: the mean this norm was judged against, before it is absorbed; 0 where the rule keeps none.
      std: the standard deviation it was judged against; 0 where the rule keeps none.
      uncapped: the threshold before `rules.at_most` lowered it; None means `threshold` itself.
      raises: whether smaller norms are scaled up to the threshold as well, by rules that set the norm
        outright.
    """

    threshold: Numeric
    fired: Numeric
    trigger: Numeric = math.inf
    z_score: Numeric = 0.0
    mean: Numeric = 0.0
    std: Numeric = 0.0
    uncapped: Numeric | None = None
    raises: Numeric = False


@dataclass(frozen=True)
class Outcome:
    """What `decide` makes of a `Decision`: the fields that metrics and replay report.

    Floats have JAX's default float dtype (float32, or float64 under x64), the rest is bool; all scalars.

    Args:
      grad_norm: the norm before clipping; `nan` or `inf` on a non-finite step.
      threshold: the norm allowed; `inf` where there was no limit, and on a non-finite step.
      trigger: the norm above which the rule would have fired; `inf` where no norm would have.
      z_score: the rule's z-score; 0 where it has none.
      clip_scale: what the decision multiplies the gradients by; at most 1, except from rules that also scale
        up; 0 on a non-finite step.
      mean: the mean the norm was judged against.
      std: the standard deviation the norm was judged against.
      fired: the rule called the step a spike.
      bound: the rule scaled the gradients down.
      capped: the cap of `rules.at_most` scaled them down further.
      nonfinite: the norm was NaN or infinite, or its square would be.
    """

    grad_norm: FloatEach
    threshold: FloatEach
    trigger: FloatEach
    z_score: FloatEach
    clip_scale: FloatEach
    mean: FloatEach
    std: FloatEach
    fired: BoolEach
    bound: BoolEach
    capped: BoolEach
    nonfinite: BoolEach


class Rule(NamedTuple):
    """A pure pair of functions on a scalar norm.

    Args:
      init: `() -> state`, a pytree of arrays whose structure, shapes and dtypes `update` keeps.
      update: `(norm, state, *, value=None, **extra_args) -> (Decision, state)`. `value` is the loss, where
        the training loop passes it; `global_norm` the norm of all groups, which is `norm` itself where there is
        one. Unknown extra arguments are ignored; those called `norm` or `state` never arrive.

    Examples:
      A rule that allows twice the previous norm:

      >>> import jax.numpy as jnp
      >>> from zclip_jax import Decision, Rule, decide
      >>> def update(norm, state, **extra_args):
      ...     threshold = 2 * state
      ...     return Decision(threshold=threshold, fired=norm > threshold, trigger=threshold), norm
      >>> rule = Rule(init=lambda: jnp.asarray(1.0), update=update)
      >>> outcome, state = decide(rule, 5.0, rule.init())
      >>> float(outcome.clip_scale), float(state)
      (0.4..., 5.0)
    """

    init: Callable[[], PyTree]
    update: Callable[..., tuple[Decision, PyTree]]


def decide(rule: Rule, norm: Any, state: PyTree, /, **extra_args: Any) -> tuple[Outcome, PyTree]:
    """Runs `rule` on one norm: training and replay both go through here and nothing else.

    A norm that is NaN, infinite or zero leaves `state` exactly as it was: the first two are faults, and a
    zero norm is a step without gradients, which says nothing about the level of the others.

    Args:
      rule: the rule.
      norm: scalar, the global L2 norm of this step's gradients.
      state: the rule's state, from `rule.init()` or the previous call; NumPy arrays will do, as a checkpoint
        may hold them.
      **extra_args: passed on to the rule, `value=` (the loss) among them; of any names.

    Returns:
      The `Outcome`, and the new state with the structure, shapes and dtypes of the old.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> outcome, _ = decide(rules.fixed(1.0), 4.0, rules.fixed(1.0).init())
      >>> float(outcome.clip_scale), bool(outcome.bound)
      (0.25, True)
    """
    norm = as_float(norm)
    # A norm whose square overflows is an overflow that a wider accumulator has hidden.
    finite = jnp.isfinite(jnp.square(norm))
    state = jax.tree.map(jnp.asarray, state)
    extra_args = {name: x for name, x in extra_args.items() if name not in ("norm", "state")}
    # The rule never sees a bad number, so that none can come back through a derivative either.
    decision, new_state = rule.update(jnp.where(finite, norm, 1.0), state, **extra_args)
    _check_scalars(decision)

    threshold = _as_limit(decision.threshold)
    uncapped = threshold if decision.uncapped is None else _as_limit(decision.uncapped)
    fired = jnp.asarray(decision.fired, bool)
    scaled = finite & (norm > threshold)
    raised = (
        jnp.asarray(decision.raises, bool) & finite & (norm > 0) & (norm < threshold) & (threshold < jnp.inf)
    )
    # Divides 1 by 1 where nothing is scaled, so that 0/0 and inf/inf never arise.
    moved = scaled | raised
    clip_scale = jnp.where(moved, threshold, 1.0) / jnp.where(moved, norm, 1.0)

    outcome = Outcome(
        grad_norm=norm,
        threshold=jnp.where(finite, threshold, jnp.inf),
        trigger=_as_limit(decision.trigger),
        z_score=jnp.where(finite, as_float(decision.z_score), 0.0),
        clip_scale=jnp.where(finite, clip_scale, 0.0),
        mean=as_float(decision.mean),
        std=as_float(decision.std),
        fired=finite & fired,
        bound=finite & (norm > uncapped),
        capped=scaled & (threshold < uncapped),
        nonfinite=~finite,
    )
    absorbed = finite & (norm > 0)
    # The cast also keeps dtypes and strong types as `init` made them, whatever the rule computed in.
    state = jax.tree.map(
        lambda new, old: jnp.where(absorbed, jnp.asarray(new, old.dtype), old), new_state, state
    )
    return outcome, state


def _as_limit(x: Any) -> jax.Array:
    """`x` as a norm that may be allowed: none below zero, and NaN is no limit."""
    limit = jnp.maximum(as_float(x), 0.0)
    return jnp.where(jnp.isnan(limit), jnp.inf, limit)


def init_state(rule: Rule) -> PyTree:
    """The rule's state as strongly typed arrays, so that no update can change a type."""
    return jax.tree.map(lambda x: jnp.asarray(x, jax.dtypes.result_type(x)), rule.init())


def decide_all(rule: Rule, norms: jax.Array, /, **extra_args: jax.Array) -> tuple[Outcome, PyTree]:
    """Runs `decide` from the first state over `norms` `[steps]`; the outcomes `[steps]`, and the last state."""

    def step(state, inputs):
        norm, extra_args = inputs
        return decide(rule, norm, state, **extra_args)[::-1]

    state, outcomes = jax.lax.scan(step, init_state(rule), (norms, extra_args))
    return outcomes, state


def _check_scalars(decision: Decision) -> None:
    for field in dataclasses.fields(decision):
        value = getattr(decision, field.name)
        if value is not None and jnp.shape(value) != ():
            raise ValueError(
                f"a rule's decision must hold scalars, got {field.name} of shape {jnp.shape(value)}"
            )


def check_rule(rule: Any) -> None:
    """Raises ValueError for what is no rule, such as a factory that was not called."""
    if not isinstance(rule, Rule):
        raise ValueError(f"rule must be a Rule such as rules.zscore(), got {rule!r}")
