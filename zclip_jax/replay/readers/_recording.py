"""What every reader returns."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np


class Recording(NamedTuple):
    """The gradient norms of a recorded run, in the order of the log.

    Args:
      norms: float64 `[n]`, before clipping; NaN and infinite ones are kept.
      steps: int64 `[n]`, as the log numbers them, repeated and restarting ones included; 0, 1, … where it doesn't.
      loss: float64 `[n]`, NaN where a row has none; None if no row has one.
      format: what the log was recognised as, such as `"Hugging Face trainer state"`.
      column: the name under which it holds the norm: a column, key, tag, or the word in a text log.
      cadence: steps from one row to the next, as most rows have it; at least 1.
      notes: what was odd about the log, a sentence each.
      settings: the rule's settings, where the log holds them.
      name: of the file or folder.
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
