"""`Wandb`: a run of Weights & Biases."""

from typing import Any

from zclip_jax._extras import require
from zclip_jax.monitor._position import OWN, Row
from zclip_jax.monitor._tracker import Tracker, tracked


class Wandb(Tracker):
    """Logs rows to a Weights & Biases run, all of them, those after a rewind too.

    W&B drops what comes with a step below its last. So its step is the update, or the next one where a resumed run
    holds more, and its charts have the training step, `train/step`, on their axis. `train/attempt` and `train/update`
    are columns beside it. A run that is resumed online (`id=…, resume="allow"`) goes on with the updates and attempts
    that it holds. Offline W&B cannot know them: give the `Monitor` a `JsonLines` as well.

    Args:
      **settings: of `wandb.init`: `project`, `name`, `config`, `mode`, … The run is started with the first row.

    Examples:
      >>> from zclip_jax.monitor import Monitor, Wandb
      >>> monitor = Monitor([Wandb(project="llama", mode="offline")])  # doctest: +SKIP
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._wandb = require("wandb", "wandb", "Wandb")
        self._settings = settings

    def _start(self) -> Any:
        run = self._wandb.init(**self._settings)
        run.define_metric("train/step")
        run.define_metric("*", step_metric="train/step")
        return run

    def last_row(self) -> Row | None:
        """The numbers of the last row in a resumed run."""
        summary = self.run.summary
        row = {name: summary.get(f"train/{name}") for name in OWN}
        return None if None in row.values() else row

    def log_row(self, row: Row) -> None:
        """Logs a row as the next step of the run."""
        # From what it holds on, if that is more than the log knew of: W&B drops what comes with a lower step.
        self.run.log(tracked(row), step=max(row["update"], self.run.step), commit=True)
