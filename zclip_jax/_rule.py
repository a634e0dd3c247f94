"""A rule looks at one gradient norm and says what norm is allowed; `decide` turns that into a scale."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._typing import BoolEach, FloatEach, Numeric, PyTree, dataclass


@dataclass(frozen=True)
class Decision:
    """What a rule says of one norm. Every field is a scalar.

    Args:
      threshold: the norm allowed this step, in the norm's own unit; `inf` where the rule sets no limit.
      z_score: how many standard deviations the norm lies above the mean; 0 where the rule has no such
        number, and during its warm-up.
      fired: whether the rule calls this step a spike.
      mean: the mean this norm was judged against, before it is absorbed; 0 where the rule keeps none.
      std: the standard deviation it was judged against; 0 where the rule keeps none.
      uncapped: the threshold before `rules.at_most` lowered it; None means `threshold` itself.
      raises: whether smaller norms are scaled up to the threshold as well, by rules that set the norm
        outright.
    """

    threshold: Numeric
    z_score: Numeric
    fired: Numeric
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
        the training loop passes it; `global_norm` the norm of all groups, where there are several. Unknown extra
        arguments are ignored.

    Examples:
      A rule that allows twice the previous norm:

      >>> import jax.numpy as jnp
      >>> from zclip_jax import Decision, Rule, decide
      >>> def update(norm, state, **extra_args):
      ...     threshold = 2 * state
      ...     return Decision(threshold=threshold, z_score=0.0, fired=norm > threshold), norm
      >>> rule = Rule(init=lambda: jnp.asarray(1.0), update=update)
      >>> outcome, state = decide(rule, 5.0, rule.init())
      >>> float(outcome.clip_scale), float(state)
      (0.4..., 5.0)
    """

    init: Callable[[], PyTree]
    update: Callable[..., tuple[Decision, PyTree]]


def decide(rule: Rule, norm: Any, state: PyTree, **extra_args: Any) -> tuple[Outcome, PyTree]:
    """Runs `rule` on one norm: training and replay both go through here and nothing else.

    A norm that is NaN, infinite or zero leaves `state` exactly as it was: the first two are faults, and a
    zero norm is a step without gradients, which says nothing about the level of the others.

    Args:
      rule: the rule.
      norm: scalar, the global L2 norm of this step's gradients.
      state: the rule's state, from `rule.init()` or the previous call.
      **extra_args: passed on to the rule, `value=` (the loss) among them.

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
    # The rule never sees a bad number, so that none can come back through a derivative either.
    decision, new_state = rule.update(jnp.where(finite, norm, 1.0), state, **extra_args)
    _check_scalars(decision)

    threshold = jnp.maximum(as_float(decision.threshold), 0.0)
    threshold = jnp.where(jnp.isnan(threshold), jnp.inf, threshold)
    uncapped = threshold if decision.uncapped is None else as_float(decision.uncapped)
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


def init_state(rule: Rule) -> PyTree:
    """The rule's state as strongly typed arrays, so that no update can change a type."""
    return jax.tree.map(lambda x: jnp.asarray(x, jax.dtypes.result_type(x)), rule.init())


def decide_all(rule: Rule, norms: jax.Array, **extra_args: jax.Array) -> tuple[Outcome, PyTree]:
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


def unfused(product: jax.Array) -> jax.Array:
    """`product`, to be rounded before it is used on.

    Compilers fuse a product with the sum or product that follows in some programs and not in others, so that
    training and replay would differ in the last digit. They don't fuse across a select, though no number takes its
    other side.
    """
    return jnp.where(jnp.isnan(product), 0.0, product)


def moving_mean(mean: jax.Array, x: jax.Array, decay: jax.Array) -> jax.Array:
    """`decay * mean + (1 - decay) * x`."""
    return unfused(decay * mean) + unfused((1 - decay) * x)


def safe_sqrt(x: jax.Array) -> jax.Array:
    """The square root of `x` >= 0, with derivative 0 instead of infinity at 0."""
    zero = x == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, x)))


def as_float(x: Any) -> jax.Array:
    """`x` in JAX's default float dtype: float32, or float64 under x64."""
    return jnp.asarray(x, jnp.result_type(float))


def check_rule(rule: Any) -> None:
    """Raises ValueError for what is no rule, such as a factory that was not called."""
    if not isinstance(rule, Rule):
        raise ValueError(f"rule must be a Rule such as rules.zscore(), got {rule!r}")


def check_number(name: str, value: Any, accepted: str, ok: Callable[[Any], bool]) -> None:
    """Raises ValueError unless `value` is one number that `ok` accepts; traced values pass unseen."""
    if isinstance(value, jax.core.Tracer):
        return
    number = np.asarray(value)
    real = jnp.issubdtype(number.dtype, jnp.integer) or jnp.issubdtype(number.dtype, jnp.floating)
    if not (real and number.ndim == 0 and ok(number)):
        raise ValueError(f"{name} must be {accepted}, got {value!r}")


def check_count(name: str, value: Any, least: int, accepted: str = "") -> None:
    """Raises ValueError unless `value` is a whole number of at least `least`; traced values pass unseen."""
    check_number(name, value, f"an integer >= {least}{accepted}", lambda x: x >= least and x == int(x))
    check_number(name, value, "below 2**31, as far as int32 counts", lambda x: x < 2**31)


def check_cap(value: Any) -> None:
    """Raises ValueError unless `value` can be `max_grad_norm`: a number, None, or a schedule, taken unseen."""
    if value is not None and not callable(value):
        check_number("max_grad_norm", value, "a number >= 0 or None", lambda x: x >= 0)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
