"""Which checkpoints to keep, and the file in a checkpoint that says it is good."""

from collections.abc import Sequence
from typing import Any

from zclip_jax._checks import check_count
from zclip_jax.recovery._files import as_path

GOOD = "zclip_good.json"


class KeepGood:
    """An Orbax preservation policy: recent checkpoints often, good ones seldom.

    It keeps the `recent` newest, whatever they are, and of those marked good the `good` newest that lie at least
    `good_every` steps apart. It also keeps the newest good one, and the first one after that, which will be the next
    to be judged: so there always is a good one to go back to, however late the verdict comes.

    Args:
      directory: where the checkpoints are.
      recent: at least 1.
      good: at least 1.
      good_every: steps, at least 1.

    Examples:
      >>> from zclip_jax.recovery import KeepGood
      >>> policy = KeepGood("/checkpoints", recent=2, good=3, good_every=500)
      >>> # ocp.CheckpointManagerOptions(preservation_policy=policy)
    """

    def __init__(self, directory: Any, recent: int = 2, good: int = 3, good_every: int = 1):
        for name, value in (("recent", recent), ("good", good), ("good_every", good_every)):
            check_count(name, value, 1)
        self.directory = as_path(directory)
        self.recent, self.good, self.good_every = recent, good, good_every

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """One bool for each of Orbax's records, which are in the order of their steps."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        return [step in self.kept(steps, good_steps(self.directory, steps)) for step in steps]

    def kept(self, steps: Sequence[int], good: Sequence[int]) -> set[int]:
        """Those of `steps` to keep if `good` are the good ones; both in order."""
        apart: list[int] = []
        for step in good:
            if not apart or step - apart[-1] >= self.good_every:
                apart.append(step)
        unjudged = [step for step in steps if not good or step > good[-1]]
        return {*steps[-self.recent :], *apart[-self.good :], *good[-1:], *unjudged[:1]}


def good_steps(directory: Any, steps: Sequence[int]) -> list[int]:
    """Those of `steps` whose checkpoint is marked good."""
    folders = ((step, folder_of(directory, step)) for step in steps)
    return [step for step, folder in folders if folder is not None and (folder / GOOD).exists()]


def folder_of(directory: Any, step: int) -> Any:
    """The folder of a step's checkpoint, whatever its prefix and its zeros; None if there is none."""
    if (plain := directory / str(step)).exists():
        return plain
    return next((path for path in directory.iterdir() if step_of(path.name) == step), None)


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None if it is no such name."""
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None
