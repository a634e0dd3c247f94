"""`Trackio`: a run of trackio."""

from typing import Any

from zclip_jax._extras import require
from zclip_jax.monitor._position import Row
from zclip_jax.monitor._tracker import Tracker, tracked


class Trackio(Tracker):
    """Logs rows to a trackio run, at their updates; `train/step` and `train/attempt` are columns.

    Args:
      **settings: of `trackio.init`: `project`, `name`, `config`, `space_id`, … To go on with a run, give its `name`
        and `resume="allow"`. The run is started with the first row.

    Examples:
      >>> from zclip_jax.monitor import Monitor, Trackio
      >>> monitor = Monitor([Trackio(project="llama")])  # doctest: +SKIP
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._trackio = require("trackio", "trackio", "Trackio")
        self._settings = settings

    def _start(self) -> Any:
        return self._trackio.init(**self._settings)

    def log_row(self, row: Row) -> None:
        """Logs a row at its update."""
        self.run.log(tracked(row), step=row["update"])
