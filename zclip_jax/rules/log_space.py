"""Any rule on the logarithms of the norms."""

import dataclasses

import jax.numpy as jnp

from zclip_jax._numerics import as_float
from zclip_jax._rule import Rule, check_rule
from zclip_jax._typing import PyTree, dataclass


@dataclass(frozen=True)
class LogSpaceState:
    """State of `in_log_space`.

    Args:
      rule_state: the inner rule's state, of logarithms.
    """

    rule_state: PyTree


def in_log_space(rule: Rule) -> Rule:
    r"""Lets a rule judge the natural logarithms of the norms, for norms with a heavy tail.

    .. math:: t = \exp(t_\text{rule}(\log n))

    The inner rule sees, absorbs and limits logarithms; threshold and trigger come back as norms. Mean, standard
    deviation and z-score in the metrics are those of the logarithms. It suits rules that compare with a mean and a
    standard deviation, or with order statistics: `zscore`, `window_zscore`, `sigma_skip` and `percentile`. A setting
    that multiplies a norm (`clip_factor` and `min_rel_std` of `zscore`, all of `level`, `ema` and `adagc`) has no
    such meaning for logarithms, which may be negative.

    Args:
      rule: the rule that judges; its own unit is the logarithm of a norm.

    Returns:
      A `Rule` whose state is a `LogSpaceState`.

    Raises:
      ValueError: `rule` is none.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.in_log_space(rules.zscore(warmup_steps=4))
      >>> state = rule.init()
      >>> for norm in [1.0, 2.0, 0.5, 1.0, 50.0]:
      ...     outcome, state = decide(rule, norm, state)
      >>> bool(outcome.fired), round(float(outcome.trigger), 2), round(float(outcome.threshold), 2)
      (True, 3.41, 1.47)
    """
    check_rule(rule)

    def exp(x):
        return None if x is None else jnp.exp(as_float(x))

    def update(norm, state, /, **extra_args):
        # Only norms above zero are absorbed, but zero is seen, too.
        logarithm = jnp.log(jnp.where(norm > 0, norm, 1.0))
        decision, rule_state = rule.update(logarithm, state.rule_state, **extra_args)
        decision = dataclasses.replace(
            decision,
            threshold=exp(decision.threshold),
            trigger=exp(decision.trigger),
            uncapped=exp(decision.uncapped),
        )
        return decision, LogSpaceState(rule_state=rule_state)

    return Rule(init=lambda: LogSpaceState(rule_state=rule.init()), update=update)
