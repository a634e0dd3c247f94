"""What was it: the hardware, the data, or the state?"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal

import numpy as np

from zclip_jax.recovery._config import RecoveryConfig
from zclip_jax.recovery._detector import Detector
from zclip_jax.recovery._ring import MemoryRing
from zclip_jax.recovery._skips import SkipRanges

LEAST = 8  # losses before the suspect batches, to tell what is normal


@dataclass(frozen=True)
class Difference:
    """The first number that the replay did not give as it was recorded."""

    place: int  # among the recorded updates, from 0
    data_index: int
    name: str
    recorded: float
    replayed: float


@dataclass(frozen=True)
class Verdict:
    """What `verify` found; `str(verdict)` is a sentence or two.

    Args:
      kind: "not reproduced", "data", "state", or "reproduced" where no suspect batches were named.
      cause: where not reproduced "hardware", if the replay twice gave the same, or "non-determinism", if it did not;
        else as `kind`.
      first_difference: where the replay left the record; None where it did not.
      losses: of the replay.
      without: losses of the replay without the suspect batches, from where the first of them was left out.
      limit: the loss above which a spike begins.
      rows: what the function `rows` returned for the first suspect batch.
    """

    kind: Literal["not reproduced", "reproduced", "data", "state"]
    cause: str
    first_difference: Difference | None = None
    losses: tuple[float, ...] = ()
    without: tuple[float, ...] = ()
    limit: float = math.nan
    rows: Any = None
    suspects: SkipRanges = field(default_factory=SkipRanges)

    def __str__(self) -> str:
        if self.first_difference is not None:
            return self._say_difference(self.first_difference)
        text = f"reproduced: {len(self.losses)} updates gave what was recorded, bit for bit"
        if self.kind == "reproduced":
            return f"{text}.\nName suspect batches (`without`) to learn whether they are the cause"
        worst = _worst(self.without)
        if self.kind == "data":
            text += f".\nWithout batches {self.suspects} the spike is gone (worst loss {worst:.6g}): data"
        else:
            text += f".\nWithout batches {self.suspects} it is still there (worst loss {worst:.6g}): state"
        return text if self.rows is None else f"{text}\n{self.rows}"

    def _say_difference(self, found: Difference) -> str:
        text = (
            f"not reproduced: update {found.place} (batch {found.data_index}) gives {found.name} {found.replayed!r}, "
            f"recorded was {found.recorded!r}. "
        )
        if self.cause == "non-determinism":
            text += "A second replay gave yet another number: this program is not deterministic"
        else:
            text += "A second replay gave the same: the hardware erred when it was recorded"
        if found.place == 0:
            text += (
                ". As this is the very first update, check also that state, batches, program, devices and versions "
                "are those of the record"
            )
        return text


def verify(
    step_fn: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[tuple[int, Any]],
    recorded: Sequence[float | str | Mapping[str, float | str]],
    *,
    without: SkipRanges | None = None,
    limit: float | None = None,
    rows: Callable[[Any, Any], Any] | None = None,
) -> Verdict:
    """Trains again from a good state up to a spike, and compares with what was recorded.

    A step is a pure function of state and batch, so that the same program on the same devices gives the same bits.
    If it does not, then either it never does, or the hardware erred. If it does, the replay is repeated without the
    suspect batches: if the spike is gone, it was the data, else the state (which is also where a learning rate that
    is too high shows).

    Args:
      step_fn: as in training, `(state, batch) -> (state, loss)` or `(state, {"loss": loss, …})`. It may donate.
      state: of a good checkpoint; it is copied.
      batches: `(data_index, batch)` from that checkpoint on, such as a `SkippingIterator`: those that were trained,
        and after them as many as `without` leaves out. They are held in memory.
      recorded: the loss of each update from the checkpoint to the end of the spike, or of each a mapping of names to
        numbers that `step_fn` returns too, "loss" among them. Not rounded; "nan" and "inf" may be strings.
      without: the suspect batches, such as `action.skip`.
      limit: the loss above which a spike begins, such as `action.evidence["limit"]`. None for the limit that
        `Recovery` would have after the losses before the suspect batches, which must be 8 or more.
      rows: called as `rows(state, batch)` with the state before the first suspect batch and with that batch, if the
        data are the cause, to say which of its rows it was.

    Returns:
      A `Verdict`.

    Raises:
      ValueError: `recorded` is empty, was rounded or has no spike; `batches` ends too early; `without` leaves out
        none of the batches.

    Examples:
      >>> from zclip_jax.recovery import SkipRanges, verify
      >>> def step(total, batch):
      ...     return total + (100.0 if batch > 50 else 0.0), total + 0.01 * batch
      >>> batches = [(i, float(i % 7) if i != 12 else 99.0) for i in range(20)]
      >>> recorded, total = [], 0.0
      >>> for _, batch in batches[:16]:
      ...     total, loss = step(total, batch)
      ...     recorded.append(loss)
      >>> print(verify(step, 0.0, batches, recorded, without=SkipRanges([(11, 14)]), limit=1.0))
      reproduced: 16 updates gave what was recorded, bit for bit.
      Without batches [11, 14) the spike is gone (worst loss 0.04): data
    """
    wanted = [_as_numbers(numbers) for numbers in recorded]
    if not wanted:
        raise ValueError("recorded must hold the numbers of at least one update, got none")
    suspects = SkipRanges() if without is None else without
    source = iter(batches)
    held = list(islice(source, len(wanted)))
    if len(held) < len(wanted):
        raise ValueError(f"batches must give {len(wanted)} batches, as many as recorded, got {len(held)}")
    ring = MemoryRing(1)
    ring.put(0, state)

    losses, difference = _replay(step_fn, ring.get(0), held, wanted)
    if difference is not None:
        _, again = _replay(step_fn, ring.get(0), held[: difference.place + 1], wanted)
        same = repr(again) == repr(difference)  # where NaN equals NaN
        return Verdict("not reproduced", "hardware" if same else "non-determinism", difference, tuple(losses))
    if without is None:
        return Verdict("reproduced", "reproduced", losses=tuple(losses))
    first = next((at for at, (place, _) in enumerate(held) if place in suspects), None)
    if first is None:
        raise ValueError(
            f"without must name some of the batches, got {suspects}, they are {held[0][0]} to {held[-1][0]}"
        )
    limit = _limit(losses[:first]) if limit is None else float(limit)
    if not any(_is_spike(loss, limit) for loss in losses[first:]):
        raise ValueError(
            f"recorded must hold a spike: after the first suspect batch no loss is above {limit:.6g}"
        )
    rest = (pair for pair in chain(held, source) if pair[0] not in suspects)
    rest = list(islice(rest, len(wanted)))
    if len(rest) <= first:
        raise ValueError(
            f"batches must go on after the suspect ones {suspects}, to see what follows without them"
        )
    clean, _ = _replay(step_fn, ring.get(0), rest, None)
    clean = clean[first:]
    gone = not any(_is_spike(loss, limit) for loss in clean)
    named = None
    if gone and rows is not None:
        before = ring.get(0)
        for _, batch in held[:first]:
            before, _ = step_fn(before, batch)
        named = rows(before, held[first][1])
    kind = "data" if gone else "state"
    return Verdict(kind, kind, None, tuple(losses), tuple(clean), limit, named, suspects)


def _replay(step_fn, state, batches, wanted) -> tuple[list[float], Difference | None]:
    """The losses, up to the first number that is not as wanted."""
    losses = []
    for at, (place, batch) in enumerate(batches):
        state, out = step_fn(state, batch)
        numbers = out if isinstance(out, Mapping) else {"loss": out}
        losses.append(float(numbers["loss"]))
        for name, value in (wanted[at] if wanted else {}).items():
            if name not in numbers:
                raise ValueError(f"recorded has {name!r}, but step_fn returns only {sorted(numbers)}")
            if not _same(value, numbers[name], f"{name} of recorded[{at}]"):
                return losses, Difference(at, place, name, value, float(numbers[name]))
    return losses, None


def _as_numbers(entry: Any) -> dict[str, float]:
    numbers = entry if isinstance(entry, Mapping) else {"loss": entry}
    return {name: float(value) for name, value in numbers.items()}


def _same(recorded: float, replayed: Any, name: str) -> bool:
    """Whether the bits are the same; a number may be recorded with as many digits as its dtype needs."""
    scalar = np.asarray(replayed)[()]
    x = float(scalar)
    if math.isnan(recorded) or math.isnan(x):
        return math.isnan(recorded) and math.isnan(x)
    if recorded in (x, float(str(scalar))):
        return math.copysign(1, recorded) == math.copysign(1, x)
    mantissa, _, _ = repr(recorded).partition("e")
    digits = len(mantissa.replace("-", "").replace(".", "").strip("0"))
    decimals = len(mantissa.partition(".")[2])
    if math.isfinite(x) and recorded in (float(f"{x:.{max(digits, 1)}g}"), round(x, decimals)):
        raise ValueError(
            f"{name} must be recorded unrounded, got {recorded!r}, which is the replayed {x!r} rounded"
        )
    return False


def _is_spike(loss: float, limit: float) -> bool:
    return not math.isfinite(loss) or loss > limit


def _worst(losses: Sequence[float]) -> float:
    return max(losses, key=lambda loss: (not math.isfinite(loss), loss))


def _limit(losses: Sequence[float]) -> float:
    if len(losses) < LEAST:
        raise ValueError(
            f"limit must be given where fewer than {LEAST} losses lie before the suspect batches, got {len(losses)}"
        )
    detector = Detector(RecoveryConfig(warmup=LEAST))
    for loss in losses:
        detector.observe(loss)
    return detector.band()[2]
