"""Checkpoints on the disk: which are good, which are whole, and which belong to an abandoned line of training."""

import warnings
from typing import Any

import jax

from zclip_jax._extras import require
from zclip_jax.recovery._files import (
    FILES,
    OURS,
    about_of,
    as_path,
    damage_of,
    first_line,
    of_the_disk,
    read_json,
    sizes,
    try_to_write,
)
from zclip_jax.recovery._keep_good import GOOD, KeepGood, folder_of, good_steps, step_of
from zclip_jax.recovery._processes import everywhere, sync
from zclip_jax.recovery._sums import changed, crc, sums

REWIND = "zclip_rewind.json"  # beside the checkpoints while a rewind is being carried out
BROKEN = "broken"  # where checkpoints go that can't be restored


class GoodCheckpoints:
    """Orbax checkpoints that know whether they are good, and that can be gone back to.

    A checkpoint is *whole* if all that was saved is there, unchanged. It is *good* if you marked it so, once
    training went on for some steps without trouble; the mark lies in the checkpoint, so that a crash forgets nothing.
    Call every method on every process.

    Orbax writes nothing for a step that is not after all others. So a rewind has to retire the newer checkpoints,
    which `rewind` does from the newest to the oldest; if it is killed on the way, the next start completes it.

    Args:
      manager: the folder, or an `orbax.checkpoint.CheckpointManager` of your own. Its retention is then your affair:
        give `KeepGood` to its options as `preservation_policy`.
      keep_recent: how many of the newest checkpoints to keep, at least 1; 2 if not given.
      keep_good: how many good ones to keep, at least 1; 3 if not given.
      good_every: steps that lie between those good ones at least; 1 if not given.

    Raises:
      ValueError: an argument of the retention is out of its range, or given along with a `CheckpointManager`.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp, orbax.checkpoint as ocp
      >>> from zclip_jax.recovery import GoodCheckpoints
      >>> checkpoints = GoodCheckpoints(tempfile.mkdtemp(), keep_recent=2)
      >>> for step in (100, 200, 300):
      ...     saved = checkpoints.save(step, ocp.args.StandardSave({"w": jnp.full(2, step)}), {"loss": 2.5})
      >>> checkpoints.mark_good(200), checkpoints.good_steps
      (True, (200,))
      >>> step, state = checkpoints.restore(200, ocp.args.StandardRestore({"w": jnp.zeros(2, int)}))
      >>> checkpoints.rewind(step)
      >>> checkpoints.steps, state["w"].tolist(), checkpoints.metadata(step)
      ((100, 200), [200, 200], {'loss': 2.5})
      >>> checkpoints.close()
    """

    def __init__(
        self,
        manager: Any,
        *,
        keep_recent: int | None = None,
        keep_good: int | None = None,
        good_every: int | None = None,
    ):
        ocp = require("orbax.checkpoint", "recovery", "GoodCheckpoints")
        keep = {"recent": keep_recent, "good": keep_good, "good_every": good_every}
        keep = {name: value for name, value in keep.items() if value is not None}
        if isinstance(manager, ocp.CheckpointManager):
            if keep:
                raise ValueError(f"with a CheckpointManager, give KeepGood to its options, got {keep}")
            self.manager = manager
        else:
            folder = as_path(manager)
            options = ocp.CheckpointManagerOptions(
                preservation_policy=KeepGood(folder, **keep), cleanup_tmp_directories=True
            )
            self.manager = ocp.CheckpointManager(folder, options=options)
        self._saving: int | None = None
        self._marked: set[int] = set()  # by this process, so that a repeated mark costs nothing
        self._complete_rewind()

    @property
    def directory(self) -> Any:
        """The folder of all checkpoints."""
        return self.manager.directory

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints, in order, the one that is being written among them."""
        return tuple(sorted(self.manager.all_steps()))

    @property
    def good_steps(self) -> tuple[int, ...]:
        """The steps of those that are marked good, in order."""
        return tuple(good_steps(self.directory, self.steps))

    def save(self, step: int, args: Any, metadata: Any = None) -> bool:
        """Starts to write a checkpoint; returns once the state is copied.

        Sums over all arrays go with it, so that a bit that changes on the disk is noticed. If the disk is full or
        fails, now or in the background, a warning says so, here or in the next call; older checkpoints stay.

        Args:
          step: after all steps that have a checkpoint.
          args: what `CheckpointManager.save` takes.
          metadata: whatever JSON holds, such as `{"recovery": recovery.state_dict(), "data": batches.get_state()}`.

        Returns:
          Whether it is being written. False without a warning means that the manager's options say not to.

        Raises:
          ValueError: `step` is not after all others.
        """
        self.wait_until_finished()
        if later := [kept for kept in self.steps if kept >= step]:
            raise ValueError(
                f"step must be after the steps of all checkpoints, else Orbax writes nothing, got {step} while "
                f"{later} exist: call rewind first"
            )
        if not self.manager.should_save(step):
            return False
        given = {name: getattr(item, "item", None) for name, item in _by_name(args).items()}
        about = {"metadata": metadata, "sums": sums(given)}
        # An error of an earlier save comes up here too, out of Orbax's threads: so one process alone tries twice.
        for again in (True, False) if jax.process_count() == 1 else (False,):
            self._saving = step
            try:
                if self.manager.save(step, args=args, custom_metadata={OURS: {**about, "crc": crc(about)}}):
                    return True
                self._lost("Orbax wrote nothing")
                return False
            except Exception as error:
                if not of_the_disk(error):
                    raise
                self._lost(error, silently=again)
        return False

    def wait_until_finished(self) -> None:
        """Returns once nothing is being written any more; a warning tells of a checkpoint that was lost."""
        try:
            self.manager.wait_until_finished()
        except Exception as error:  # of any kind: TensorStore, the file system, another process
            self._lost(error)
        if self._saving is not None:
            folder = folder_of(self.directory, self._saving)
            if folder is not None and jax.process_index() == 0:
                try_to_write(folder / FILES, sizes(folder))
            self._saving = None

    def mark_good(self, step: int) -> bool:
        """Writes into the checkpoint of `step` that it is good; to repeat it costs nothing.

        Returns:
          False if there is no such checkpoint, or if a warning said that the mark could not be written.
        """
        if step in self._marked:
            return True
        if step == self._saving:
            self.wait_until_finished()
        if step not in self.steps:
            return False
        written = True
        if jax.process_index() == 0:
            folder = folder_of(self.directory, step)
            written = (folder / GOOD).exists() or try_to_write(folder / GOOD, {"good": True})
        if everywhere(written):
            self._marked.add(step)
        return step in self._marked

    def metadata(self, step: int) -> Any:
        """What was given to `save` as `metadata`."""
        if step == self._saving:
            self.wait_until_finished()
        return about_of(folder_of(self.directory, step))["metadata"]

    def latest_whole(self) -> int | None:
        """The newest step all of whose files are there, in full length; None if there is none.

        It does not read the arrays: `restore` does. A warning names the newer ones that are not whole.
        """
        self.wait_until_finished()
        damage = {}
        for step in reversed(self.steps):
            if (why := damage_of(folder_of(self.directory, step))) is None:
                self._warn(damage, f"the newest whole one is of step {step}")
                return step
            damage[step] = why
        self._warn(damage, "none is whole")
        return None

    def restore(self, step: int | None, args: Any) -> tuple[int, Any]:
        """Restores the checkpoint of `step`, or the newest one before it that is whole.

        Those that had to be passed over are named in a warning and moved to the folder `broken`, out of the way of
        the next save.

        Args:
          step: None for the newest.
          args: what `CheckpointManager.restore` takes.

        Returns:
          The step that was restored, and what Orbax gave.

        Raises:
          ValueError: none could be restored; then nothing was moved.
        """
        self.wait_until_finished()
        damage: dict[int, str] = {}
        if step is not None and step not in self.steps:
            damage[step] = "there is none"
        for candidate in reversed([x for x in self.steps if step is None or x <= step]):
            restored, why = self._try_restore(candidate, args)
            if why is None:
                self._warn(damage, f"restored step {candidate} instead; see the folder {BROKEN!r}")
                self._set_aside([x for x in damage if x in self.steps])
                return candidate, restored
            damage[candidate] = why
        raise ValueError(
            f"no checkpoint in {self.directory} can be restored: {_list(damage) or 'it is empty'}"
        )

    def rewind(self, to: int) -> None:
        """Retires the checkpoints after `to`, from the newest to the oldest.

        Restore first, so that `to` is a step whose checkpoint could be read. If this is killed, the next start
        with the same folder completes it.

        Raises:
          ValueError: `to` has no checkpoint.
        """
        self.wait_until_finished()
        if to not in self.steps:
            raise ValueError(f"to must be one of the steps {list(self.steps)}, got {to}")
        if jax.process_index() == 0:
            try_to_write(self.directory / REWIND, {"to": to})
        self._retire_after(to)

    def close(self) -> None:
        """Waits until nothing is being written, and closes Orbax's manager."""
        self.wait_until_finished()
        self.manager.close()

    def __enter__(self) -> "GoodCheckpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _complete_rewind(self) -> None:
        begun = read_json(self.directory / REWIND) if self.directory.exists() else None
        sync("read rewind")
        if begun is not None:
            self._retire_after(begun["to"])

    def _retire_after(self, to: int) -> None:
        sync("begin rewind")
        self._marked = {step for step in self._marked if step <= to}
        for step in reversed([x for x in self.steps if x > to]):
            self.manager.delete(step)
        if jax.process_index() == 0:
            for folder in list(self.directory.iterdir()):  # half deleted, so that Orbax sees none
                if (step_of(folder.name) or 0) > to:
                    folder.rmtree()
            (self.directory / REWIND).unlink(missing_ok=True)
        sync("end rewind")

    def _try_restore(self, step: int, args: Any) -> tuple[Any, str | None]:
        restored, why = None, damage_of(folder_of(self.directory, step))
        if everywhere(why is None):
            try:
                restored = self.manager.restore(step, args=args)
                about = about_of(folder_of(self.directory, step))
                if names := changed(about["sums"], sums(_by_name(restored))):
                    why = f"{', '.join(names[:3])} changed since it was saved"
            except Exception as error:  # whatever else a folder holds, Orbax says it in many ways
                why = first_line(error)
            if everywhere(why is None):
                return restored, None
        return None, why or "another process could not read it"

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        self._marked -= set(steps)
        if jax.process_index() == 0:
            (self.directory / BROKEN).mkdir(exist_ok=True)
            for step in steps:
                folder = folder_of(self.directory, step)
                target = self.directory / BROKEN / folder.name
                count = 1
                while target.exists():
                    count += 1
                    target = self.directory / BROKEN / f"{folder.name}-{count}"
                folder.rename(target)
        sync("set aside")
        self.manager.reload()

    def _lost(self, why: Any, silently: bool = False) -> None:
        step, self._saving = self._saving, None
        self.manager.reload()  # Orbax no longer counts those that it would have deleted after the save
        if jax.process_index() == 0:
            for path in list(self.directory.iterdir()):
                if ".orbax-checkpoint-tmp" in path.name:
                    path.rmtree()
        if silently:
            return
        warnings.warn(
            f"the checkpoint of step {step} was not written: {first_line(why)}. The others, of steps "
            f"{list(self.steps)}, are untouched",
            stacklevel=3,
        )

    def _warn(self, damage: dict[int, str], instead: str) -> None:
        if damage:
            warnings.warn(f"checkpoints that are not whole: {_list(damage)}; {instead}", stacklevel=3)


def _by_name(value: Any) -> dict[str, Any]:
    """Of Orbax's arguments, or of what it restored: the items of a checkpoint by name."""
    composite = require("orbax.checkpoint", "recovery", "GoodCheckpoints").args.Composite
    named = value.items() if isinstance(value, composite) else [("default", value)]
    return {name: item for name, item in named if item is not None}


def _list(damage: dict[int, str]) -> str:
    return "; ".join(f"step {step}: {why}" for step, why in damage.items())
