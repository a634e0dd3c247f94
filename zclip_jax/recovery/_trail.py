"""The last steps and their batches, and which of them a blow-up puts under suspicion."""

from collections import deque
from collections.abc import Iterable, Sequence

from zclip_jax.recovery._config import RecoveryConfig
from zclip_jax.recovery._decisions import Incident
from zclip_jax.recovery._skips import SkipRanges


class Trail:
    """Pairs of step and data index, as many as a blow-up may need."""

    def __init__(self, config: RecoveryConfig, steps: Iterable[Sequence[int]] = ()):
        self.skip_before = config.skip_before
        self.steps = deque(
            ((step, data_index) for step, data_index in steps), maxlen=config.grace + config.skip_before + 2
        )

    def incident(self, kind: str, num_bad: int, skips: SkipRanges) -> Incident:
        """A blow-up noticed at the last step, whose first bad loss was `num_bad` steps ago, the last one included.

        The batches just before it are suspect too, back to the last jump in the data: what lies behind a jump was
        good on another line.
        """
        steps = list(self.steps)
        at = max(len(steps) - num_bad, 0)
        start, since_skip = at, None
        while since_skip is None and start > 0 and at - start < self.skip_before:
            earlier, later = steps[start - 1][1], steps[start][1]
            if earlier >= later or skips.after(earlier + 1) != earlier + 1:
                since_skip = at - start
            else:
                start -= 1
        return Incident(
            kind=kind,
            step=steps[at][0],
            noticed=steps[-1][0],
            first=steps[at][1],
            stop=steps[-1][1] + 1,
            suspect=steps[start][1],
            since_skip=since_skip,
        )

    def to_json(self) -> list[list[int]]:
        """All of it, ready for JSON."""
        return [list(x) for x in self.steps]
