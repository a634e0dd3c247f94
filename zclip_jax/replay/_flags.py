"""What stands out about a run and a rule, in plain words."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zclip_jax._alarms import ALARMS
from zclip_jax.replay._outliers import NO_OUTLIER, Hindsight, is_finite, is_usable
from zclip_jax.replay._replay import Replay
from zclip_jax.replay._specs import Spec
from zclip_jax.replay._warm_up import warm_up_rows
from zclip_jax.replay.readers import Recording

FEW = 200  # norms below which rates say little
MANY_ALARMS = 0.005  # of all steps
PILE = 5  # norms that are all the largest one: they were logged after clipping


def find_flags(
    spec: Spec, recording: Recording, hindsight: Hindsight, replayed: Replay, report: Mapping[str, Any]
) -> list[str]:
    """A sentence on whatever stands out; `report` is that of `describe_rule`."""
    finite = recording.norms[is_finite(recording.norms)]
    if not finite.size:
        return ["no norm is finite: the run was broken from its first logged step on"]
    usable = recording.norms[is_usable(recording.norms)]
    if not usable.size:
        return ["no norm is finite and above zero: there is nothing that a rule could judge"]
    found = [
        _clipped_before(finite),
        _cadence(spec.settings.get("alpha"), recording.cadence),
        _cap(spec.settings["max_grad_norm"], report["capped_rate"]),
        _lock_in(spec, report["locked_in_from"]),
        _warm_up(spec, report["warm_up"]),
        _missed(spec, recording, hindsight, replayed),
        _false_alarms(spec, report),
        *_alarms(recording, replayed, report["locked_in_from"] is not None),
        _few(usable.size, finite.size),
    ]
    return [sentence for sentence in found if sentence]


def _clipped_before(finite: np.ndarray) -> str | None:
    largest = finite.max()
    pile = int(np.isclose(finite, largest, rtol=1e-4, atol=0).sum())
    just_below = int((finite > 0.98 * largest).sum()) - pile
    if pile < PILE or pile <= just_below:
        return None
    those = (
        f"all {pile:,} norms are {largest:.4g}"
        if pile == finite.size
        else f"{pile:,} norms are {largest:.4g}, the largest"
    )
    return f"{those}: they look logged after clipping, which hides what there was to clip"


def _alarms(recording: Recording, replayed: Replay, locked_in: bool) -> list[str]:
    """What a live `Monitor` would have raised, had the rule run."""
    norms, outcomes = recording.norms, replayed.outcomes
    columns = {"step": recording.steps, "grad_norm": np.where(is_finite(norms), norms, np.nan)}
    columns |= {name: np.asarray(getattr(outcomes, name)) for name in ("fired", "bound", "capped")}
    found = []
    for alarm in ALARMS:
        follows = locked_in and alarm.name in ("clipping", "spikes")
        if follows or not all(name in columns for name in alarm.reads):
            continue
        rows = np.flatnonzero(alarm.holds(columns))
        if rows.size:
            end = rows[0] + 1
            window = {name: x[max(end - alarm.window, 0) : end] for name, x in columns.items()}
            share = f"; so at {rows.size:,} of {norms.size:,} steps" if rows.size > 1 else ""
            found.append(f"alarm at step {recording.steps[rows[0]]}: {alarm.say(window)}{share}")
    return found


def _few(num_usable: int, num_finite: int) -> str | None:
    if num_usable >= FEW:
        return None
    norms = "norms" if num_usable == num_finite else "norms above zero"
    return f"{num_usable} {norms} are few: rates and settings found on them may be chance"


def _cadence(alpha: Any, cadence: int) -> str | None:
    if cadence == 1:
        return None
    sentence = (
        f"logged every {cadence:,} steps: what was between is unseen, and neither EMA constants nor a warm-up carry "
        "over"
    )
    if alpha is None or not 0 < alpha < 1:
        return sentence
    return (
        f"{sentence}; for the memory that alpha = {alpha:g} has here, use alpha = {alpha ** (1 / cadence):.8g} in "
        "training"
    )


def _cap(cap: int | float | None, rate: float) -> str | None:
    if rate > 0.95:
        steps = "every step" if rate == 1 else f"nearly every step ({rate:.1%})"
        return f"{steps} is clipped by max_grad_norm = {cap:g}: raise it or drop it"
    if rate > 0.2:
        return (
            f"{rate:.0%} of the steps are clipped by max_grad_norm = {cap:g}: more its doing than the rule's"
        )
    return None


def _lock_in(spec: Spec, step: int | None) -> str | None:
    if step is None:
        return None
    cure = "; set patience = 25" if spec.settings.get("patience", 0) is None else ""
    return f"locked in from step {step}: every later step is called a spike{cure}"


def _warm_up(spec: Spec, health: Mapping[str, Any]) -> str | None:
    if health["loose_until"] is None:
        return None
    steps = ", ".join(str(step) for step in health["outlier_steps"][:3])
    cure = (
        "; try robust_warmup = True or the rule level" if spec.settings.get("robust_warmup") is False else ""
    )
    return f"an outlier in warm-up (step {steps}) loosened the threshold until step {health['loose_until']}{cure}"


def _missed(spec: Spec, recording: Recording, hindsight: Hindsight, replayed: Replay) -> str | None:
    missed = np.flatnonzero(hindsight.outlier & ~np.asarray(replayed.outcomes.fired))
    if not missed.size:
        return None
    steps = recording.steps[missed]
    where = f"step {steps[0]}" if steps.size == 1 else f"from step {steps[0]} to {steps[-1]}"
    early = int(np.isin(missed, warm_up_rows(spec, recording.norms)).sum())
    within = f", {early:,} of them in the warm-up" if early else ""
    return f"{missed.size:,} of {hindsight.outlier.sum():,} outliers did not fire, {where}{within}"


def _false_alarms(spec: Spec, report: Mapping[str, Any]) -> str | None:
    alarms, steps = report["num_false_alarms"], report["num_steps"]
    if alarms <= MANY_ALARMS * steps:
        return None
    cure = "; try the rule level, or min_rel_std = 0.12" if spec.settings.get("min_rel_std") == 0 else ""
    return (
        f"{alarms:,} steps fired below {NO_OUTLIER:g}x their local median, {alarms / steps:.1%} of all{cure}"
    )
