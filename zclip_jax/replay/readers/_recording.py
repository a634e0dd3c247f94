"""What every reader returns."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from zclip_jax.replay.readers._notes import cadence_of, notes_on_norms, notes_on_steps


class Recording(NamedTuple):
    """The gradient norms of a recorded run, or of several one after the other, in the order of the log.

    Args:
      norms: float64 `[n]`, before clipping; NaN and infinite ones are kept.
      steps: int64 `[n]`, as the log numbers them, repeated and restarting ones included; 0, 1, … in each run where it
        doesn't.
      loss: float64 `[n]`, NaN where a row has none; None if no row has one.
      format: what the log was recognised as, such as `"Hugging Face trainer state"`.
      column: the name under which it holds the norm: a column, key, tag, or the word in a text log.
      cadence: steps from one row to the next, as most rows have it; at least 1.
      notes: what was odd about the log, a sentence each.
      settings: the rule's settings, where the log holds them.
      name: of the file or folder.
      starts: the rows where the runs begin, 0 the first.
    """

    norms: np.ndarray
    steps: np.ndarray
    loss: np.ndarray | None
    format: str
    column: str
    cadence: int = 1
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})
    name: str = ""
    starts: tuple[int, ...] = (0,)

    @property
    def runs(self) -> "tuple[Recording, ...]":
        """Each run as a `Recording` of its own, with its own cadence and its own notes on steps and norms."""
        if len(self.starts) == 1:
            return (self,)
        return tuple(
            self._part(start, end)
            for start, end in zip(self.starts, (*self.starts[1:], self.norms.size), strict=True)
        )

    def _part(self, start: int, end: int) -> "Recording":
        norms, steps = self.norms[start:end], self.steps[start:end]
        cadence = cadence_of(steps)
        return self._replace(
            norms=norms,
            steps=steps,
            loss=None if self.loss is None else self.loss[start:end],
            cadence=cadence,
            notes=(*notes_on_steps(steps, cadence), *notes_on_norms(norms, steps, self.column)),
            starts=(0,),
        )
