"""Rules made of rules."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from zclip_jax._rule import Rule, as_float, check_number


def at_most(rule: Rule, max_norm: Any) -> Rule:
    r"""Caps the threshold of another rule, in its warm-up too.

    .. math:: t = \min(t_\text{rule}, \text{max\_norm})

    The inner rule neither sees the cap nor absorbs it; whether it `fired` is its own affair. Steps that the
    cap scales down further than the rule would have are reported as `capped`.

    Args:
      rule: the rule to cap.
      max_norm: the largest norm ever allowed, at least 0; a number or a traced scalar. None is no cap.

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
    if max_norm is None:
        return rule
    check_number("max_norm", max_norm, "a number >= 0 or None", lambda x: x >= 0)

    def update(norm, state, **extra_args):
        decision, state = rule.update(norm, state, **extra_args)
        threshold = as_float(decision.threshold)
        capped = dataclasses.replace(
            decision,
            threshold=jnp.minimum(threshold, as_float(max_norm)),
            uncapped=threshold if decision.uncapped is None else decision.uncapped,
        )
        return capped, state

    return Rule(init=rule.init, update=update)
