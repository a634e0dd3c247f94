"""What is odd about a recorded run, in sentences."""

from collections.abc import Sequence

import numpy as np

FEW = 20  # norms that may all be round by chance
EQUAL = 5  # norms that aren't the same by chance
COARSE = 0.01  # of the median: rounding that a rule's statistics notice


def count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listing(names: Sequence[str], most: int = 8) -> str:
    """The first names, shortened, and how many more there are."""
    shown = ", ".join(shorten(name, 50) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def shorten(text: str, most: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def cadence_of(steps: np.ndarray, starts: Sequence[int] = (0,)) -> int:
    """The most frequent distance forward from one row to the next of its run, 1 if there is none."""
    ahead = np.diff(steps)
    ahead = np.delete(ahead, np.asarray(starts[1:], int) - 1)
    distances, frequency = np.unique(ahead[ahead > 0], return_counts=True)
    return int(distances[np.argmax(frequency)]) if distances.size else 1


def notes_on_steps(steps: np.ndarray, cadence: int) -> list[str]:
    """Sentences on repeated, backward, missing and thinned out steps."""
    notes = []
    ahead = np.diff(steps)
    if cadence > 1:
        notes.append(f"every {_ordinal(cadence)} step is logged")
    if (ahead <= 0).any():
        repeated = np.ones(steps.size, bool)
        repeated[np.unique(steps, return_index=True)[1]] = False
        if repeated.any():
            what = count(int(repeated.sum()), "row repeats", "rows repeat")
            notes.append(f"{what} an earlier step, first {steps[np.argmax(repeated)]}; kept in file order")
        back = np.flatnonzero(ahead < 0)
        if back.size:
            times = count(back.size, "time")
            notes.append(f"steps go backwards {times}, first from {steps[back[0]]} to {steps[back[0] + 1]}")
    gaps = np.flatnonzero(ahead >= 2 * cadence)
    if gaps.size:
        missing = int((ahead[gaps] // cadence - 1).sum())
        are = count(missing, "step is", "steps are")
        notes.append(f"{are} missing in {count(gaps.size, 'gap')}, the first after step {steps[gaps[0]]}")
    return notes


def notes_on_runs(norms: np.ndarray, steps: np.ndarray, starts: Sequence[int]) -> list[str]:
    """Sentences on the steps of each run; what all have in common is said once."""
    ends = (*starts[1:], norms.size)
    runs: dict[str, list[int]] = {}
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        for note in notes_on_steps(steps[start:end], cadence_of(steps[start:end])):
            runs.setdefault(note, []).append(number)
    notes = [note for note, numbers in runs.items() if len(numbers) == len(starts)]
    others = [(note, numbers) for note, numbers in runs.items() if len(numbers) < len(starts)]
    notes += [
        f"{'run' if len(which) == 1 else 'runs'} {', '.join(map(str, which))}: {note}"
        for note, which in others[:3]
    ]
    if len(others) > 3:
        notes.append(
            f"{count(len(others) - 3, 'more note is', 'more notes are')} with the runs they are about"
        )
    return notes


def notes_on_norms(norms: np.ndarray, steps: np.ndarray, name: str) -> list[str]:
    """Sentences on norms that no healthy step has; `name` is the column's."""
    notes = []
    for odd, what in (
        (~np.isfinite(norms), "not finite"),
        (norms == 0, "zero"),
        (norms < 0, "negative"),
    ):
        if odd.any():
            are = count(int(odd.sum()), "norm is", "norms are")
            notes.append(f"{are} {what}, first at step {steps[np.argmax(odd)]}")
    if norms.size >= EQUAL and "norm" in name.lower() and (norms == norms[0]).all() and norms[0] > 0:
        notes.append(
            f"all {norms.size:,} norms are {norms[0]:g}: they look logged after clipping, or are a limit and no norms"
        )
    usable = norms[np.isfinite(norms) & (norms > 0)]
    for decimals in range(4 if usable.size >= FEW and np.ptp(usable) > 0 else 0):
        if np.array_equal(usable, np.round(usable, decimals)):
            part = 10.0**-decimals / np.median(usable)
            if part > COARSE:
                notes.append(f"norms are rounded to {count(decimals, 'decimal')}, {part:.0%} of their median")
            break
    return notes


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{suffix}"
