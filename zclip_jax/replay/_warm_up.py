"""Whether a rule's warm-up was healthy: what outliers in it did to the triggers after it."""

from typing import Any, NamedTuple

import numpy as np

from zclip_jax.replay._outliers import Hindsight, is_usable
from zclip_jax.replay._replay import Replay
from zclip_jax.replay._runs import replay_runs
from zclip_jax.replay._specs import Spec
from zclip_jax.replay.readers import Recording

LOOSE = 1.1  # times the trigger there would be without the outliers


class WarmUp(NamedTuple):
    """The health of a warm-up.

    Args:
      num_norms: in it; None for rules without one.
      outlier_steps: those of its steps that are outliers.
      loose_until: the last step on which the outliers raise the trigger, the norm above which the rule fires, by more
        than a tenth; None if there is none after the warm-up.
    """

    num_norms: int | None
    outlier_steps: list[Any]
    loose_until: Any


def warm_up_rows(spec: Spec, norms: np.ndarray) -> np.ndarray:
    """The rows whose norms the warm-up takes."""
    return np.flatnonzero(is_usable(norms))[: int(spec.settings.get("warmup_steps", 0))]


def examine(spec: Spec, recording: Recording, hindsight: Hindsight, replayed: Replay) -> WarmUp:
    """Compares the rule's triggers with those on the same run without the outliers."""
    if "warmup_steps" not in spec.settings:
        return WarmUp(None, [], None)
    rows = warm_up_rows(spec, recording.norms)
    outliers = rows[hindsight.outlier[rows]]
    until = None
    if outliers.size:
        calm_norms = recording.norms.copy()
        calm_norms[outliers] = hindsight.median[outliers]
        (calm,) = replay_runs(spec.rule, [recording._replace(norms=calm_norms)])
        loose = np.flatnonzero(replayed.outcomes.trigger > LOOSE * calm.outcomes.trigger)
        until = recording.steps[loose[-1]] if loose.size and loose[-1] > rows[-1] else None
    return WarmUp(rows.size, recording.steps[outliers].tolist(), until)
