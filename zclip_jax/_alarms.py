"""Alarms: what is wrong with a run, read off the columns of its rows, while it runs or afterwards."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Columns = Mapping[str, np.ndarray]


class Alarm(NamedTuple):
    """A condition on the last rows of a run.

    Both functions take columns by name, each `[rows]` in the order of the log: `"step"`, and those that the alarm
    `reads`. A column of flags may hold shares between 0 and 1, of the groups that a flag is up for.

    Args:
      name: what the alarm is called in logs.
      reads: the columns, by what stands after the last slash of their names in a row.
      window: how many rows, that one included, decide whether it holds at a row.
      holds: of all rows, bool `[rows]`; False where there are fewer rows than it needs.
      say: of at most `window` rows, at the last of which it holds, a sentence.

    Examples:
      >>> import numpy as np
      >>> from zclip_jax.monitor import Alarm
      >>> hot = Alarm("loss_up", ("loss",), 1, lambda rows: rows["loss"] > 9, lambda rows: "the loss is above 9")
      >>> hot.holds({"loss": np.asarray([3.0, 9.5])}).tolist()
      [False, True]
    """

    name: str
    reads: tuple[str, ...]
    window: int
    holds: Callable[[Columns], np.ndarray]
    say: Callable[[Columns], str]


WINDOW = 100  # steps over which the rate of clipped ones counts
IN_A_ROW = 10  # spikes, or norms that are not finite
RISE = 3.0  # of the update-to-weight ratio, as a multiple of its level


def _clipped(rows: Columns) -> np.ndarray:
    return np.maximum(rows["capped"], rows["bound"])


def _mostly_clipped(rows: Columns) -> np.ndarray:
    total = np.cumsum(np.r_[0.0, _clipped(rows)])
    held = np.zeros(total.size - 1, bool)
    # The sums are of shares, and rounding must not make more than a half of a half.
    held[WINDOW - 1 :] = total[WINDOW:] - total[:-WINDOW] > WINDOW / 2 + 1e-6
    return held


def _say_mostly_clipped(rows: Columns) -> str:
    clipped = _clipped(rows).sum()
    what = "cap" if rows["capped"].sum() > clipped / 2 else "rule"
    rate = f"{clipped:.0f} of the last {WINDOW} {_steps(rows)} were clipped"
    slow = ", and SGD may stop learning" if clipped > 0.95 * WINDOW else ""
    return f"{rate}: the {what} is acting as a learning rate{slow}"


def _in_a_row(flags: np.ndarray) -> np.ndarray:
    """How many flags up to each row are up, without a gap."""
    place = np.arange(1, flags.size + 1)
    return place - np.maximum.accumulate(np.where(flags, 0, place))


def _not_finite(rows: Columns) -> np.ndarray:
    return _in_a_row(~np.isfinite(rows["grad_norm"])) >= IN_A_ROW


def _say_not_finite(rows: Columns) -> str:
    return f"no finite norm for {IN_A_ROW} {_steps(rows)}"


def _many_spikes(rows: Columns) -> np.ndarray:
    return _in_a_row(rows["fired"] > 0.5) >= IN_A_ROW


def _say_many_spikes(rows: Columns) -> str:
    run = int(_in_a_row(rows["fired"] > 0.5)[-1])
    since = f"step {rows['step'][-run]:.0f}" + (" or earlier" if run == WINDOW else "")
    return f"in one run of spikes since {since}: a new level, or a run that diverges"


def _ratio_up(rows: Columns) -> np.ndarray:
    return rows["ratio_rise"] >= RISE


def _say_ratio_up(rows: Columns) -> str:
    return f"the update-to-weight ratio is {rows['ratio_rise'][-1]:.3g}x its level: the loss may follow soon"


def _skipping(rows: Columns) -> np.ndarray:
    return rows["alarm"] > 0.5


def _say_skipping(rows: Columns) -> str:
    return "as many steps in a row were skipped as skip_by_rule allows: training stands still"


def _steps(rows: Columns) -> str:
    return "steps" if (np.diff(rows["step"]) <= 1).all() else "logged steps"


#: The alarms that a `Monitor` has unless told.
ALARMS = (
    Alarm("clipping", ("capped", "bound"), WINDOW, _mostly_clipped, _say_mostly_clipped),
    Alarm("nonfinite", ("grad_norm",), IN_A_ROW, _not_finite, _say_not_finite),
    Alarm("spikes", ("fired",), WINDOW, _many_spikes, _say_many_spikes),
    Alarm("ratio", ("ratio_rise",), 1, _ratio_up, _say_ratio_up),
    Alarm("skips", ("alarm",), 1, _skipping, _say_skipping),
)
