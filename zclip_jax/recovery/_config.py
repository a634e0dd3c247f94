"""The numbers of recovery, checked once."""

import math
from dataclasses import dataclass, fields
from typing import Any

from zclip_jax._checks import check_count, check_number


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """When a loss is a malignant spike, what to do about it, and how often at most.

    Every length is in steps, which are also batches.

    Args:
      window: how many losses the median and the MAD (median absolute deviation) are taken of.
      warmup: how many losses must have been seen before one can be a spike, at most `window`.
      num_mads: how many MADs above the median a loss may lie; 9 are about 6 standard deviations of normal noise.
      min_rise: how far above the median a loss may lie whatever the MAD, as a share of the median.
      grace: how many steps a spike has to come back into the band; a later one is malignant. Checkpoints count as
        good when as many steps have passed since.
      settle: how many losses in a row must lie in the band for a spike to be over.
      skip_before: how many batches before the first bad loss are under suspicion too, at most `grace`.
      skip_batches: how many batches are left out at least; twice as many each time that this was not enough.
      retry_after: how many steps after a rewind the batches left out may be tried again.
      clear_after: how many steps without another blow-up end a trouble, so that the next one starts afresh.
      mitigations: what to try once leaving data out has failed twice, as pairs `(kind, factor)` from mild to
        strong; see `Mitigation`.
      mitigation_steps: how long a mitigation stays on after the step of the blow-up.
      max_rewinds: of one run.
      max_rewinds_per_window: of any `budget_window` steps.
      budget_window: in steps.
      max_replayed: steps of a run that may be thrown away and trained again, over all rewinds.
      max_unreproduced: how many blow-ups in `budget_window` steps may prove not reproducible before the run asks to
        be restarted elsewhere.

    Raises:
      ValueError: an argument is outside its range.

    Examples:
      >>> from zclip_jax.recovery import RecoveryConfig
      >>> RecoveryConfig(grace=16).skip_before
      8
      >>> RecoveryConfig(grace=4)
      Traceback (most recent call last):
      ValueError: skip_before must be an integer of at most grace = 4, got 8
    """

    window: int = 128
    warmup: int = 32
    num_mads: float = 9.0
    min_rise: float = 0.05
    grace: int = 32
    settle: int = 3
    skip_before: int = 8
    skip_batches: int = 32
    retry_after: int = 128
    clear_after: int = 256
    mitigations: tuple[tuple[str, float], ...] = (("lr", 0.5), ("lr", 0.25))
    mitigation_steps: int = 512
    max_rewinds: int = 20
    max_rewinds_per_window: int = 8
    budget_window: int = 1024
    max_replayed: int = 20_000
    max_unreproduced: int = 2

    def __post_init__(self):
        for field in fields(self):
            if isinstance(field.default, int):
                check_count(field.name, getattr(self, field.name), least=int(field.name != "skip_before"))
        check_number("num_mads", self.num_mads, "a finite number > 0", lambda x: 0 < x < math.inf)
        check_number("min_rise", self.min_rise, "a finite number >= 0", lambda x: 0 <= x < math.inf)
        _check_most("warmup", self.warmup, "window", self.window)
        _check_most("settle", self.settle, "grace", self.grace)
        _check_most("skip_before", self.skip_before, "grace", self.grace)
        _check_mitigations(self.mitigations)


def _check_most(name: str, value: int, other: str, most: int) -> None:
    check_number(name, value, f"an integer of at most {other} = {most}", lambda x: x <= most)


def _check_mitigations(value: Any) -> None:
    accepted = "mitigations must be pairs (kind, factor) of a non-empty name and a finite number >= 0"
    pairs = value if isinstance(value, tuple | list) else (value,)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) and pair[0]):
            raise ValueError(f"{accepted}, got {value!r}")
        check_number(f"the factor of mitigation {pair[0]!r}", pair[1], "a finite number >= 0", _is_factor)


def _is_factor(x: Any) -> bool:
    return bool(0 <= x < math.inf)
