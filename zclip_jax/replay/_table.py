"""Reports on a terminal."""

import sys
from collections.abc import Sequence
from typing import Any

from zclip_jax._extras import require
from zclip_jax.replay._recommend import CRITERION, Candidate, Recommendation

WIDTH = 110  # where the output is no terminal


def print_report(report: dict[str, Any]) -> None:
    """Prints what `zclip-jax replay` found, of the mapping that `--json` prints."""
    log, rules = report["log"], report["rules"]
    show = _Printer()
    level = "" if log["median"] is None else f", median {log['median']:.4g}, largest {log['max']:.4g}"
    show.line(
        f"{log['format']}: {log['num_norms']:,} norms under {log['column']!r}, steps {log['first_step']} to "
        f"{log['last_step']}{level}"
    )
    show.items(log["notes"])
    show.table(
        ["", *(rule["rule"] for rule in rules)],
        [
            ["fired", *(_share(rule, "fired") for rule in rules)],
            ["bound", *(_share(rule, "bound") for rule in rules)],
            ["capped", *(_share(rule, "capped") for rule in rules)],
            ["not finite", *(f"{rule['num_nonfinite']:,}" for rule in rules)],
            ["outliers in warm-up", *(_warm_up(rule["warm_up"]) for rule in rules)],
            ["longest run", *(f"{rule['longest_run']:,}" for rule in rules)],
            ["locked in from step", *(_or_dash(rule["locked_in_from"]) for rule in rules)],
            [
                "above 2x local median, fired",
                *(f"{rule['num_caught']:,} of {rule['num_outliers']:,}" for rule in rules),
            ],
            [
                "fired below 1.3x",
                *(_part(rule["num_false_alarms"], rule["num_steps"]) for rule in rules),
            ],
        ],
    )
    scores = [(name, log[key]) for name, key in (("norm", "spike_score"), ("loss", "loss_spike_score"))]
    told = [f"{name} {score:.3%}" for name, score in scores if score is not None]
    if told:
        show.line(f"SpikeScore: {', '.join(told)}")
    if rules[0]["largest_spikes"]:
        show.line(f"\nLargest spikes, and what {rules[0]['rule']} makes of them")
        show.table(
            ["step", "norm", "local median", "ratio", "allowed", "fired"],
            [
                [
                    str(spike["step"]),
                    f"{spike['norm']:.4g}",
                    f"{spike['local_median']:.4g}",
                    f"{spike['ratio']:.1f}x" if spike["ratio"] < 1e5 else f"{spike['ratio']:.2g}x",
                    "-" if spike["allowed"] is None else f"{spike['allowed']:.4g}",
                    "yes" if spike["fired"] else "no",
                ]
                for spike in rules[0]["largest_spikes"]
            ],
        )
    if "sweep" in report:
        show.line(f"\nSweep of {rules[0]['rule']}")
        names = list(report["sweep"][0]["settings"])
        show.table(
            [*names, "fired", "above 2x, fired", "fired below 1.3x", "longest run", "locked in from"],
            [
                [
                    *(f"{row['settings'][name]:g}" for name in names),
                    _share(row, "fired"),
                    f"{row['num_caught']:,} of {row['num_outliers']:,}",
                    _part(row["num_false_alarms"], row["num_steps"]),
                    f"{row['longest_run']:,}",
                    _or_dash(row["locked_in_from"]),
                ]
                for row in report["sweep"]
            ],
        )
    if report["flags"]:
        show.line(f"\nWhat stands out, for {rules[0]['rule']}")
        show.items(report["flags"])


def print_recommendation(found: Recommendation) -> None:
    """Prints what `zclip-jax recommend` found."""
    show = _Printer()
    show.line(f"Best of {found.num_candidates} candidates: {found.best.rule}")
    show.items([f"criterion: {CRITERION}", found.check, *found.doubts])
    show.items(["the cap of both presets, max_grad_norm = 1, is no part of the choice"])
    show.line("\nThe trade-off along its threshold")
    show.table(
        ["", "above 2x local median, fired", "fired below 1.3x", "fired", "locks in"],
        [_candidate_row(candidate, found.num_outliers) for candidate in found.curve],
    )


def _candidate_row(candidate: Candidate, num_outliers: int) -> list[str]:
    return [
        candidate.rule.partition(":")[2].partition(",")[0],
        f"{candidate.num_caught:,} of {num_outliers:,}",
        f"{candidate.num_false_alarms:,}",
        f"{candidate.num_fired:,}",
        "yes" if candidate.locked_in else "no",
    ]


def _share(rule: dict[str, Any], name: str) -> str:
    return _part(rule[f"num_{name}"], rule["num_steps"])


def _part(number: int, steps: int) -> str:
    return f"{number:,} ({number / max(steps, 1):.2%})"


def _warm_up(health: dict[str, Any]) -> str:
    if not health["num_norms"]:
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
            require("rich.box", "replay", ""),
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
