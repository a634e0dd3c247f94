"""What clipping and skipping share: from updates to norms, from norms to decisions, and their count."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._groups import Granularity, Groups, Stacked, check_granularity, find_groups
from zclip_jax._norm import AxisNames, check_split, square_sums
from zclip_jax._numerics import as_float, safe_sqrt
from zclip_jax._rule import Outcome, Rule, check_rule, decide, decide_all, init_state
from zclip_jax._state import ClipState, count, init_clip_state
from zclip_jax._typing import PyTree


class Frame(NamedTuple):
    """A rule, and which norms of the updates it decides on. See `clip_by_rule` for the arguments."""

    rule: Rule
    prior_norms: Any
    granularity: Granularity
    stacked: Stacked
    axis_name: AxisNames
    split: Any

    def init(self, params: PyTree) -> PyTree:
        """The state before the first step, with the norms of an earlier run absorbed."""
        groups = find_groups(params, self.granularity, self.stacked)
        if self.prior_norms is None:
            # Copies, since broadcasting may share buffers, which donation forbids.
            rule_state = jax.tree.map(
                lambda x: jnp.copy(jnp.broadcast_to(x, groups.shape + x.shape)), init_state(self.rule)
            )
        else:
            rule_state = self._absorb(groups)
        return init_clip_state(rule_state, groups.shape)

    def _absorb(self, groups: Groups) -> PyTree:
        norms = as_float(self.prior_norms)
        if norms.shape[1:] != groups.shape:
            raise ValueError(
                f"prior_norms must have shape [steps{''.join(f', {n}' for n in groups.shape)}], for the groups "
                f"{', '.join(groups.names[:4])}{'…' if len(groups.names) > 4 else ''}; got {norms.shape}"
            )
        run = jax.vmap(decide_all, (None, 1)) if groups.shape else decide_all
        _, rule_state = run(self.rule, norms)
        return rule_state

    def decide(
        self, updates: PyTree, state: ClipState, **extra_args: Any
    ) -> tuple[Outcome, Groups, ClipState]:
        """What the rule says of these updates; the groups that the fields of `Outcome` stand for; the new state."""
        groups = find_groups(updates, self.granularity, self.stacked)
        _check_groups(state, groups)
        squares = square_sums(updates, groups.slots, groups.shape, self.axis_name, self.split)
        # Of the groups that have one: a fault in one of them is no reason to scale the others.
        whole = safe_sqrt(jnp.sum(jnp.where(jnp.isfinite(squares), squares, 0.0)))
        extra_args["global_norm"] = whole

        def decide_one(norm: jax.Array, rule_state: PyTree) -> tuple[Outcome, PyTree]:
            return decide(self.rule, norm, rule_state, **extra_args)

        each = jax.vmap(decide_one) if groups.shape else decide_one
        outcome, rule_state = each(safe_sqrt(squares), state.rule_state)
        return outcome, groups, count(state, outcome, rule_state)


def make_frame(
    rule: Any, prior_norms: Any, granularity: Any, stacked: Any, axis_name: Any, split: Any
) -> Frame:
    """A `Frame` of checked arguments; raises ValueError for those not accepted."""
    check_rule(rule)
    check_granularity(granularity, stacked)
    check_split(axis_name, split)
    _check_prior_norms(prior_norms, granularity)
    return Frame(rule, prior_norms, granularity, stacked, axis_name, split)


def _check_prior_norms(prior_norms: Any, granularity: Granularity) -> None:
    if prior_norms is None or isinstance(prior_norms, jax.core.Tracer):
        return
    accepted = (
        "one-dimensional" if granularity == "global" else f"[steps, groups] with granularity {granularity!r}"
    )
    try:
        norms = np.asarray(prior_norms, float)
    except (TypeError, ValueError):
        raise ValueError(f"prior_norms must be numbers, {accepted}, got {prior_norms!r}") from None
    if norms.ndim != (1 if granularity == "global" else 2):
        raise ValueError(f"prior_norms must be {accepted}, got an array of shape {norms.shape}")


def _check_groups(state: ClipState, groups: Groups) -> None:
    found = jnp.shape(state.num_steps)
    if found != groups.shape:
        raise ValueError(
            f"the updates have {len(groups.names)} groups, but the state was made for shape {found}: init and "
            "update must see trees of the same structure"
        )
