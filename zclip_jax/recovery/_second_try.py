"""Batches that were left out, trained after all."""

from dataclasses import dataclass
from typing import Any

from zclip_jax.recovery._skips import SkipRanges


@dataclass
class SecondTry:
    """A detour of the data over `span`, after which they go on at `frontier`."""

    span: tuple[int, int]
    frontier: int  # the first batch that was not trained yet when it began
    step: int  # at which it was decided
    begun: bool = False
    ended: int | None = None  # the step at which the data were back

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "SecondTry":
        """The reverse of `dataclasses.asdict`."""
        fields: dict[str, Any] = {**value, "span": tuple(value["span"])}
        return cls(**fields)

    def detour(self, skips: SkipRanges) -> SkipRanges:
        """What the data leave out from the span on: the earlier skips but these, and all up to the frontier."""
        return (skips - SkipRanges((self.span,))) | SkipRanges(((self.span[1], self.frontier),))

    def follow(self, step: int, data_index: int, calm: bool, grace: int) -> str | None:
        """Takes one step without a blow-up; "passed" or "not carried out" once that is known."""
        if not self.begun:
            self.begun = self.span[0] <= data_index < self.span[1]
            return None if self.begun else "not carried out"
        if self.ended is None and data_index >= self.frontier:
            self.ended = step
        if self.ended is not None and calm and step - self.ended >= grace:
            return "passed"
        return None
