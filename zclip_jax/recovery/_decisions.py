"""What was decided so far: the part of the state that a rewind does not undo."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zclip_jax.recovery._actions import Mitigation
from zclip_jax.recovery._config import RecoveryConfig
from zclip_jax.recovery._skips import SkipRanges

# What was done about a blow-up.
SKIP = "leave out"
SKIP_AND_RETRY = "leave out and try again later"
WIDER = "leave out more"
RETRY_FAILED = "leave out for good"
AGAIN = "the same again"
FURTHER = "further back"
MITIGATE = "further back with a mitigation"


@dataclass(frozen=True)
class Incident:
    """One blow-up, and what was done about it."""

    kind: str  # "malignant spike", "not finite" or "alarm"
    step: int  # its first bad step
    noticed: int  # the step at which it was called malignant
    first: int  # data index of its first bad step
    stop: int  # one past the data index of the step at which it was noticed
    suspect: int  # data index from which on the batches are under suspicion
    since_skip: int | None  # how many good batches were seen since the last jump in the data, if only a few
    level: str = ""
    to: int = -1
    to_index: int = -1  # data index of the checkpoint that was restored
    skipped: tuple[int, int] | None = None
    until_step: int | None = None  # of the mitigation
    verdict: str | None = None  # of `verify`

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Incident":
        """The reverse of `dataclasses.asdict`."""
        skipped: Any = value["skipped"]
        fields: dict[str, Any] = {**value, "skipped": None if skipped is None else tuple(skipped)}
        return cls(**fields)


@dataclass
class Decisions:
    """All blow-ups and what follows from them; in the state, and with each rewind in the log."""

    count: int = 0
    incidents: list[Incident] = field(default_factory=list)
    trouble_start: int = 0  # the incidents from here on are one trouble that is not over
    since_stop: int = 0  # the incidents from here on came after the last stop
    replayed: int = 0
    skips: SkipRanges = field(default_factory=SkipRanges)
    guilty: SkipRanges = field(default_factory=SkipRanges)  # proved to be the cause
    queue: list[tuple[int, int]] = field(default_factory=list)  # to be tried again, in order
    passed: list[tuple[tuple[int, int], int]] = field(default_factory=list)  # tried again, and by which step
    mitigation: Mitigation | None = None

    @property
    def trouble(self) -> list[Incident]:
        """The incidents of the trouble that is not over."""
        return self.incidents[self.trouble_start :]

    def in_window(self, step: int, config: RecoveryConfig) -> list[Incident]:
        """The incidents near `step` since the last stop."""
        return [x for x in self.incidents[self.since_stop :] if abs(step - x.step) < config.budget_window]

    def last_step(self) -> int:
        """The last step at which a blow-up was noticed, or that a mitigation was for."""
        mitigated = self.mitigation.until_step if self.mitigation else 0
        return max([incident.noticed for incident in self.incidents] + [mitigated])

    def rewound(self, incident: Incident, mitigation: Mitigation | None) -> None:
        """Adds an incident that is answered by a rewind, and what that means for the data."""
        if mitigation is not None:
            self.mitigation = mitigation
            incident = replace(incident, until_step=mitigation.until_step)
        self.incidents.append(incident)
        self.replayed += incident.noticed - incident.to
        if incident.skipped is not None:
            skipped = SkipRanges((incident.skipped,))
            self.skips |= skipped
            if incident.level == RETRY_FAILED or incident.verdict == "data":
                self.guilty |= skipped
        if incident.level in (SKIP_AND_RETRY, MITIGATE):
            self.queue = [*self.queue, *(x.skipped for x in self.trouble if x.skipped)]
        self.queue = self._disjoint(self.queue)

    def mark_innocent(self, span: tuple[int, int], step: int) -> None:
        """Notes that a range was trained on after all, by `step`."""
        self.skips -= SkipRanges((span,))
        self.passed = [*self.passed, (span, step)]

    def undo_passed(self, to: int) -> None:
        """Puts back into the queue what was tried again after step `to`: a rewind has undone it."""
        undone = [span for span, step in self.passed if step > to]
        self.skips |= SkipRanges(tuple(undone))
        self.queue = self._disjoint([*undone, *self.queue])
        self.passed = [x for x in self.passed if x[1] <= to]

    def _disjoint(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The spans in their order, each without what is guilty or in one before it: no batch is trained twice."""
        found, seen = [], self.guilty
        for span in spans:
            rest = SkipRanges((span,)) - seen
            found += rest.ranges
            seen |= rest
        return found

    def copy(self) -> "Decisions":
        """A copy that shares nothing that changes."""
        return replace(self, incidents=[*self.incidents], queue=[*self.queue], passed=[*self.passed])

    def to_json(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            **vars(self),
            "incidents": [asdict(x) for x in self.incidents],
            "skips": self.skips.to_json(),
            "guilty": self.guilty.to_json(),
            "mitigation": self.mitigation and asdict(self.mitigation),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Decisions":
        """The reverse of `to_json`."""
        ready: dict[str, Any] = {
            "incidents": [Incident.from_json(x) for x in value["incidents"]],
            "skips": SkipRanges.from_json(value["skips"]),
            "guilty": SkipRanges.from_json(value["guilty"]),
            "queue": [tuple(x) for x in value["queue"]],
            "passed": [(tuple(span), step) for span, step in value["passed"]],
            "mitigation": value["mitigation"] and Mitigation(**value["mitigation"]),
        }
        return cls(**{**value, **ready})
