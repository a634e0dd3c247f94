"""What `Recovery` may ask of a training loop."""

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

from zclip_jax.recovery._skips import SkipRanges


class ExitCode(IntEnum):
    """What a process that recovery has stopped ends with, for `sys.exit` and for schedulers.

    Megatron-LM's rerun state machine ends with the same two numbers in the same two cases, so that a scheduler set up
    for it needs no change. They lie apart from 0 to 2 (Python, shells), 64 to 78 (sysexits.h), 99 and 100 (Grid
    Engine) and 126 to 165 (shells and signals).
    """

    RESTART_ELSEWHERE = 16
    NEEDS_PERSON = 17


@dataclass(frozen=True)
class Mitigation:
    """Something milder to train with for a while.

    Args:
      kind: "lr" (multiply the learning rate by `factor`), "clip" (multiply the norm that clipping allows by
        `factor`), "reset_clip" (forget the clip's statistics once, after the rewind), or a name of your own.
      factor: the number to multiply by; 1 where the kind needs none.
      until_step: the last step it is for.
    """

    kind: str
    factor: float
    until_step: int


@dataclass(frozen=True)
class Continue:
    """Train on with the next batch."""

    name: ClassVar[str] = "continue"


@dataclass(frozen=True)
class Retry:
    """Keep the state, and train now on batches that were left out; afterwards the data go on where they were.

    Args:
      data_index: where to set the data, the first of the batches to try again.
      skip: all that the data must leave out from there on.
      reason: a sentence.
      evidence: the numbers behind it, ready for JSON.
    """

    name: ClassVar[str] = "retry"
    data_index: int
    skip: SkipRanges
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rewind:
    """Restore an earlier checkpoint, retire the newer ones, and train on from there without some of the data.

    Args:
      to: the step whose checkpoint to restore.
      data_index: where to set the data, the next batch of that checkpoint.
      skip: all that the data must leave out from there on, earlier skips among them.
      mitigation: what to train with from there on, until its `until_step`; None leaves the training as it is.
      reason: a sentence.
      evidence: the numbers behind it, ready for JSON.
    """

    name: ClassVar[str] = "rewind"
    to: int
    data_index: int
    skip: SkipRanges
    mitigation: Mitigation | None
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """End the process: going on would not help.

    Args:
      report: what happened, what was tried, the likely cause and what to look at; several lines.
      exit_code: for `sys.exit`.
      cause: the likely cause, such as "data", "state", "hardware", "architecture", "learning rate" or "unknown".
      to: the step of the newest checkpoint believed good, from which to resume; None where there is none.
      evidence: the numbers behind it, ready for JSON.
    """

    name: ClassVar[str] = "stop"
    report: str
    exit_code: ExitCode
    cause: str
    to: int | None
    evidence: dict[str, Any] = field(default_factory=dict)


Action = Continue | Retry | Rewind | Stop
_BY_NAME = {kind.name: kind for kind in (Continue, Retry, Rewind, Stop)}


def action_to_json(action: Action) -> dict[str, Any]:
    """The action as a dict for `json.dumps`."""
    fields = asdict(action)
    if isinstance(action, Retry | Rewind):
        fields["skip"] = action.skip.to_json()
    return {"action": action.name, **fields}


def action_from_json(value: dict[str, Any]) -> Action:
    """The reverse of `action_to_json`."""
    fields = dict(value)
    kind = _BY_NAME[fields.pop("action")]
    if "skip" in fields:
        fields["skip"] = SkipRanges.from_json(fields["skip"])
    if fields.get("mitigation") is not None:
        fields["mitigation"] = Mitigation(**fields["mitigation"])
    if "exit_code" in fields:
        fields["exit_code"] = ExitCode(fields["exit_code"])
    return kind(**fields)
