"""The command line: `zclip-jax replay | recommend | follow | plot | spike`."""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from zclip_jax.monitor._commands import add_commands
from zclip_jax.replay import Recording, read, recommend
from zclip_jax.replay._figure import write_figure
from zclip_jax.replay._json import to_json
from zclip_jax.replay._page import write_page
from zclip_jax.replay._report import describe_sweep, make_report
from zclip_jax.replay._specs import Spec, make_spec, parse_grid, parse_spec, rule_names
from zclip_jax.replay._table import print_report

BESIDE = ("fixed:max_norm=1", "percentile")  # what every rule is compared with


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 after a line on stderr that says what is wrong."""
    if hasattr(sys.stdout, "reconfigure"):  # names in a log may hold what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    jax.config.update(
        "jax_platforms", "cpu"
    )  # a scan over scalars is slower elsewhere, and may be kept waiting
    try:
        options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OverflowError, OSError, ImportError) as error:
        print(f"zclip-jax: {error}", file=sys.stderr)
        return 2
    return 0


class _Once(argparse.Action):
    """Stores a value, and refuses a second one, which would replace the first without a word."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            raise argparse.ArgumentError(self, f"may be given once, got {before!r} and {values!r}")
        setattr(namespace, self.dest, values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zclip-jax",
        description="What a clipping rule would have done to a recorded run, and what a run does.",
    )
    parser.add_argument(
        "--version", action="version", version=f"zclip_jax {importlib.metadata.version('zclip_jax')}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    log = argparse.ArgumentParser(add_help=False)
    log.add_argument(
        "log",
        metavar="LOG",
        help="a log with gradient norms before clipping: trainer_state.json, JSON lines, CSV, Parquet, TensorBoard "
        "events or a folder of them, a W&B export, or what a trainer printed",
    )
    log.add_argument("--column", "--tag", metavar="NAME", action=_Once, help="the norm's column, key or tag")
    log.add_argument(
        "--run", metavar="N", type=int, action=_Once, help="the N-th run alone, where the log holds several"
    )
    log.add_argument("--json", action="store_true", help="print JSON instead of tables")

    replay_command = commands.add_parser(
        "replay",
        parents=[log],
        help="run rules over the norms of a log",
        description="Runs rules over the norms of a log and reports what they would have clipped. Replay is open "
        "loop: it predicts thresholds and rates, not the loss.",
        epilog="LOG stands before --compare and --sweep. A RULE is a name, or NAME:SETTING=VALUE,... as in "
        f"zclip:z_thresh=3,max_grad_norm=none. Names: {', '.join(rule_names())}. Each also takes max_grad_norm.",
    )
    replay_command.add_argument(
        "--rule",
        metavar="RULE",
        action=_Once,
        help="the rule to report on; zclip, with the settings in the log if it has some",
    )
    replay_command.add_argument(
        "--compare",
        nargs="+",
        action="extend",
        default=[],
        metavar="RULE",
        help=f"rules to put beside it, {' and '.join(BESIDE)} too",
    )
    replay_command.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="SETTING=V,V,...",
        help="the rule on a grid of settings",
    )
    replay_command.add_argument(
        "--png",
        metavar="FILE",
        action=_Once,
        help="draw the norms, above what the rule fires, and the spikes",
    )
    replay_command.add_argument(
        "--html", metavar="FILE", action=_Once, help="draw them as a page to zoom in, which needs no network"
    )
    replay_command.set_defaults(command=_replay)

    recommend_command = commands.add_parser(
        "recommend",
        parents=[log],
        help="choose a rule and its settings for a log",
        description="Chooses the rule and settings that catch the outliers of a log with few false alarms, and "
        "reports on them beside the defaults.",
    )
    recommend_command.set_defaults(command=_recommend)
    add_commands(commands)
    return parser


def _replay(options: argparse.Namespace) -> None:
    # Rules and paths first: a mistake in one should not wait for a long log.
    asked = None if options.rule is None else parse_spec(options.rule)
    others = [parse_spec(text) for text in (*options.compare, *BESIDE)]
    grid = parse_grid(options.sweep, asked) if options.sweep and asked else {}
    for path in filter(None, (options.png, options.html)):
        _check_output(path, options.log)
    recording = _read(options)
    first = asked or _spec_of_log(recording)
    if options.sweep and not asked:
        grid = parse_grid(options.sweep, first)

    report, results = make_report(recording, [first, *others])
    if grid:
        report["sweep"] = describe_sweep(recording, first, grid)
    _print(report, options.json)
    if options.png:
        write_figure(options.png, recording, results)
    if options.html:
        write_page(options.html, recording, results, flags=report["flags"])


def _recommend(options: argparse.Namespace) -> None:
    recording = _read(options)
    found = recommend(*(run.norms for run in recording.runs))
    report, _ = make_report(recording, [parse_spec(rule) for rule in (found.best.rule, "zclip", "levelclip")])
    best, *curve = (
        one._asdict() | {"call": one.call, "rule": one.rule} for one in (found.best, *found.curve)
    )
    told = {"best": best, "curve": curve}
    report["recommend"] = to_json(found._asdict() | told)
    _print(report, options.json)


def _read(options: argparse.Namespace) -> Recording:
    """The log, or the one of its runs that is asked for."""
    recording = read(options.log, column=options.column)
    if options.run is None:
        return recording
    runs = recording.runs
    if not 1 <= options.run <= len(runs):
        raise ValueError(f"--run must be from 1 to {len(runs)}, the runs in {options.log}, got {options.run}")
    run = runs[options.run - 1]
    notes = dict.fromkeys((*recording.notes, *run.notes))
    return run._replace(name=f"{recording.name}, run {options.run} of {len(runs)}", notes=tuple(notes))


def _check_output(path: str, log: str) -> None:
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder, and no file to draw to")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise FileNotFoundError(f"there is no folder {os.path.dirname(path)} to draw {path} in")
    if os.path.exists(path) and os.path.exists(log) and os.path.samefile(path, log):
        raise ValueError(f"{path} is the log itself")


def _spec_of_log(recording: Recording) -> Spec:
    if not recording.settings:
        return parse_spec("zclip")
    try:
        return make_spec("zclip as logged", "zclip", recording.settings)
    except ValueError as error:
        raise ValueError(f"the settings in the log: {error}; choose a rule with --rule") from None


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        print_report(report)


if __name__ == "__main__":
    sys.exit(main())
