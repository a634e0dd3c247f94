"""Is this loss a spike, and does it pass?"""

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Any, Literal

from zclip_jax._json import finite_json
from zclip_jax.recovery._config import RecoveryConfig

Verdict = Literal["quiet", "suspicious", "benign", "malignant"]


class Detector:
    """Judges each loss against the median and the MAD of the last ones that were in their band.

        limit = median + max(num_mads * MAD, min_rise * |median|)

    A loss above `limit` opens an episode. The episode ends as *benign* with `settle` losses in a row at or below
    the limit, and becomes *malignant* when `grace` steps have passed since its first loss, or at once with a loss
    that is not finite. Losses above the limit never enter the window, so that neither a spike nor a plateau of
    spikes raises its own limit. A slow descent stays below the median and is no spike.
    """

    def __init__(self, config: RecoveryConfig):
        self.config = config
        self.window: deque[float] = deque()
        self.sorted: list[float] = []
        self.episode: list[float] = []  # its losses so far; empty while there is none
        self.calm = 0  # how many of its last losses were in the band
        self.spike: list[float] = []  # the losses of the last verdict: of the episode, or the one loss
        self.limits = self.band()  # that the last loss was held to

    def band(self) -> tuple[float, float, float]:
        """Median, MAD and limit; the limit is infinite during the warm-up."""
        if len(self.sorted) < self.config.warmup:
            return math.nan, math.nan, math.inf
        median = middle(self.sorted)
        mad = middle(sorted([abs(loss - median) for loss in self.sorted]))
        return median, mad, median + max(self.config.num_mads * mad, self.config.min_rise * abs(median))

    def observe(self, loss: float) -> Verdict:
        """The verdict on this loss, which then enters the window if it is in the band."""
        self.limits = self.band()
        inside = math.isfinite(loss) and loss <= self.limits[2]
        if inside:
            self._absorb(loss)
        if inside and not self.episode:
            self.spike = [loss]
            return "quiet"
        self.episode.append(loss)
        self.spike = self.episode
        self.calm = self.calm + 1 if inside else 0
        if self.calm == self.config.settle:
            self.episode, self.calm = [], 0
            return "benign"
        if not math.isfinite(loss) or len(self.episode) > self.config.grace:
            return "malignant"
        return "suspicious"

    def evidence(self) -> dict[str, Any]:
        """The numbers behind the last verdict."""
        return {**dict(zip(("median", "mad", "limit"), self.limits, strict=True)), "losses": [*self.spike]}

    def _absorb(self, loss: float) -> None:
        if len(self.window) == self.config.window:
            del self.sorted[bisect_left(self.sorted, self.window.popleft())]
        self.window.append(loss)
        insort(self.sorted, loss)

    def state_dict(self) -> dict[str, Any]:
        """All that `observe` depends on, ready for JSON."""
        return {
            "window": list(self.window),
            "episode": finite_json(self.episode),
            "calm": self.calm,
        }

    @classmethod
    def load(cls, config: RecoveryConfig, state: dict[str, Any]) -> "Detector":
        """The reverse of `state_dict`; of a longer window than `config.window` the last losses."""
        detector = cls(config)
        detector.window = deque(state["window"][-config.window :])
        detector.sorted = sorted(detector.window)
        detector.episode = [float(loss) for loss in state["episode"]]
        detector.calm = state["calm"]
        return detector


def middle(ordered: list[float]) -> float:
    """The median of numbers in order."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
