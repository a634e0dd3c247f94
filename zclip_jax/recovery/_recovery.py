"""`Recovery`: watches the loss, and says when to rewind, where to, and what to leave out."""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from operator import index
from typing import Any, SupportsFloat, SupportsIndex

from zclip_jax._checks import check_choice
from zclip_jax._json import finite_json
from zclip_jax.recovery._actions import (
    Action,
    Continue,
    Mitigation,
    Rewind,
    Stop,
    action_from_json,
    action_to_json,
)
from zclip_jax.recovery._config import RecoveryConfig
from zclip_jax.recovery._decisions import Decisions, Incident
from zclip_jax.recovery._detector import Detector
from zclip_jax.recovery._ladder import VERDICTS
from zclip_jax.recovery._places import Place, Places
from zclip_jax.recovery._policy import Policy
from zclip_jax.recovery._second_try import SecondTry
from zclip_jax.recovery._skips import SkipRanges
from zclip_jax.recovery._trail import Trail


class Recovery:
    """Decides after each update whether to train on, to rewind, to try skipped batches again, or to stop.

    It computes with the numbers you give it and nothing else: the same numbers give the same actions, so that every
    process decides alike if every process passes the same ones. Pass the loss after the reduction over processes,
    and as `nonfinite` the OR over them.

    Args:
      config: the numbers; None for the defaults.
      record: called with each entry of the log, a dict ready for JSON, such as `RecoveryLog(path).append` on one
        process; None for no log. An OSError of it is only warned of.

    Examples:
      A loop keeps a checkpoint every ten steps, and from step 55 on the loss is high:

      >>> from zclip_jax.recovery import Recovery, RecoveryConfig, Rewind
      >>> recovery = Recovery(RecoveryConfig(warmup=20, grace=5, skip_before=2, skip_batches=4))
      >>> for step in range(1, 100):
      ...     loss = 2.0 + 0.01 * (step % 7) + (3.0 if step >= 55 else 0.0)
      ...     action = recovery.observe(step, step, loss, data_index=step - 1)
      ...     if isinstance(action, Rewind):
      ...         break
      ...     if step % 10 == 0:
      ...         recovery.saved(step, data_index=step)
      >>> step, action.to, str(action.skip)
      (60, 40, '[52, 60)')
      >>> recovery.rewound(action)  # once the state, the data and the logs are back at step 40
    """

    def __init__(
        self, config: RecoveryConfig | None = None, record: Callable[[dict[str, Any]], None] | None = None
    ):
        self.config = RecoveryConfig() if config is None else config
        if not isinstance(self.config, RecoveryConfig):
            raise ValueError(f"config must be a RecoveryConfig or None, got {config!r}")
        self.update, self.step = -1, 0
        self.pending: Rewind | Stop | None = None
        self._record = record
        self._detector = Detector(self.config)
        self._trail = Trail(self.config)
        self._places = Places(self.config.grace)
        self._policy = Policy(self.config, self._log)
        self._before: tuple[Decisions, Incident, dict[str, Any]] | None = None  # what `judged` decides anew

    @property
    def good_steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints known to be good: `grace` steps have passed since, and no spike is open."""
        return tuple(place.step for place in self._places.good)

    @property
    def skips(self) -> SkipRanges:
        """All that the data must leave out now; while batches are tried again, also what was trained already."""
        return self._policy.skips

    @property
    def left_out(self) -> SkipRanges:
        """The batches that training has left out so far, for a file that others can read."""
        return self._policy.decisions.skips

    def mitigation(self, step: int) -> Mitigation | None:
        """What to train `step` with, or None."""
        active = self._policy.decisions.mitigation
        return active if active is not None and step <= active.until_step else None

    def observe(
        self,
        update: SupportsIndex,
        step: SupportsIndex,
        loss: SupportsFloat,
        *,
        data_index: SupportsIndex,
        nonfinite: object = False,
        alarms: Iterable[str] = (),
    ) -> Action:
        """Takes the numbers of one update and says what to do next.

        Args:
          update: counts all updates, those that were undone too; above that of the call before.
          step: updates in the present line of training; above that of the call before, or of the rewind.
          loss: of this step, equal on every process.
          data_index: of this step's batch in the uninterrupted pipeline, from 0.
          nonfinite: whether the loss, or the parameters after the update, hold a number that is not finite, on any
            process. A gradient that was dropped for that reason does no harm: leave it out.
          alarms: names of alarms that shall count as a blow-up.

        Returns:
          `Continue`, `Retry`, `Rewind` or `Stop`.

        Raises:
          ValueError: `update` or `step` does not rise, or an action was not carried out.
        """
        update, step, data_index, loss = index(update), index(step), index(data_index), float(loss)
        self._check_order(update, step)
        if data_index < 0:
            raise ValueError(f"data_index must be at least 0, got {data_index}")
        self.update, self.step = update, step
        self._trail.steps.append((step, data_index))
        verdict, alarms = self._detector.observe(loss), list(alarms)
        nonfinite = bool(nonfinite) or not math.isfinite(loss)
        if verdict == "malignant" or nonfinite or alarms:
            kind = "not finite" if nonfinite else "alarm" if alarms else "malignant spike"
            incident = self._trail.incident(kind, len(self._detector.spike), self._policy.decisions.skips)
            suspects = [incident.suspect, incident.stop]
            evidence = {
                "suspects": suspects,
                "alarms": alarms,
                "nonfinite": nonfinite,
                "good_steps": self.good_steps,
            }
            return self._blew_up(incident, finite_json({**self._detector.evidence(), **evidence}))
        if verdict == "suspicious":
            self._policy.follow(step, data_index, calm=False)
            return Continue()
        if verdict == "benign":
            self._log("benign", **self._detector.evidence())
        self._places.confirm(step)
        return self._policy.calm(step, data_index, self._places.all)

    def saved(
        self, step: SupportsIndex, data_index: SupportsIndex, kept: Iterable[SupportsIndex] | None = None
    ) -> None:
        """Notes that a checkpoint of the present step exists. Call it after a resume too, for the one resumed from.

        A checkpoint saved while batches are tried again is no place to rewind to.

        Args:
          step: of the checkpoint, the present one.
          data_index: of the next batch.
          kept: the steps of all checkpoints that still exist; None if none was deleted.

        Raises:
          ValueError: `step` is not the present step, or a rewind was not carried out.
        """
        self._check_done()
        step, data_index = index(step), index(data_index)
        if step != self.step and self._trail.steps:
            raise ValueError(f"step must be the one that was observed last, {self.step}, got {step}")
        self.step = step
        tried = self._policy.second_try
        if tried is None or tried.ended is not None:
            self._places.add(Place(step, data_index), self._memory())
        if kept is not None:
            existing = {*map(index, kept), step}
            self._places.keep(x for x in self._places.all if x.step in existing)

    def judged(self, action: Action, verdict: str) -> Action:
        """Decides anew in the light of `verify`, between `observe` and `rewound`.

        Args:
          action: the Rewind that `observe` returned last.
          verdict: "not reproduced", "data" or "state".

        Returns:
          The action to carry out instead; often the same.

        Raises:
          ValueError: `action` is not the Rewind that waits, or the verdict is none of the three.
        """
        check_choice("verdict", verdict, VERDICTS)
        waiting = self._waiting(action)
        if self._before is None:  # taken from the log after a crash: it was judged, or not, before that
            return waiting
        count = self._policy.decisions.count
        self._policy.decisions, incident, evidence = self._before
        self._policy.decisions.count = count
        return self._blew_up(replace(incident, verdict=verdict), evidence)

    def rewound(self, action: Action, to: int | None = None) -> None:
        """Notes that a rewind was carried out: what was learnt from the steps that it undid is dropped.

        Args:
          action: the Rewind.
          to: the step where training really is now, if the restore fell back to an older checkpoint.

        Raises:
          ValueError: `action` is not the Rewind that waits, or `to` is after its step.
        """
        most = self._waiting(action).to
        to = most if to is None else to
        if to > most:
            raise ValueError(f"to must be at most the action's step {most}, got {to}")
        self._land(to)

    def state_dict(self) -> dict[str, Any]:
        """All of the state, ready for JSON, to be saved with each checkpoint."""
        before = self._before
        return {
            "version": 1,
            "update": self.update,
            "step": self.step,
            **self._memory(),
            "places": self._places.to_json(),
            "decisions": self._policy.decisions.to_json(),
            "second_try": self._policy.second_try and asdict(self._policy.second_try),
            "pending": None if self.pending is None else action_to_json(self.pending),
            "before": before and [before[0].to_json(), asdict(before[1]), before[2]],
        }

    @classmethod
    def load(
        cls,
        config: RecoveryConfig | None,
        state: dict[str, Any],
        *,
        journal: Iterable[dict[str, Any]] = (),
        record: Callable[[dict[str, Any]], None] | None = None,
    ) -> "Recovery":
        """Goes on where `state_dict` was taken.

        A checkpoint knows nothing of what was decided after it. The log does: a rewind that came later is taken
        from there, and if the checkpoint is newer than the step that it went back to, the rewind was cut short;
        then it is `pending`, and is to be carried out before anything else.

        Args:
          config: the numbers; they may have changed.
          state: what `state_dict` returned.
          journal: the entries of the log, as `RecoveryLog(path).read()` gives them; equal on every process.
          record: as for `Recovery`.
        """
        if state.get("version") != 1:
            raise ValueError(
                f"state must be what state_dict returned, of version 1, got {state.get('version')!r}"
            )
        recovery = cls(config, record)
        recovery.update, recovery.step = state["update"], state["step"]
        recovery._remember(state)
        recovery._places = Places.from_json(recovery.config.grace, state["places"])
        recovery._policy.decisions = Decisions.from_json(state["decisions"])
        if state["second_try"] is not None:
            recovery._policy.second_try = SecondTry.from_json(state["second_try"])
        if state["pending"] is not None:
            recovery.pending = _ending(state["pending"])
        if state["before"] is not None:
            decisions, incident, evidence = state["before"]
            recovery._before = Decisions.from_json(decisions), Incident.from_json(incident), evidence
        recovery._catch_up(journal)
        return recovery

    def _catch_up(self, journal):
        """Takes over the last rewind or stop in the log, if the state is from before it."""
        count = self._policy.decisions.count
        later = [x for x in journal if "decisions" in x and x["decisions"]["count"] > count]
        if not later:
            return
        self._policy.decisions = Decisions.from_json(later[-1]["decisions"])
        self.pending = self._before = None
        action, resume = _ending(later[-1]["action"]), later[-1]["resume"]
        if isinstance(action, Stop):
            if resume is None:
                return
            reason = "resume from the newest checkpoint believed good"
            action = Rewind(resume[0], resume[1], self._policy.decisions.skips, None, reason)
        if self.step > action.to:
            self.pending = action
        else:
            self._policy.decisions.undo_passed(self.step)

    def _check_order(self, update, step):
        self._check_done()
        if update <= self.update:
            raise ValueError(f"update must rise from call to call, got {update} after {self.update}")
        if step <= self.step and (self._trail.steps or step < self.step):
            raise ValueError(f"step must rise from call to call, got {step} after {self.step}")

    def _waiting(self, action: Action) -> Rewind:
        if not isinstance(action, Rewind) or action != self.pending:
            got = f"a {type(action).__name__} to {getattr(action, 'to', 'no step')}"
            raise ValueError(f"action must be the Rewind that observe or judged returned last, got {got}")
        return action

    def _check_done(self):
        if self.pending is not None:
            what = "carried out: then call rewound(action)" if isinstance(self.pending, Rewind) else "obeyed"
            raise ValueError(f"the last action, {self.pending.name}, was not {what}")

    def _blew_up(self, incident: Incident, evidence: dict[str, Any]) -> Action:
        before = self._policy.decisions.copy()
        self.pending = self._policy.blew_up(incident, self._places.all, evidence)
        self._before = (before, incident, evidence) if isinstance(self.pending, Rewind) else None
        return self.pending

    def _land(self, to):
        self._places.keep(x for x in self._places.all if x.step <= to)
        self._remember(self._places.memories.get(to, Recovery(self.config)._memory()))
        self._policy.decisions.undo_passed(to)
        self.step, self.pending, self._before, self._policy.second_try = to, None, None, None
        self._log("rewound")

    def _memory(self) -> dict[str, Any]:
        """What a rewind to the present step must bring back."""
        return {"detector": self._detector.state_dict(), "trail": self._trail.to_json()}

    def _remember(self, memory):
        self._detector = Detector.load(self.config, memory["detector"])
        self._trail = Trail(self.config, memory["trail"])

    def _log(self, event, **fields):
        if self._record is not None:
            place = {"event": event, "update": self.update, "step": self.step}
            try:
                self._record(finite_json({**place, **fields}))
            except OSError as error:  # a full disk stops no training
                warnings.warn(
                    f"the log of recovery lost its entry {event!r} of step {self.step}: {error}", stacklevel=2
                )


def _ending(value: dict[str, Any]) -> Rewind | Stop:
    action = action_from_json(value)
    assert isinstance(action, Rewind | Stop)
    return action
