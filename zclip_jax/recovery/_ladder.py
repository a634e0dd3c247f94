"""What to do about a blow-up: a pure function of what was done before."""

from dataclasses import dataclass, replace

from zclip_jax.recovery import _decisions as levels
from zclip_jax.recovery._actions import ExitCode, Mitigation
from zclip_jax.recovery._causes import likely_cause
from zclip_jax.recovery._config import RecoveryConfig
from zclip_jax.recovery._decisions import Decisions, Incident
from zclip_jax.recovery._places import Place
from zclip_jax.recovery._second_try import SecondTry

NOT_REPRODUCED, DATA, STATE = VERDICTS = ("not reproduced", "data", "state")


@dataclass(frozen=True)
class Choice:
    """A rewind: which rung of the ladder, where to, what to leave out beside earlier skips."""

    level: str
    place: Place
    skip: tuple[int, int] | None
    mitigation: Mitigation | None
    reason: str


@dataclass(frozen=True)
class Halt:
    """No rewind any more, and why."""

    cause: str
    why: str
    exit_code: ExitCode = ExitCode.NEEDS_PERSON


def choose(
    config: RecoveryConfig,
    decisions: Decisions,
    incident: Incident,
    places: list[Place],
    tried: SecondTry | None = None,
) -> Choice | Halt:
    """The next rung of the ladder, or the end of it.

    Args:
      config: the numbers.
      decisions: what was done before this incident.
      incident: the blow-up, with the verdict of `verify` if there is one.
      places: the checkpoints that exist, by step.
      tried: the second try that was going on when it blew up, if one was.
    """
    latest = incident.step - 1 if tried is None else tried.step
    places = [place for place in places if place.step <= latest]
    if not places:
        return Halt(
            "unknown", "no checkpoint from before the blow-up is known, so there is nothing to go back to"
        )
    choice = _choose(config, decisions, incident, places, tried)
    if isinstance(choice, Halt):
        return choice
    why = _over_budget(config, decisions, incident, choice.place)
    if why:
        return Halt(likely_cause([*decisions.incidents[decisions.since_stop :], incident]), why)
    if choice.skip is not None and not tried:  # what the checkpoint was trained on can't be left out
        start, stop = choice.skip
        choice = replace(choice, skip=(min(max(start, choice.place.data_index), stop), stop))
    return choice


def _choose(
    config: RecoveryConfig,
    decisions: Decisions,
    incident: Incident,
    places: list[Place],
    tried: SecondTry | None,
) -> Choice | Halt:
    trouble = decisions.trouble
    newest = _newest(places, incident)
    if incident.verdict == NOT_REPRODUCED and not _seen_unreproduced(trouble, incident):
        same = [x for x in decisions.in_window(incident.step, config) if x.verdict == NOT_REPRODUCED]
        if len(same) + 1 >= config.max_unreproduced:
            why = f"{len(same) + 1} blow-ups within {config.budget_window} steps were not reproducible"
            return Halt("hardware", why, ExitCode.RESTART_ELSEWHERE)
        return Choice(levels.AGAIN, newest, None, None, "a re-run did not blow up: train the same data again")
    if tried:
        start, stop = tried.span
        reason = f"batches [{start}, {stop}) blew up a second time, from another state: they are the cause"
        return Choice(levels.RETRY_FAILED, newest, tried.span, None, reason)
    span, last = _suspects(config, incident, trouble), trouble[-1] if trouble else None
    if incident.verdict == DATA:
        return Choice(levels.SKIP, newest, span, None, "without the suspect batches a re-run did not blow up")
    if last and last.skipped and _goes_on(incident, last):
        wider = (last.skipped[1], last.skipped[1] + span[1] - span[0])
        reason = "the first batches behind those left out blew up at once: leave out more"
        return Choice(levels.WIDER, newest, wider, None, reason)
    older = _older(places, trouble, incident)
    if incident.verdict == STATE and older and sum(x.level == levels.FURTHER for x in trouble) < 2:
        reason = "it blew up without the suspect batches too: the state was bad before them"
        return Choice(levels.FURTHER, older, None, None, reason)
    rung = sum(x.level in (levels.SKIP, levels.SKIP_AND_RETRY) for x in trouble)
    if rung == 0:
        return Choice(levels.SKIP, newest, span, None, "leave out the batches under suspicion")
    if rung == 1:
        reason = "it blew up on other data too: leave these out as well, and try all of them again later"
        return Choice(levels.SKIP_AND_RETRY, newest, span, None, reason)
    return _mitigate(config, incident, places, trouble)


