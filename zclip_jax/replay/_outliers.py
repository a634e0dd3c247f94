"""What in a recorded history is an outlier, seen with hindsight: the yardstick that rules are held against."""

import bisect
from typing import Any, NamedTuple

import numpy as np

from zclip_jax.replay._replay import as_norms

WIDTH = 101  # norms in the centred window of the median
OUTLIER = 2.0  # times its local median a norm must have to be one
NO_OUTLIER = 1.3  # times its local median below which a step that fires is a false alarm
OWN_TAIL = 3.0  # robust standard deviations above which a norm stands out from the run's own tail
NORMAL_MAD = 0.6745  # median absolute deviation of a standard normal
BEFORE = (5, 50)  # norms before it that an outlier stands out against

SPIKE_WINDOW, SPIKE_SIGMAS, SPIKE_LEAST = 1000, 7.0, 100
SPIKE_CHUNK = 300  # windows held in memory at a time


def is_finite(norms: np.ndarray) -> np.ndarray:
    """Which norms count as finite in training: those whose squares are."""
    with np.errstate(over="ignore"):
        return np.isfinite(np.square(np.asarray(as_norms(norms))))


def is_usable(norms: np.ndarray) -> np.ndarray:
    """Which norms enter a rule's statistics: those that aren't zero, or so small that they are taken for it."""
    seen = np.asarray(as_norms(norms))
    return is_finite(norms) & (seen >= np.finfo(seen.dtype).tiny)


def local_median(norms: np.ndarray) -> np.ndarray:
    """Centred rolling median of 101 usable norms, of fewer at both ends; `[steps]`.

    A norm that isn't usable is left out of the windows, and gets the median around the usable one before it.
    """
    usable = is_usable(norms)
    kept = norms[usable].tolist()
    if not kept:
        return np.full(norms.shape, np.nan)
    half, window, medians = WIDTH // 2, sorted(kept[: WIDTH // 2]), []
    for i in range(len(kept)):
        if i + half < len(kept):
            bisect.insort(window, kept[i + half])
        if i > half:
            del window[bisect.bisect_left(window, kept[i - half - 1])]
        middle = len(window) // 2
        medians.append(window[middle] if len(window) % 2 else (window[middle - 1] + window[middle]) / 2)
    return np.asarray(medians)[np.maximum(np.cumsum(usable) - 1, 0)]


class Hindsight(NamedTuple):
    """Norms as seen from the end of the run.

    Args:
      median: `[steps]`, see `local_median`.
      ratio: `[steps]`, each norm as a multiple of it; 0 where that isn't defined.
      outlier: `[steps]`, whether the norm is above twice its local median and stands out against those before it,
        too: above 1.3 times the median of the last 5, or of the last 50. Where the level falls, as at the start of
        a run, ordinary norms are far above those to come, and no rule can know.
    """

    median: np.ndarray
    ratio: np.ndarray
    outlier: np.ndarray

    def of_own_tail(self) -> "Hindsight":
        """With only those outliers that stand out from the run's own tail.

        They are above 3 robust standard deviations of the logarithm of the ratio, 1.4826 times its median absolute
        value: in a run with a heavy tail twice the local median is an ordinary step.
        """
        known = self.ratio > 0
        if not known.any():
            return self
        deviation = np.log(np.where(known, self.ratio, 1.0))
        std = np.median(np.abs(deviation[known])) / NORMAL_MAD
        return self._replace(outlier=self.outlier & (deviation > OWN_TAIL * std))

    def at(self, steps: slice | np.ndarray) -> "Hindsight":
        """Hindsight on some of the steps alone."""
        return Hindsight(*(x[steps] for x in self))

    def score(self, fired: np.ndarray) -> dict[str, Any]:
        """How a rule's spikes, `[…, steps]`, agree with hindsight; counts `[…]`."""
        return {
            "num_outliers": int(self.outlier.sum()),
            "num_caught": (fired & self.outlier).sum(-1),
            "num_false_alarms": (fired & (self.ratio < NO_OUTLIER)).sum(-1),
        }


def look_back(norms: np.ndarray) -> Hindsight:
    """The `Hindsight` of norms `[steps]`."""
    median, usable = local_median(norms), is_usable(norms)
    ratio = np.where(usable, norms, 0.0) / np.where(usable, median, 1.0)
    rows, outlier = np.flatnonzero(usable), np.zeros(norms.shape, bool)
    kept = norms[rows]
    for i in np.flatnonzero(ratio[rows] > OUTLIER):
        before = [np.median(kept[max(0, i - n) : i]) for n in BEFORE] if i else [np.inf]
        outlier[rows[i]] = kept[i] > NO_OUTLIER * min(before)
    return Hindsight(median, ratio, outlier)


def spike_score(x: np.ndarray) -> float | None:
    """SpikeScore of norms or losses: the share more than 7 standard deviations from the mean of the 1,000 before.

    Of as many as there are, if fewer; the first 100 are not judged. None if nothing is. The source is "OLMo 2",
    https://arxiv.org/abs/2501.00656, 2024.
    """
    x = x[np.isfinite(x)]
    if x.size <= SPIKE_LEAST:
        return None
    padded = np.r_[np.full(SPIKE_WINDOW, np.nan), x]
    windows = np.lib.stride_tricks.sliding_window_view(padded, SPIKE_WINDOW)[:-1]
    spikes = 0
    # Of 1e154 and more the square overflows: a deviation that hides all others, and rightly so.
    for start in range(SPIKE_LEAST, x.size, SPIKE_CHUNK):
        stop = min(start + SPIKE_CHUNK, x.size)
        before, whole = windows[start:stop], start >= SPIKE_WINDOW
        mean, std = (np.mean, np.std) if whole else (np.nanmean, np.nanstd)
        with np.errstate(over="ignore"):
            spikes += np.sum(np.abs(x[start:stop] - mean(before, -1)) > SPIKE_SIGMAS * std(before, -1))
    return float(spikes / (x.size - SPIKE_LEAST))
