"""What page and figure of a replay have in common: colours, and what can be drawn where."""

import numpy as np

from zclip_jax.replay._replay import Replay
from zclip_jax.replay.readers._recording import Recording

# Okabe and Ito's colours, which colour-blind people can tell apart as well.
NORM, TRIGGER, SPIKE, SCALED, NONFINITE, LOSS = (
    "#56b4e9",
    "black",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#0072b2",
)
ALLOWED, START = "#555555", "#777777"
OTHERS = ("#e69f00", "#0072b2", "#999999", "#f0e442")
# Up to as many steps a curve has a dot for each, so that a log of one step shows it.
SHORT = 200


def positions(recording: Recording) -> tuple[np.ndarray, str]:
    """Where each row lies along the x axis, and that axis's title: steps that restart would draw over each other."""
    if np.all(np.diff(recording.steps) > 0):
        return recording.steps, "step"
    return np.arange(recording.steps.size), "row of the log"


def on_log_axis(values: object) -> np.ndarray:
    """`values` as float64, NaN where they have no place on a log axis."""
    values = np.asarray(values, np.float64)
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def scaled_only(result: Replay) -> np.ndarray:
    """The steps that were scaled down without being a spike, most often by a cap."""
    outcomes = result.outcomes
    return np.asarray(outcomes.bound | outcomes.capped) & ~np.asarray(outcomes.fired)


def alone(line: np.ndarray) -> np.ndarray:
    """The steps with a value between two without, of which a line shows nothing."""
    there = np.pad(~np.isnan(line), 1)
    return there[1:-1] & ~there[:-2] & ~there[2:]


def run_starts(recording: Recording) -> np.ndarray:
    """Where along the x axis each run but the first begins."""
    return positions(recording)[0][list(recording.starts[1:])]


def of_runs(recording: Recording) -> str:
    """What to add to a title where there are several runs."""
    return f" in {len(recording.starts):,} runs" if len(recording.starts) > 1 else ""


def name_line(rule: str, trigger: np.ndarray) -> str:
    """What to call the line above which a rule fires, which may be nowhere."""
    return f"{rule} {'never fires' if np.isnan(trigger).all() else 'fires above'}"
