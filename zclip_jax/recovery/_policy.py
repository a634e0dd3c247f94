"""What follows from a blow-up and from quiet steps: decisions, second tries, and the end of a trouble."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from zclip_jax.recovery._actions import Action, Continue, Retry, Rewind, Stop, action_to_json
from zclip_jax.recovery._causes import cured_cause, report
from zclip_jax.recovery._config import RecoveryConfig
from zclip_jax.recovery._decisions import Decisions, Incident
from zclip_jax.recovery._ladder import Halt, choose
from zclip_jax.recovery._places import Place
from zclip_jax.recovery._second_try import SecondTry
from zclip_jax.recovery._skips import SkipRanges


class Policy:
    """Decisions, and the second try that is going on. Each event goes to `log(event, **fields)`."""

    def __init__(self, config: RecoveryConfig, log: Callable[..., None]):
        self.config = config
        self.log = log
        self.decisions = Decisions()
        self.second_try: SecondTry | None = None

    @property
    def skips(self) -> SkipRanges:
        """All that the data must leave out now."""
        return self.second_try.detour(self.decisions.skips) if self.second_try else self.decisions.skips

    def blew_up(self, incident: Incident, places: list[Place], evidence: dict[str, Any]) -> Rewind | Stop:
        """The rewind or the stop that follows from a blow-up, which is noted and logged."""
        decisions, tried = self.decisions, self.second_try
        choice = choose(self.config, decisions, incident, places, tried)
        decisions.count += 1
        resume = None
        if isinstance(choice, Halt):
            resume = next((x for x in reversed(places) if x.good and x.step < incident.step), None)
            to = None if resume is None else resume.step
            incidents = [*decisions.incidents[decisions.since_stop :], incident]
            text = report(choice.cause, choice.why, incidents, to)
            decisions.trouble_start = decisions.since_stop = len(decisions.incidents)
            action = Stop(text, choice.exit_code, choice.cause, to, evidence)
        else:
            to, to_index = choice.place.step, choice.place.data_index
            if tried:
                decisions.queue = [tried.span, *decisions.queue]
            decisions.undo_passed(to)
            done = replace(incident, level=choice.level, to=to, to_index=to_index, skipped=choice.skip)
            decisions.rewound(done, choice.mitigation)
            action = Rewind(to, to_index, decisions.skips, choice.mitigation, choice.reason, evidence)
        self.log(
            action.name,
            action=action_to_json(action),
            incident=asdict(incident),
            resume=None if resume is None else [resume.step, resume.data_index],
            decisions=decisions.to_json(),
        )
        return action

    def calm(self, step: int, data_index: int, places: list[Place]) -> Action:
        """What to do after a step in the band: go on, or begin with the next batches of the queue."""
        if self.second_try:
            self.follow(step, data_index, calm=True)
            return Continue()
        self._end_trouble(step)
        return self._try_again(step, data_index, places)

    def follow(self, step: int, data_index: int, calm: bool) -> None:
        """Takes one step of a second try, if one is going on, that did not blow up."""
        tried = self.second_try
        ending = tried and tried.follow(step, data_index, calm, self.config.grace)
        if tried and ending:
            if ending == "passed" and tried.ended is not None:
                self.decisions.mark_innocent(tried.span, tried.ended)
            self.log(f"second try {ending}", batches=tried.span)
            self.second_try = None

    def _try_again(self, step: int, data_index: int, places: list[Place]) -> Action:
        """Waits until a failure would cost no more than the try itself."""
        decisions = self.decisions
        active = decisions.mitigation is not None and step <= decisions.mitigation.until_step
        if not decisions.queue or active or step < decisions.last_step() + self.config.retry_after:
            return Continue()
        start, stop = span = decisions.queue[0]
        if not any(x.good and x.data_index >= stop for x in places):
            return Continue()
        decisions.queue = decisions.queue[1:]
        self.second_try = SecondTry(span, frontier=data_index + 1, step=step)
        self.log("retry", batches=span, frontier=data_index + 1)
        return Retry(
            start, self.skips, f"try batches [{start}, {stop}) again: if they pass, they were not the cause"
        )

    def _end_trouble(self, step: int) -> None:
        decisions = self.decisions
        trouble = decisions.trouble
        if not trouble or decisions.queue or step <= decisions.last_step() + self.config.clear_after:
            return
        left_out = SkipRanges(tuple(x.skipped for x in trouble if x.skipped))
        passed = SkipRanges(tuple(span for span, _ in decisions.passed))
        cause, because = cured_cause(trouble, harmless=not left_out - passed)
        decisions.trouble_start = len(decisions.incidents)
        self.log("over", cause=cause, because=because, first_step=trouble[0].step, incidents=len(trouble))
