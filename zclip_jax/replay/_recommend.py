"""Settings for a run, chosen on its recorded norms by a stated criterion."""

import functools
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._rule import decide_all
from zclip_jax.replay._outliers import NO_OUTLIER, OUTLIER, is_finite, look_back
from zclip_jax.replay._replay import as_norms, runs
from zclip_jax.replay._specs import make_rule

# What to try, each rule's threshold first; of candidates that are equally good the first is taken, so that the
# defaults come first.
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
    f"never locked in; then the fewest steps above {OUTLIER:g}x their local median (centred, 101 norms) that don't "
    f"fire; then the fewest that fire below {NO_OUTLIER:g}x"
)


class Candidate(NamedTuple):
    """A rule with its settings, and how it does on the log.

    Args:
      rule: as one writes it on the command line, `zclip:z_thresh=3.0,…`.
      num_caught: steps above 2x their local median that fire.
      num_false_alarms: steps that fire below 1.3x.
      num_fired: steps that fire.
      locked_in: whether it calls every step from some point on a spike.
    """

    rule: str
    num_caught: int
    num_false_alarms: int
    num_fired: int
    locked_in: bool


class Recommendation(NamedTuple):
    """What `recommend` found.

    Args:
      best: the candidate chosen.
      num_outliers: steps above 2x their local median.
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

    The criterion: never locked in; then the fewest steps above twice their local median (centred, of 101 norms)
    that don't fire; then the fewest that fire below 1.3 times of it; then what is nearest to the defaults.

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
      >>> found.best.rule, found.best.num_caught, found.best.num_false_alarms, found.num_candidates
      ('zclip:z_thresh=2.5,min_rel_std=0.12,alpha=0.97', 19, 0, 158)
    """
    recorded = as_norms(norms)
    norms = np.asarray(recorded, float)
    finite, hindsight = is_finite(norms), look_back(norms)
    if not finite.any():
        raise ValueError(f"norms must have a finite one among them, got {norms.size} without")
    names, rows = [], []
    for rule, grid in GRIDS.items():
        settings = list(itertools.product(*grid.values()))
        names += [
            f"{rule}:" + ",".join(f"{k}={v}" for k, v in zip(grid, values, strict=True))
            for values in settings
        ]
        columns = dict(zip(grid, jnp.asarray(settings).T, strict=True))
        rows.append(np.asarray(_fired(rule, columns, recorded)))
    fired = np.concatenate(rows)
    first, second = slice(norms.size // 2), slice(norms.size // 2, None)

    def locked(steps: slice) -> np.ndarray:
        return np.asarray([runs(row, ~finite[steps])[1] >= 0 for row in fired[:, steps]])

    def score(steps: slice) -> dict[str, Any]:
        return hindsight._replace(ratio=hindsight.ratio[steps]).score(fired[:, steps])

    def choose(steps: slice) -> int:
        scores = score(steps)
        return int(np.lexsort((scores["num_false_alarms"], -scores["num_caught"], locked(steps)))[0])

    scores = score(slice(None))
    candidates = [
        Candidate(name, int(caught), int(alarms), int(count), bool(lock))
        for name, caught, alarms, count, lock in zip(
            names,
            scores["num_caught"],
            scores["num_false_alarms"],
            fired.sum(-1),
            locked(slice(None)),
            strict=True,
        )
    ]
    best = candidates[choose(slice(None))]
    return Recommendation(
        best=best,
        num_outliers=scores["num_outliers"],
        num_candidates=len(candidates),
        curve=_curve(best, candidates),
        check=_check(names, choose(first), score(second)),
        doubts=_doubts(best, int(finite.sum()), scores["num_outliers"]),
    )


@functools.partial(jax.jit, static_argnums=0)
def _fired(rule: str, columns: dict[str, jax.Array], norms: jax.Array) -> jax.Array:
    """Which steps fire, `[settings, steps]`; the rest of the outcomes would need 30 times the memory."""
    return jax.vmap(lambda settings: decide_all(make_rule(rule, **settings), norms)[0].fired)(columns)


def _curve(best: Candidate, candidates: list[Candidate]) -> tuple[Candidate, ...]:
    # The threshold is the first setting of each rule.
    rule, first, *rest = re.split("[:,]", best.rule)
    threshold = first.partition("=")[0]
    others = re.compile(
        re.escape(f"{rule}:{threshold}=") + "([0-9.]+)" + re.escape("".join(f",{x}" for x in rest))
    )
    found = [
        (float(match[1]), candidate)
        for candidate in candidates
        if (match := others.fullmatch(candidate.rule))
    ]
    return tuple(candidate for _, candidate in sorted(found))


def _check(names: list[str], chosen: int, unseen: dict[str, Any]) -> str:
    return (
        f"chosen on the first half alone: {names[chosen]}, which in the second half catches "
        f"{unseen['num_caught'][chosen]:,} of {unseen['num_outliers']:,} with "
        f"{unseen['num_false_alarms'][chosen]:,} false alarms"
    )


def _doubts(best: Candidate, num_norms: int, num_outliers: int) -> tuple[str, ...]:
    doubts = []
    if num_norms < ENOUGH_NORMS:
        doubts.append(f"the log is too short: {num_norms:,} norms, and a choice needs {ENOUGH_NORMS:,}")
    if num_outliers < ENOUGH_OUTLIERS:
        doubts.append(
            f"{num_outliers} steps are above {OUTLIER:g}x their local median, too few to tell thresholds apart"
        )
    if best.num_caught < num_outliers:
        missed = num_outliers - best.num_caught
        doubts.append(f"no candidate catches all: {missed:,} of {num_outliers:,} are missed by this one")
    if best.locked_in:
        doubts.append("every candidate locks in: the level of this run shifts by more than they can follow")
    return tuple(doubts)
