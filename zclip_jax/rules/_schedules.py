"""Hyperparameters that follow the step."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from zclip_jax._numerics import increment
from zclip_jax._rule import Rule
from zclip_jax._typing import IntEach, PyTree, dataclass


@dataclass(frozen=True)
class ScheduledState:
    """State of a rule with schedules.

    Args:
      num_updates: int32, norms seen so far, which is what the schedules are evaluated at.
      rule_state: the rule's own state.
    """

    num_updates: IntEach
    rule_state: PyTree


def takes_schedules(factory: Callable[..., Rule]) -> Callable[..., Rule]:
    """Lets every number that a rule's factory takes be a callable of the step, such as an optax schedule.

    The step counts the norms that the rule has seen: not those that were NaN, infinite or zero.
    """

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Rule:
        given = inspect.signature(factory).bind(*args, **kwargs).arguments
        schedules = {name: value for name, value in given.items() if callable(value) and name != "rule"}
        if not schedules:
            return factory(*args, **kwargs)

        def at(step):
            return factory(**{**given, **{name: value(step) for name, value in schedules.items()}})

        def init():
            return ScheduledState(
                num_updates=jnp.zeros((), jnp.int32), rule_state=at(jnp.zeros((), jnp.int32)).init()
            )

        def update(norm, state, /, **extra_args):
            step = state.num_updates
            decision, rule_state = at(step).update(norm, state.rule_state, **extra_args)
            return decision, ScheduledState(num_updates=increment(step), rule_state=rule_state)

        return Rule(init=init, update=update)

    return make
