"""Logs of a run that is under way, and alarms.

with Monitor([JsonLines("run/metrics.jsonl"), TensorBoard("run/tensorboard")]) as monitor:
    …
    monitor.log(step, scalars)
"""

from zclip_jax._alarms import ALARMS, Alarm
from zclip_jax.monitor._json_lines import JsonLines
from zclip_jax.monitor._monitor import Monitor
from zclip_jax.monitor._rows import RowReport, Rows, RowTracker, row_report
from zclip_jax.monitor._tensorboard import TensorBoard
from zclip_jax.monitor._trackio import Trackio
from zclip_jax.monitor._wandb import Wandb

__all__ = [
    "ALARMS",
    "Alarm",
    "JsonLines",
    "Monitor",
    "RowReport",
    "RowTracker",
    "Rows",
    "TensorBoard",
    "Trackio",
    "Wandb",
    "row_report",
]
