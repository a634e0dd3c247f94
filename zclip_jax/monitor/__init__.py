"""Logs of a run that is under way, alarms, the rows of a batch, and runs to look at.

with Monitor([JsonLines("run/metrics.jsonl"), TensorBoard("run/tensorboard")]) as monitor:
    …
    monitor.log(step, scalars)
"""

from zclip_jax._alarms import ALARMS, Alarm
from zclip_jax._spike_score import SpikeScore, spike_score
from zclip_jax.monitor._json_lines import JsonLines
from zclip_jax.monitor._logs import read_run
from zclip_jax.monitor._monitor import Monitor
from zclip_jax.monitor._plot import plot_runs
from zclip_jax.monitor._records import describe_record
from zclip_jax.monitor._rows import RowReport, Rows, RowTracker, row_report
from zclip_jax.monitor._run import Run
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
    "Run",
    "SpikeScore",
    "TensorBoard",
    "Trackio",
    "Wandb",
    "describe_record",
    "plot_runs",
    "read_run",
    "row_report",
    "spike_score",
]