def _mitigate(
    config: RecoveryConfig, incident: Incident, places: list[Place], trouble: list[Incident]
) -> Choice | Halt:
    used = sum(x.level == levels.MITIGATE for x in trouble)
    if used >= len(config.mitigations):
        return Halt(likely_cause([*trouble, incident]), "every rung of the ladder was tried")
    kind, factor = config.mitigations[used]
    until_step = incident.noticed + config.mitigation_steps
    climbed = [x for x in trouble if x.level != levels.FURTHER]
    place = _older(places, climbed, incident) or next((x for x in places if x.good), places[0])
    reason = (
        f"leaving data out did not help: go further back, with {kind} x {factor:g} until step {until_step}"
    )
    return Choice(levels.MITIGATE, place, None, Mitigation(kind, float(factor), until_step), reason)


def _newest(places: list[Place], incident: Incident) -> Place:
    """The newest good checkpoint; where none is known to be good, the newest from before the suspect batches."""
    good = [x for x in places if x.good]
    before = [x for x in places if x.data_index <= incident.suspect]
    return (good or before or places[:1])[-1]


def _older(places: list[Place], before: list[Incident], incident: Incident) -> Place | None:
    """The newest good checkpoint twice as far back as `before` went, or else the oldest one further back."""
    good = [x for x in places if x.good]
    back = max([x.step - x.to for x in before] or [incident.step - good[-1].step if good else 0])
    older = [x for x in good if incident.step - x.step > back]
    far = [x for x in older if incident.step - x.step >= 2 * back]
    return (far[-1:] or older[:1] or [None])[0]


def _suspects(config: RecoveryConfig, incident: Incident, trouble: list[Incident]) -> tuple[int, int]:
    width = config.skip_batches * 2 ** sum(x.skipped is not None for x in trouble)
    return incident.suspect, max(incident.stop, incident.suspect + width)


def _goes_on(incident: Incident, last: Incident) -> bool:
    """Whether the first or second batch behind the last skip blew up, after a replay that was in its band.

    A blow-up that the state brings with it comes later: a skip begins some batches ahead of the first bad loss.
    """
    assert last.skipped is not None
    return (
        incident.since_skip in (0, 1)
        and incident.first >= last.skipped[1]
        and last.skipped[0] > last.to_index
    )


def _seen_unreproduced(trouble: list[Incident], incident: Incident) -> bool:
    """Whether the same data blew up before and were called not reproducible, which then was wrong."""
    return any(
        x.verdict == NOT_REPRODUCED and x.first < incident.stop and incident.first < x.stop for x in trouble
    )


def _over_budget(config: RecoveryConfig, decisions: Decisions, incident: Incident, place: Place) -> str:
    replayed = decisions.replayed + incident.noticed - place.step
    if len(decisions.incidents) >= config.max_rewinds:
        return f"the run has been rewound {config.max_rewinds} times (max_rewinds)"
    if len(decisions.in_window(incident.step, config)) >= config.max_rewinds_per_window:
        return (
            f"it has been rewound {config.max_rewinds_per_window} times within {config.budget_window} steps "
            "(max_rewinds_per_window)"
        )
    if replayed > config.max_replayed:
        return f"{replayed:,} steps would have been trained again, of {config.max_replayed:,} (max_replayed)"
    return ""
