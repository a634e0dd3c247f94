"""Where a run is in its log."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Row = dict[str, Any]

OWN = ("update", "step", "attempt")  # names that a row has of itself


def as_count(x: Any) -> int | None:
    """`x` as an int, if it is a whole number: logs of other writers hold anything."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
        return None
    return int(x) if math.isfinite(x) and x == int(x) else None


@dataclasses.dataclass
class Position:
    """The numbers that place a row, over rewinds and resumes.

    Args:
      update: how many updates were made, those that a rewind took back included; never goes down.
      step: of the last row; None before the first.
      attempt: how many rewinds and resumes came before.
      back_to: the step that training went back to since the last row, if told.
      again: whether the next row begins another attempt.
    """

    update: int = 0
    step: int | None = None
    attempt: int = 0
    back_to: int | None = None
    again: bool = False

    @classmethod
    def after(cls, row: Mapping[str, Any] | None) -> "Position":
        """Of a process that goes on with a log whose last row this is; None for an empty one."""
        step = as_count(row.get("step")) if isinstance(row, Mapping) else None
        if row is None or step is None:
            return cls()
        update, attempt = as_count(row.get("update")), as_count(row.get("attempt"))
        return cls(step if update is None else update, step, attempt or 0, again=True)

    def rewind(self, step: int) -> None:
        if self.step is not None:
            self.back_to, self.again = step, True

    def move(self, step: int) -> None:
        """To a row of this step. One below the last step's is a rewind that nobody told of."""
        if self.step is None:
            self.update = step
        elif self.again or step < self.step:
            known = [self.step, step - 1] + ([] if self.back_to is None else [self.back_to])
            self.update += step - min(known)
            self.attempt += 1
        else:
            self.update += step - self.step
        self.step, self.back_to, self.again = step, None, False

    @property
    def row(self) -> Row:
        return {"update": self.update, "step": self.step, "attempt": self.attempt}
