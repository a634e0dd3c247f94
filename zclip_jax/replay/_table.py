"""Reports on a terminal."""

import sys
from collections.abc import Sequence
from typing import Any

from zclip_jax._extras import require
from zclip_jax.replay._recommend import CRITERION
from zclip_jax.replay.readers._notes import count

WIDTH = 120  # where the output is no terminal
MANY = 4  # rules that fit side by side; of more only these numbers are told, under shorter names
FEW = {
    "scaled down, by rule or cap": "scaled",
    "fired": "fired",
    "capped": "capped",
    "outliers that fired": "outliers",
    "fired below 1.3x": "below 1.3x",
    "locked in from step": "locked in",
}


def print_report(report: dict[str, Any]) -> None:
    """Prints what `zclip-jax` found, of the mapping that `--json` prints."""
    log, rules = report["log"], report["rules"]
    show = _Printer()
    level = "" if log["median"] is None else f", median {log['median']:.4g}, largest {log['max']:.4g}"
    show.line(
        f"{log['name']}, {log['format']}: {count(log['num_norms'], 'norm')} under {log['column']!r}, steps "
        f"{log['first_step']} to {log['last_step']}{level}"
    )
    show.items(log["notes"])
    if log["num_falling"]:
        are = count(log["num_falling"], "norm is", "norms are")
        show.items([f"{are} above 2x the local median because the level falls, and no outliers"])
    if "recommend" in report:
        _print_choice(show, report["recommend"])
    show.table(*_comparison(rules))
    scores = [(name, log[key]) for name, key in (("norm", "spike_score"), ("loss", "loss_spike_score"))]
    told = [f"{name} {score:.3%}" for name, score in scores if score is not None]
    if told:
        show.line(f"SpikeScore: {', '.join(told)}")
    if rules[0]["largest_spikes"]:
        show.line(f"\nLargest spikes, and what {rules[0]['rule']} makes of them")
        show.table(*_spikes(rules[0]["largest_spikes"]))
    if "sweep" in report:
        show.line(f"\nSweep of {rules[0]['rule']}")
        show.table(*_sweep(report["sweep"]))
    if report["flags"]:
        show.line(f"\nWhat stands out, for {rules[0]['rule']}")
        show.items(report["flags"])


Table = tuple[list[str], list[list[str]]]


def _comparison(rules: list[dict[str, Any]]) -> Table:
    """A column for each rule, or where they are many a row."""
    names = [
        "",
        "scaled down, by rule or cap",
        "to, median (least)",
        "fired",
        "capped",
        "outliers that fired",
        "fired below 1.3x",
        "longest run",
        "locked in from step",
        "outliers in warm-up",
        "not finite",
    ]
    columns = [
        [
            rule["rule"],
            _share(rule, "scaled"),
            _scale(rule),
            _share(rule, "fired"),
            _share(rule, "capped"),
            f"{rule['num_caught']:,} of {rule['num_outliers']:,}",
            _part(rule["num_false_alarms"], rule["num_steps"]),
            f"{rule['longest_run']:,}",
            _or_dash(rule["locked_in_from"]),
            _warm_up(rule["warm_up"]),
            f"{rule['num_nonfinite']:,}",
        ]
        for rule in rules
    ]
    if len(rules) > MANY:
        kept = [names.index(name) for name in ("", *FEW)]
        return ["", *FEW.values()], [[column[i] for i in kept] for column in columns]
    head, *rows = map(list, zip(names, *columns, strict=True))
    return head, rows


def _spikes(spikes: list[dict[str, Any]]) -> Table:
    return ["step", "norm", "local median", "ratio", "allowed", "fired"], [
        [
            str(spike["step"]),
            f"{spike['norm']:.4g}",
            f"{spike['local_median']:.4g}",
            f"{spike['ratio']:.1f}x" if spike["ratio"] < 1e5 else f"{spike['ratio']:.2g}x",
            "-" if spike["allowed"] is None else f"{spike['allowed']:.4g}",
            "yes" if spike["fired"] else "no",
        ]
        for spike in spikes
    ]


def _sweep(rows: list[dict[str, Any]]) -> Table:
    names = list(rows[0]["settings"])
    head = ["fired", "capped", "outliers that fired", "fired below 1.3x", "longest run", "locked in from"]
    return [*names, *head], [
        [
            *("inf" if row["settings"][name] is None else f"{row['settings'][name]:g}" for name in names),
            _share(row, "fired"),
            _share(row, "capped"),
            f"{row['num_caught']:,} of {row['num_outliers']:,}",
            _part(row["num_false_alarms"], row["num_steps"]),
            f"{row['longest_run']:,}",
            _or_dash(row["locked_in_from"]),
        ]
        for row in rows
    ]


def _print_choice(show: "_Printer", found: dict[str, Any]) -> None:
    best, curve = found["best"], found["curve"]
    settings = ", ".join(f"{name}={value:g}" for name, value in best["settings"].items())
    show.line(f"\nBest of {found['num_candidates']} candidates: {best['preset']}({settings})")
    show.items([f"criterion: {CRITERION}", found["check"], *found["doubts"]])
    threshold = next(iter(best["settings"]))
    show.line(f"\nThe trade-off along {threshold}")
    show.table(
        [threshold, "outliers that fired", "fired below 1.3x", "fired", "locks in"],
        [
            [
                f"{one['settings'][threshold]:g}",
                f"{one['num_caught']:,} of {found['num_outliers']:,}",
                f"{one['num_false_alarms']:,}",
                f"{one['num_fired']:,}",
                "yes" if one["locked_in"] else "no",
            ]
            for one in curve
        ],
    )
    show.line("Beside the defaults")


def _share(rule: dict[str, Any], name: str) -> str:
    return _part(rule[f"num_{name}"], rule["num_steps"])


def _part(number: int, steps: int) -> str:
    return f"{number:,} ({number / max(steps, 1):.2%})"


def _scale(rule: dict[str, Any]) -> str:
    if rule["median_scale"] is None:
        return "-"
    return f"{rule['median_scale']:.2f} ({rule['least_scale']:.2g})"


def _warm_up(health: dict[str, Any]) -> str:
    if health["num_norms"] is None:
        return "no warm-up"
    until = "" if health["loose_until"] is None else f", felt until step {health['loose_until']}"
    return f"{len(health['outlier_steps'])} of {health['num_norms']}{until}"


def _or_dash(step: int | None) -> str:
    return "-" if step is None else str(step)


def _reraise() -> None:
    raise


class _Printer:
    """Text as it is: names in a log may look like markup."""

    def __init__(self) -> None:
        console = require("rich.console", "replay", "the report")
        self._table, self._box = (
            require("rich.table", "replay", "the report"),
            require("rich.box", "replay", "the report"),
        )
        self._console = console.Console(
            width=None if sys.stdout.isatty() else WIDTH, highlight=False, emoji=False
        )
        self._console.on_broken_pipe = _reraise  # rich would exit with 1

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)

    def items(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.line(f"- {line}")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        text = require("rich.text", "replay", "the report").Text
        table = self._table.Table(box=self._box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(head):
            table.add_column(text(name), justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(text, row))
        self._console.print(table)
