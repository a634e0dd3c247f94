"""The rules and settings among which `recommend` chooses."""

from typing import Any, NamedTuple

# What to try: each preset's threshold first, and of each setting the default first.
GRIDS = {
    "zclip": {
        "z_thresh": (2.5, 3.0, 2.0, 3.5, 4.0, 5.0, 6.0),
        "min_rel_std": (0.0, 0.12, 0.06, 0.2),
        "alpha": (0.97, 0.98, 0.95, 0.99, 0.9),
    },
    "levelclip": {
        "multiple": (1.65, 1.75, 1.55, 1.85, 1.45, 2.0),
        "num_std": (2.9, 2.5, 3.5),
        "alpha": (0.95, 0.97, 0.9),
    },
}


class Candidate(NamedTuple):
    """A rule with its settings, and how it does on the log.

    Args:
      preset: the transformation, `"zclip"` or `"levelclip"`.
      settings: some of its arguments by name, of which `max_grad_norm` is None; the others have their defaults.
      num_caught: outliers of the run's own tail that fire.
      num_false_alarms: steps that fire below 1.3 times their local median.
      num_fired: steps that fire.
      locked_in: whether it calls every step of a run from some point on a spike.
    """

    preset: str
    settings: dict[str, Any]
    num_caught: int
    num_false_alarms: int
    num_fired: int
    locked_in: bool

    @property
    def rule(self) -> str:
        """As one writes it on the command line."""
        return f"{self.preset}:{','.join(self._written('none'))}"

    @property
    def call(self) -> str:
        """As one writes it in Python."""
        return f"{self.preset}({', '.join(self._written('None'))})"

    def _written(self, none: str) -> list[str]:
        return [f"{name}={none if value is None else f'{value:g}'}" for name, value in self.settings.items()]
