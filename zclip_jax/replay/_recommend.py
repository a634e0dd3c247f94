"""Settings for a run, chosen on its recorded norms by a stated criterion."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax._rule import decide_all
from zclip_jax.replay._candidates import GRIDS, Candidate
from zclip_jax.replay._outliers import (
    NO_OUTLIER,
    NORMAL_MAD,
    OUTLIER,
    OWN_TAIL,
    Hindsight,
    is_finite,
    is_usable,
    look_back,
)
from zclip_jax.replay._replay import LOCKED_IN, as_norms
from zclip_jax.replay._runs import padded
from zclip_jax.replay._specs import make_rule

ENOUGH_NORMS, ENOUGH_OUTLIERS = 1000, 5
MANY_FIRED = 0.1  # of the steps: more than spikes
# A heavy tail: more outliers than spikes are, or a spread with which twice the median is within three deviations.
MANY_OUTLIERS, WIDE = 0.02, math.log(OUTLIER) / OWN_TAIL

CRITERION = (
    f"neither locked in nor firing on more than {MANY_FIRED:.0%} of the steps without cause; then the fewest "
    "outliers of the run's own tail that don't fire; then the fewest steps that fire below "
    f"{NO_OUTLIER:g}x their local median; then the fewest settings changed from the defaults"
)


class Recommendation(NamedTuple):
    """What `recommend` found.

    Args:
      best: the candidate chosen.
      num_outliers: norms above 2 times their local median that stand out against those before them, too, and from
        the run's own tail.
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


def recommend(*norms: Any) -> Recommendation:
    """Chooses a rule and its settings for one or more runs whose norms were recorded.

    The criterion: neither locked in nor firing, without an outlier, on more than a tenth of the steps; then the
    fewest outliers that don't fire; then the fewest steps that fire below 1.3 times their local median; then the
    fewest settings changed from the defaults. Fires in between cost nothing. The cap plays no part, so that
    `max_grad_norm` is None in the settings chosen.

    An outlier is a norm above twice its local median, centred, of 101 norms, that stands out against those before it,
    too, and from the run's own tail: its logarithm is more than 3 robust standard deviations above that median's.

    Args:
      *norms: of each run a 1-D array, global norms before clipping, oldest first. Each run is judged by itself, with
        the rule started afresh, and the counts are added; a log of several runs is
        `recommend(*(run.norms for run in recording.runs))`.

    Returns:
      A `Recommendation`.

    Raises:
      ValueError: there are no norms, those of a run are not one-dimensional, or none is finite and above zero.

    Examples:
      >>> import numpy as np
      >>> from zclip_jax.replay import recommend
      >>> rng = np.random.default_rng(0)
      >>> norms = 1 + 0.1 * rng.standard_normal(2000)
      >>> norms[100::100] *= 3
      >>> found = recommend(norms)
      >>> found.best.call, found.best.num_caught, found.num_candidates
      ('levelclip(multiple=1.65, num_std=2.9, alpha=0.95, max_grad_norm=None)', 19, 194)
    """
    runs = [np.asarray(its, float) for its in norms if np.size(as_norms(its))]
    size = sum(its.size for its in runs)
    if not any(is_usable(its).any() for its in runs):
        raise ValueError(f"norms must have a finite one above zero among them, got {size} without")
    seen = [look_back(its) for its in runs]
    hindsight, of_tail = (
        Hindsight(*map(np.concatenate, zip(*each, strict=True)))
        for each in (seen, [its.of_own_tail() for its in seen])
    )
    finite, usable = (np.concatenate([which(its) for its in runs]) for which in (is_finite, is_usable))
    settings = [
        (preset, dict(zip(grid, values, strict=True)))
        for preset, grid in GRIDS.items()
        for values in itertools.product(*grid.values())
    ]
    fired = np.concatenate(
        [_fired_in_runs(preset, [row for name, row in settings if name == preset], runs) for preset in GRIDS]
    )
    changed = np.asarray(
        [sum(row[name] != GRIDS[preset][name][0] for name in row) for preset, row in settings]
    )
    ends = np.cumsum([its.size for its in runs])

    def locked(first: int, last: int) -> np.ndarray:
        found: list[Any] = [np.zeros(len(settings), bool)]
        for start, end in zip((0, *ends), ends, strict=False):
            rows = np.arange(max(start, first), min(end, last))
            rows = rows[finite[rows]]
            if rows.size >= LOCKED_IN:
                found.append(fired[:, rows[-LOCKED_IN:]].all(-1))
        return np.any(found, axis=0)

    def choose(first: int, last: int) -> int:
        score = of_tail.at(slice(first, last)).score(fired[:, first:last])
        num_idle = fired[:, first:last].sum(-1) - score["num_caught"]
        bad = locked(first, last) | (num_idle > MANY_FIRED * usable[first:last].sum())
        order = (changed, score["num_false_alarms"], -score["num_caught"], bad)
        return int(np.lexsort(order)[0])

    score, num_fired, half = of_tail.score(fired), fired.sum(-1), size // 2
    candidates = [
        Candidate(preset, {**row, "max_grad_norm": None}, int(caught), int(alarms), int(count), bool(lock))
        for (preset, row), caught, alarms, count, lock in zip(
            settings, score["num_caught"], score["num_false_alarms"], num_fired, locked(0, size), strict=True
        )
    ]
    best = candidates[choose(0, size)]
    unseen = of_tail.at(slice(half, None)).score(fired[:, half:])
    return Recommendation(
        best=best,
        num_outliers=score["num_outliers"],
        num_candidates=len(candidates),
        curve=_curve(best, candidates),
        check=_check(candidates, choose(0, half), unseen),
        doubts=_doubts(best, hindsight.at(usable), score["num_outliers"]),
    )


def _fired_in_runs(preset: str, rows: list[dict[str, float]], runs: list[np.ndarray]) -> np.ndarray:
    """Which steps fire, `[settings, steps]`, with the rule started afresh in each run."""
    columns = {name: jnp.asarray([row[name] for row in rows]) for name in rows[0]}
    each = [np.asarray(_fired(preset, columns, padded(its)))[:, : its.size] for its in runs]
    return np.concatenate(each, axis=-1)


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


def _doubts(best: Candidate, hindsight: Hindsight, num_outliers: int) -> tuple[str, ...]:
    """Why not to trust the choice, of hindsight on the norms that count and the outliers that it was made on."""
    doubts, num_norms, num_far = [], hindsight.ratio.size, int(hindsight.outlier.sum())
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
    if best.num_fired > MANY_FIRED * num_norms:
        doubts.append(
            f"the choice fires on {best.num_fired / num_norms:.0%} of the steps: so many are no outliers, and "
            "clipping them changes the run"
        )
    spread = float(np.median(np.abs(np.log(hindsight.ratio))) / NORMAL_MAD)
    if num_far > MANY_OUTLIERS * num_norms or spread > WIDE:
        doubts.append(
            f"the norms have a heavy tail: {num_far / num_norms:.1%} are above {OUTLIER:g}x, and one standard "
            f"deviation is {math.exp(spread):.2f}x the local median, so that {OUTLIER:g}x may be an ordinary step"
        )
    return tuple(doubts)
