"""Settings for a run, chosen on its recorded norms by a stated criterion."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._rule import decide_all
from zclip_jax.replay._outliers import NO_OUTLIER, is_finite, look_back
from zclip_jax.replay._replay import as_norms, runs
from zclip_jax.replay._specs import make_rule

# What to try: each preset's threshold first, and of each setting the default first.
GRIDS = {
    "zclip": {
        "z_thresh": (2.5, 3.0, 2.0, 3.5, 4.0, 5.0, 6.0),
        "min_rel_std": (0.0, 0.12, 0.06, 0.2),
        "alpha": (0.97, 0.98, 0.95, 0.99, 0.9),
    },
    "levelclip": {"multiple": (1.65, 1.75, 1.55, 1.85, 1.45, 2.0), "alpha": (0.95, 0.97, 0.9)},
}
ENOUGH_NORMS, ENOUGH_OUTLIERS = 1000, 5

CRITERION = (
    "never locked in; then the fewest outliers that don't fire; then the fewest steps that fire below "
    f"{NO_OUTLIER:g}x their local median; then the fewest settings changed from the defaults"
)


class Candidate(NamedTuple):
    """A rule with its settings, and how it does on the log.

    Args:
      preset: the transformation, `"zclip"` or `"levelclip"`.
      settings: some of its arguments by name; the others have their defaults.
      num_caught: outliers that fire.
      num_false_alarms: steps that fire below 1.3 times their local median.
      num_fired: steps that fire.
      locked_in: whether it calls every step from some point on a spike.
    """

    preset: str
    settings: dict[str, float]
    num_caught: int
    num_false_alarms: int
    num_fired: int
    locked_in: bool

    @property
    def rule(self) -> str:
        """As one writes it on the command line."""
        return f"{self.preset}:{','.join(f'{name}={value:g}' for name, value in self.settings.items())}"


class Recommendation(NamedTuple):
    """What `recommend` found.

    Args:
      best: the candidate chosen.
      num_outliers: norms above 2 times their local median that stand out against those before them, too.
      num_candidates: how many were tried.
      curve: the trade-off: the same rule at each threshold tried, in ascending order.
      check: what choosing on the first half alone gives on the second, in a sentence.
      doubts: why not to trust the choice, such as a log that is too short, a sentence each.
    """

    best: Candidate
    num_outliers: int
    num_candidates: int
    curve: tuple[Candidate, ...]
    check: str
    doubts: tuple[str, ...]


def recommend(norms: Any) -> Recommendation:
    """Chooses a rule and its settings for a run whose norms were recorded.

    The criterion: never locked in; then the fewest outliers that don't fire (norms above twice their local median,
    centred, of 101 norms, that stand out against those before them, too); then the fewest steps that fire below 1.3
    times their local median; then the fewest settings changed from the defaults. Fires in between cost nothing, and
    the cap, `max_grad_norm`, plays no part.

    Args:
      norms: 1-D, global norms before clipping, oldest first.

    Returns:
      A `Recommendation`.

    Raises:
      ValueError: `norms` is not one-dimensional or none is finite.

    Examples:
      >>> import numpy as np
      >>> from zclip_jax.replay import recommend
      >>> rng = np.random.default_rng(0)
      >>> norms = 1 + 0.1 * rng.standard_normal(2000)
      >>> norms[100::100] *= 3
      >>> found = recommend(norms)
      >>> found.best.preset, found.best.settings, found.best.num_caught, found.num_candidates
      ('levelclip', {'multiple': 1.65, 'alpha': 0.95}, 19, 158)
    """
    recorded = as_norms(norms)
    norms = np.asarray(norms, float)
    finite, hindsight = is_finite(norms), look_back(norms)
    if not finite.any():
        raise ValueError(f"norms must have a finite one among them, got {norms.size} without")
    settings = [
        (preset, dict(zip(grid, values, strict=True)))
        for preset, grid in GRIDS.items()
        for values in itertools.product(*grid.values())
    ]
    fired = np.concatenate(
        [
            _fired(preset, _columns([row for name, row in settings if name == preset]), recorded)
            for preset in GRIDS
        ]
    )
    changed = np.asarray(
        [sum(row[name] != GRIDS[preset][name][0] for name in row) for preset, row in settings]
    )

    def locked(steps: slice) -> np.ndarray:
        return np.asarray([runs(row, ~finite[steps])[1] >= 0 for row in fired[:, steps]])

    def choose(steps: slice) -> int:
        score = hindsight.at(steps).score(fired[:, steps])
        order = (changed, score["num_false_alarms"], -score["num_caught"], locked(steps))
        return int(np.lexsort(order)[0])

    whole, first, second = slice(None), slice(norms.size // 2), slice(norms.size // 2, None)
    score, num_fired = hindsight.score(fired), fired.sum(-1)
    candidates = [
        Candidate(preset, row, int(caught), int(alarms), int(count), bool(lock))
        for (preset, row), caught, alarms, count, lock in zip(
            settings, score["num_caught"], score["num_false_alarms"], num_fired, locked(whole), strict=True
        )
    ]
    best = candidates[choose(whole)]
    return Recommendation(
        best=best,
        num_outliers=score["num_outliers"],
        num_candidates=len(candidates),
        curve=_curve(best, candidates),
        check=_check(candidates, choose(first), hindsight.at(second).score(fired[:, second])),
        doubts=_doubts(best, int(finite.sum()), score["num_outliers"]),
    )


def _columns(rows: list[dict[str, float]]) -> dict[str, jax.Array]:
    return {name: jnp.asarray([row[name] for row in rows]) for name in rows[0]}


@functools.partial(jax.jit, static_argnums=0)
def _fired(rule: str, columns: dict[str, jax.Array], norms: jax.Array) -> jax.Array:
    """Which steps fire, `[settings, steps]`; the rest of the outcomes would need 30 times the memory."""
    return jax.vmap(lambda settings: decide_all(make_rule(rule, **settings), norms)[0].fired)(columns)


def _curve(best: Candidate, candidates: list[Candidate]) -> tuple[Candidate, ...]:
    threshold, *others = best.settings
    same = [
        candidate
        for candidate in candidates
        if candidate.preset == best.preset
        and all(candidate.settings[name] == best.settings[name] for name in others)
    ]
    return tuple(sorted(same, key=lambda candidate: candidate.settings[threshold]))


def _check(candidates: list[Candidate], chosen: int, unseen: dict[str, Any]) -> str:
    if not unseen["num_outliers"]:
        return "the second half has no outlier, so that it can't confirm a choice"
    return (
        f"chosen on the first half alone: {candidates[chosen].rule}, which in the second half catches "
        f"{unseen['num_caught'][chosen]:,} of {unseen['num_outliers']:,} with "
        f"{unseen['num_false_alarms'][chosen]:,} false alarms"
    )


def _doubts(best: Candidate, num_norms: int, num_outliers: int) -> tuple[str, ...]:
    doubts = []
    if num_norms < ENOUGH_NORMS:
        doubts.append(f"the log is too short: {num_norms:,} norms, and a choice needs {ENOUGH_NORMS:,}")
    if num_outliers < ENOUGH_OUTLIERS:
        doubts.append(
            f"outliers are too few to tell thresholds apart: {num_outliers}, and a choice needs {ENOUGH_OUTLIERS}"
        )
    if best.num_caught < num_outliers:
        missed = num_outliers - best.num_caught
        doubts.append(f"no candidate catches all outliers: this one misses {missed:,} of {num_outliers:,}")
    if best.locked_in:
        doubts.append("every candidate locks in: the level of this run shifts by more than they can follow")
    return tuple(doubts)
