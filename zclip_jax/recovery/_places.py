"""The checkpoints that a rewind may go back to."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

MOST = 16


@dataclass(frozen=True)
class Place:
    """A checkpoint: its step, the data index of its next batch, and whether it is known to be good."""

    step: int
    data_index: int
    good: bool = False


class Places:
    """Checkpoints by step, each with what the detector knew when it was saved.

    At most `MOST` are kept, dense near the present and sparse far back. The oldest that is not known to be good yet
    is always among them: it is the next to be.
    """

    def __init__(self, grace: int):
        self.grace = grace
        self.all: list[Place] = []
        self.memories: dict[int, Any] = {}

    @property
    def good(self) -> list[Place]:
        """Those known to be good."""
        return [place for place in self.all if place.good]

    def add(self, place: Place, memory: Any) -> None:
        """Notes a checkpoint that was just saved."""
        self.keep([*(x for x in self.all if x.step < place.step), place])
        self.memories[place.step] = memory
        if len(self.all) > MOST:
            following = next(i for i, x in enumerate(self.all) if not x.good)
            inner = [i for i in range(1, MOST) if i != following]
            crowded = min(inner, key=lambda i: self._room(i, place.step))
            self.keep([x for i, x in enumerate(self.all) if i != crowded])

    def _room(self, i: int, step: int) -> float:
        """How far apart the neighbours of a place are, as a share of its age."""
        return (self.all[i + 1].step - self.all[i - 1].step) / (step - self.all[i].step)

    def confirm(self, step: int) -> None:
        """Calls good what `grace` steps without an open spike have passed since."""
        if self.all and not self.all[-1].good:
            self.all = [replace(x, good=x.good or step - x.step >= self.grace) for x in self.all]

    def keep(self, places: Iterable[Place]) -> None:
        """Forgets all but these."""
        self.all = list(places)
        steps = {place.step for place in self.all}
        self.memories = {step: memory for step, memory in self.memories.items() if step in steps}

    def to_json(self) -> list[Any]:
        """All of it, ready for JSON."""
        return [[asdict(place), self.memories[place.step]] for place in self.all]

    @classmethod
    def from_json(cls, grace: int, value: list[Any]) -> "Places":
        """The reverse of `to_json`."""
        places = cls(grace)
        places.all = [Place(**place) for place, _ in value]
        places.memories = {place["step"]: memory for place, memory in value}
        return places
