"""The rule by which OLMo-core, Levanter and MaxText skip steps."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from zclip_jax._checks import check_count, check_length, check_number
from zclip_jax._numerics import as_float, unfused
from zclip_jax._rule import Decision, Rule
from zclip_jax._typing import Floats, IntEach, dataclass
from zclip_jax.rules._schedules import takes_schedules
from zclip_jax.rules._window import count_on, mean_and_std, push


@dataclass(frozen=True)
class SigmaSkipState:
    """State of `sigma_skip`.

    Args:
      num_norms: int32, norms absorbed so far.
      norms: float `[window]`, the last norms, round and round.
      num_losses: int32, losses absorbed so far.
      losses: float `[window]`, the last losses, round and round.
    """

    num_norms: IntEach
    norms: Floats
    num_losses: IntEach
    losses: Floats


@takes_schedules
def sigma_skip(num_std: Any = 6.0, window: Any = 128, warmup_steps: Any = 64) -> Rule:
    r"""Calls a step a spike when its norm or its loss is far above those of the last `window` steps.

    With mean :math:`\mu` and standard deviation :math:`\sigma` (unbiased) of the steps before this one:

    .. math:: \text{fired} \iff x > \mu + \text{num\_std}\cdot\sigma
              \quad\text{for } x \text{ the norm or the loss}

    Made for `skip_by_rule`. In `clip_by_rule` a spike of the norm is scaled down to that limit, and a spike of
    the loss alone passes. Absorbs raw norm and loss, so a shift of level is learned within the window. Looks at
    the loss where the training loop passes `value=`, after a warm-up of as many losses; after that of the norms, a
    loss that is NaN or infinite is a spike, too. It is not absorbed.

    Args:
      num_std: standard deviations above the mean, positive.
      window: steps to keep, a Python int, at least 2.
      warmup_steps: steps to collect before the rule may fire, at least 2.

    Returns:
      A `Rule` whose state is a `SigmaSkipState`.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax import decide, rules
      >>> rule = rules.sigma_skip(warmup_steps=4)
      >>> state = rule.init()
      >>> for norm, loss in [(1.0, 2.0), (1.1, 2.1), (0.9, 1.9), (1.0, 2.0), (1.0, 9.0)]:
      ...     outcome, state = decide(rule, norm, state, value=loss)
      >>> bool(outcome.fired), float(outcome.threshold)
      (True, inf)

    References:
      Levanter, `SkipStepConfig`; OLMo-core, `SkipStepOptimizer`; MaxText, `skip_step_on_spikes`: 128 steps, six
      standard deviations, from 64 steps on.
    """
    check_number("num_std", num_std, "a number > 0", lambda x: x > 0)
    check_length("window", window, least=2)
    check_count("warmup_steps", warmup_steps, least=2)

    def init():
        dtype = jnp.result_type(float)
        return SigmaSkipState(
            num_norms=jnp.zeros((), jnp.int32),
            norms=jnp.zeros(window, dtype),
            num_losses=jnp.zeros((), jnp.int32),
            losses=jnp.zeros(window, dtype),
        )

    def limit_of(xs, count):
        mean, std = mean_and_std(xs, count, ddof=1)
        limit = mean + unfused(as_float(num_std) * std)
        ready = count >= jnp.asarray(warmup_steps, jnp.int32)
        return ready, mean, std, jnp.where(ready, limit, jnp.inf)

    def update(norm, state, /, *, value=None, **extra_args):
        del extra_args
        ready, mean, std, limit = limit_of(state.norms, state.num_norms)
        spike = norm > limit
        decision = Decision(
            threshold=jnp.where(spike, limit, jnp.inf),
            trigger=limit,
            z_score=jnp.where(ready & (std > 0), (norm - mean) / jnp.where(std > 0, std, 1.0), 0.0),
            fired=spike,
            mean=mean,
            std=std,
        )
        state = dataclasses.replace(
            state,
            num_norms=count_on(state.num_norms, window),
            norms=push(state.norms, state.num_norms, norm),
        )
        if value is None:
            return decision, state

        known = jnp.isfinite(as_float(value))
        loss = jnp.where(known, as_float(value), 0.0)
        *_, loss_limit = limit_of(state.losses, state.num_losses)
        loss_spike = jnp.where(known, loss > loss_limit, ready)
        state = dataclasses.replace(
            state,
            num_losses=jnp.where(known, count_on(state.num_losses, window), state.num_losses),
            losses=jnp.where(known, push(state.losses, state.num_losses, loss), state.losses),
        )
        return dataclasses.replace(decision, fired=spike | loss_spike), state

    return Rule(init=init, update=update)
