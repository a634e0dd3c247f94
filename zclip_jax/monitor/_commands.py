"""`zclip-jax follow | plot | spike`."""

import argparse
import os
from pathlib import Path
from typing import Any

from zclip_jax.monitor._follow import follow
from zclip_jax.monitor._logs import read_run
from zclip_jax.monitor._plot import plot_runs
from zclip_jax.monitor._records import describe_record, find_records

LOG = "the folder of a run that has a metrics.jsonl, or any log that `zclip-jax replay` reads"


def add_commands(commands: Any) -> None:
    """Adds the commands that look at runs."""
    command = commands.add_parser(
        "follow",
        help="look at a run while it goes on",
        description="Shows loss, norm, rates, alarms and spikes of a run as it goes on, until Ctrl-C. Where the "
        "output is no terminal, it shows them once. Of a log that does not tell what was clipped, zclip is replayed.",
    )
    command.add_argument("path", metavar="RUN_OR_LOG", type=Path, help=LOG)
    command.set_defaults(command=lambda options: follow(options.path))

    command = commands.add_parser(
        "plot",
        help="draw runs",
        description="Draws the losses of runs, their gradient norms with what was allowed and the spikes, and how "
        "much was clipped.",
    )
    command.add_argument("paths", metavar="RUN", type=Path, nargs="+", help=LOG)
    command.add_argument("-o", "--output", metavar="FILE", required=True, help="a .png, .svg or .pdf file")
    command.set_defaults(command=_plot)

    command = commands.add_parser(
        "spike",
        help="print the record of a spike",
        description="Prints what a run has recorded about a spike: groups, decision, rows.",
    )
    command.add_argument("path", metavar="RUN", type=Path, help="the folder of a run that has a spikes.jsonl")
    command.add_argument("step", metavar="STEP", type=int)
    command.set_defaults(command=_spike)


def _plot(options: argparse.Namespace) -> None:
    folder = os.path.dirname(options.output) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder} to draw {options.output} in")
    if os.path.isdir(options.output):
        raise IsADirectoryError(f"{options.output} is a folder, and no file to draw to")
    for path in options.paths:
        if path.exists() and os.path.exists(options.output) and os.path.samefile(path, options.output):
            raise ValueError(f"{options.output} is a run itself")
    plot_runs(options.output, [read_run(path) for path in options.paths])


def _spike(options: argparse.Namespace) -> None:
    print("\n\n".join(map(describe_record, find_records(options.path, options.step))))
