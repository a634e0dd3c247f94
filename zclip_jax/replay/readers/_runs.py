"""Where runs begin in a log, and which rows of a resumed run count."""

from typing import NamedTuple

import numpy as np

from zclip_jax.replay.readers._notes import count

BELOW = 3  # rows below the highest step so far, that make a step back more than disorder


class Order(NamedTuple):
    """The rows of a log as runs.

    Args:
      starts: among the kept rows, where each run begins.
      keep: of all rows, which count.
      note: what was left out, or nothing.
    """

    starts: tuple[int, ...]
    keep: np.ndarray
    note: str = ""


def order_rows(
    steps: np.ndarray | None, epochs: np.ndarray | None, attempts: np.ndarray | None, goes_on: bool
) -> Order:
    """Finds the runs in rows that are in the order of a file.

    A step or epoch that goes back to where the run began is another run. One that goes back into the middle is the
    same run, resumed: earlier rows from there on don't count.

    Args:
      steps: of each row; None if the log has none.
      epochs: of each row, NaN where it has none; None if the log has none.
      attempts: how often each row's step was tried, or NaN; None if the log doesn't tell.
      goes_on: the step counts over all epochs, by its name, so that an epoch that starts again is no other run.
    """
    num_rows = next((x.size for x in (steps, epochs) if x is not None), 0)
    whole = Order((0,), np.ones(num_rows, bool))
    if epochs is not None and num_rows > 1 and np.isnan(epochs[-1]):  # the last row may be cut off
        epochs = np.append(epochs[:-1], epochs[-2])
    place = _places(steps, epochs)
    if place is None:
        return whole
    back = np.diff(place) < 0
    if attempts is not None:
        attempts = _filled(attempts)
        # The last step alone, again.
        back |= (np.diff(place) == 0) & (np.diff(attempts) > 0)
    restart = np.zeros(back.size, bool)
    if steps is not None and epochs is not None and not goes_on:
        restart = ~back & _starts_again(epochs)
    turns = np.flatnonzero(back | restart) + 1
    if not turns.size:
        return whole
    ahead = np.diff(place)
    # Epochs are rounded, often to two digits, so that the usual distance may be more than the true one.
    usual = np.min if (place % 1).any() else np.median
    unit = float(usual(ahead[ahead > 0])) if (ahead > 0).any() else 1.0
    starts, keep, resumed, left_out = [0], np.ones(num_rows, bool), [], 0
    rows = list(range(turns[0]))  # of the run so far, those that count
    first_row = 0
    for turn, end in zip(turns.tolist(), [*turns[1:].tolist(), num_rows], strict=True):
        to, top = place[turn], place[turn - 1]
        again = attempts is not None and attempts[turn] > attempts[first_row]
        begins = to < place[first_row] + unit * 0.999
        swapped = turn - first_row < BELOW and place[first_row] - 2 * unit <= to < place[first_row]
        if not again and (restart[turn - 1] or (begins and not swapped)):
            starts.append(turn)
            first_row, rows = turn, []
        else:
            later = _from(rows, place, to)
            segment = place[turn:end]
            below = (segment <= place[later].max()).sum() if later else 0
            if later and (again or below >= BELOW or np.isin(place[later], segment).any()):
                keep[later] = False
                del rows[len(rows) - len(later) :]
                resumed.append((top, to))
                left_out += len(later)
        rows.extend(range(turn, end))
    kept_before = np.cumsum(keep) - keep
    note = ""
    if resumed:
        what = "step" if steps is not None else "epoch"
        (top, to), times = resumed[0], count(len(resumed), "time")
        are = count(left_out, "earlier row is", "earlier rows are")
        note = (
            f"the run was resumed {times}, first from {what} {_shown(top, steps)} to {_shown(to, steps)}: "
            f"the last attempt counts, {are} left out"
        )
    return Order(tuple(int(kept_before[start]) for start in starts), keep, note)


def _places(steps: np.ndarray | None, epochs: np.ndarray | None) -> np.ndarray | None:
    """How far the run is in each row: its step, its epoch, or both where the step starts again with each epoch."""
    if epochs is not None and not np.isfinite(epochs).all():
        epochs = None
    if steps is None:
        return epochs
    place = steps.astype(float)
    if epochs is None:
        return place
    back = np.diff(place) < 0
    with_epoch = back & (np.diff(epochs) > 0)
    if 2 * with_epoch.sum() < back.sum() or not with_epoch.any():
        return place
    if (epochs % 1).any():
        return epochs
    return epochs * (place.max() - place.min() + 1) + place


def _filled(attempts: np.ndarray) -> np.ndarray:
    """With the attempt of the row before where a row has none; the first is number 0."""
    known = np.where(np.isnan(attempts), 0, np.arange(1, attempts.size + 1))
    return np.r_[0.0, attempts][np.maximum.accumulate(known)]


def _starts_again(epochs: np.ndarray) -> np.ndarray:
    """Between which rows the epoch falls back to the first."""
    return (np.diff(epochs) < 0) & (epochs[1:] <= epochs[0] + 0.5 * (epochs[0] < epochs[1:].max()))


def _from(rows: list[int], place: np.ndarray, to: float) -> list[int]:
    """The last of these rows, from where the place is reached on."""
    end = len(rows)
    while end and place[rows[end - 1]] >= to:
        end -= 1
    return rows[end:]


def _shown(place: float, steps: np.ndarray | None) -> str:
    return f"{place:g}" if steps is None else f"{place:,.0f}".replace(",", "")
