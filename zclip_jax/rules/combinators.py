"""Rules made of rules."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zclip_jax._checks import check_choice, check_number
from zclip_jax._numerics import as_float
from zclip_jax._rule import Decision, Rule, check_rule
from zclip_jax._typing import BoolEach, FloatEach, PyTree, dataclass
from zclip_jax.rules._schedules import takes_schedules


@takes_schedules
def at_most(rule: Rule, max_norm: Any) -> Rule:
    r"""Caps the threshold of another rule, in its warm-up too.

    .. math:: t = \min(t_\text{rule}, \text{max\_norm})

    The inner rule neither sees the cap nor absorbs it; whether it `fired` is its own affair. Steps that the
    cap scales down further than the rule would have are reported as `capped`.

    Args:
      rule: the rule to cap.
      max_norm: the largest norm ever allowed, at least 0; a number, a traced scalar or a schedule. None is no
        cap.

    Returns:
      A `Rule` with the state of the inner one.

    Raises:
      ValueError: `max_norm` is negative, NaN or no number.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.at_most(rules.zscore(), 1.0)
      >>> outcome, _ = decide(rule, 4.0, rule.init())
      >>> float(outcome.clip_scale), bool(outcome.capped), bool(outcome.bound), bool(outcome.fired)
      (0.25, True, False, False)
    """
    check_rule(rule)
    if max_norm is None:
        return rule
    check_number("max_norm", max_norm, "a number >= 0 or None", lambda x: x >= 0)

    def update(norm, state, /, **extra_args):
        decision, state = rule.update(norm, state, **extra_args)
        threshold = as_float(decision.threshold)
        capped = dataclasses.replace(
            decision,
            threshold=jnp.fmin(threshold, as_float(max_norm)),
            uncapped=threshold if decision.uncapped is None else decision.uncapped,
        )
        return capped, state

    return Rule(init=rule.init, update=update)


@takes_schedules
def bounded(rule: Rule, low: Any, high: Any) -> Rule:
    r"""Keeps the threshold of another rule within bounds.

    .. math:: t = \min(\max(t_\text{rule}, \text{low}), \text{high})

    The upper bound also holds where the rule sets no limit. What the rule absorbs and whether it `fired` stay
    its own affair; a step scaled down to a bound counts as `bound`.

    Args:
      rule: the rule to bound.
      low: least norm allowed, at least 0; a number, a traced scalar or a schedule.
      high: largest norm allowed, at least `low`; `inf` for none.

    Returns:
      A `Rule` with the state of the inner one.

    Raises:
      ValueError: a bound is negative or NaN, or `low` is above `high`.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.bounded(rules.zscore(), 0.1, 10.0)
      >>> outcome, _ = decide(rule, 40.0, rule.init())
      >>> float(outcome.threshold)
      10.0
    """
    check_rule(rule)
    check_number("low", low, "a number >= 0", lambda x: x >= 0)
    check_number("high", high, "a number >= 0", lambda x: x >= 0)
    if not any(isinstance(x, jax.core.Tracer) for x in (low, high)) and float(low) > float(high):
        raise ValueError(f"low must be at most high, got low={low!r} and high={high!r}")
    return with_threshold(rule, lambda t: jnp.fmin(jnp.maximum(t, as_float(low)), as_float(high)))


@dataclass(frozen=True)
class LossAwareState:
    """State of `loss_aware`.

    Args:
      last_loss: float, the last finite loss; 0 before the first.
      has_loss: bool, whether there was one.
      rule_state: the inner rule's state.
    """

    last_loss: FloatEach
    has_loss: BoolEach
    rule_state: PyTree


FORMS = ("exponential", "step")


@takes_schedules
def loss_aware(
    rule: Rule, eta: Any = 1.0, *, form: str = "exponential", rise: Any = 0.1, factor: Any = 0.5
) -> Rule:
    r"""Tightens the threshold of another rule while the loss rises.

    With the relative change of the loss :math:`r = (L - L_\text{prev}) / |L_\text{prev}|`:

    .. math::
        t = \begin{cases} t_\text{rule}\, e^{-\text{eta}\, r} & \text{exponential} \\
                          t_\text{rule} \cdot \text{factor} \text{ where } r > \text{rise} & \text{step} \end{cases}

    It needs a rule that always sets a limit, such as `fixed`, `ema` or `percentile`: where `zscore` sees no
    spike there is nothing to tighten. A falling loss loosens the exponential form. The first step, and one
    whose loss is not finite, leave the threshold as it is. The loss must be passed:
    `tx.update(grads, state, params, value=loss)`.

    Args:
      rule: the rule whose threshold is changed; what it absorbs is its own affair.
      eta: strength of the exponential form, at least 0.
      form: `"exponential"` or `"step"`.
      rise: relative rise of the loss above which the step form acts, at least 0.
      factor: what it multiplies the threshold by, in (0, 1].

    Returns:
      A `Rule` whose state is a `LossAwareState`.

    Raises:
      ValueError: an argument is outside its range; or, when the update is traced, no `value=` was passed.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.loss_aware(rules.fixed(1.0), form="step")
      >>> state = rule.init()
      >>> for loss in [2.0, 2.1, 2.5]:
      ...     outcome, state = decide(rule, 3.0, state, value=loss)
      >>> float(outcome.threshold)
      0.5
    """
    check_rule(rule)
    check_number("eta", eta, "a number >= 0", lambda x: x >= 0)
    check_number("rise", rise, "a number >= 0", lambda x: x >= 0)
    check_number("factor", factor, "a number in (0, 1]", lambda x: 0 < x <= 1)
    check_choice("form", form, FORMS)

    def init():
        return LossAwareState(
            last_loss=as_float(jnp.zeros(())), has_loss=jnp.zeros((), jnp.bool_), rule_state=rule.init()
        )

    def update(norm, state, /, *, value=None, **extra_args):
        if value is None:
            raise ValueError(
                "loss_aware needs the loss: pass it as tx.update(grads, opt_state, params, value=loss)"
            )
        loss, last = as_float(value), as_float(state.last_loss)
        finite = jnp.isfinite(loss)
        known = finite & state.has_loss & (last != 0)
        relative = jnp.where(known, loss - last, 0.0) / jnp.where(known, jnp.abs(last), 1.0)
        if form == "step":
            change = jnp.where(relative > as_float(rise), as_float(factor), 1.0)
        else:
            change = jnp.exp(-as_float(eta) * relative)
        # No limit stays none: infinity times an underflow would be NaN.
        inner = with_threshold(rule, lambda t: jnp.where(jnp.isfinite(t), t * change, t))
        decision, rule_state = inner.update(norm, state.rule_state, value=value, **extra_args)
        return decision, LossAwareState(
            last_loss=jnp.where(finite, loss, last), has_loss=state.has_loss | finite, rule_state=rule_state
        )

    return Rule(init=init, update=update)


def with_threshold(rule: Rule, change: Callable[[jax.Array], jax.Array]) -> Rule:
    """`rule` with `change` applied to the norm that it allows."""

    def update(norm, state, /, **extra_args):
        decision, state = rule.update(norm, state, **extra_args)
        uncapped = None if decision.uncapped is None else change(as_float(decision.uncapped))
        changed: Decision = dataclasses.replace(
            decision, threshold=change(as_float(decision.threshold)), uncapped=uncapped
        )
        return changed, state

    return Rule(init=rule.init, update=update)
