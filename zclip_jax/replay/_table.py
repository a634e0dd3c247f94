"""Reports on a terminal."""

from typing import Any

from zclip_jax.replay._recommend import CRITERION
from zclip_jax.replay._terminal import Printer
from zclip_jax.replay.readers._notes import count

MOST = 40  # runs, or sentences in a list, that are shown
MANY = 4  # rules that fit side by side; of more only these numbers are told, under shorter names
FEW = {
    "scaled down, by rule or cap": "scaled",
    "fired": "fired",
    "capped": "capped",
    "outliers that fired": "outliers",
    "fired below 1.3x": "below 1.3x",
    "locked in from step": "locked in",
    "runs that lock in": "locked in",
}


def print_report(report: dict[str, Any]) -> None:
    """Prints what `zclip-jax` found, of the mapping that `--json` prints."""
    log, rules, runs = report["log"], report["rules"], report["runs"]
    first, show = rules[0]["rule"], Printer()
    steps = (
        f", steps {log['first_step']} to {log['last_step']}" if len(runs) == 1 else f" in {len(runs):,} runs"
    )
    level = "" if log["median"] is None else f", median {log['median']:.4g}"
    level += "" if log["max"] is None else f", largest {log['max']:.4g}"
    norms = f"{count(log['num_norms'], 'norm')} under {log['column']!r}"
    show.line(f"{log['name']}, {log['format']}: {norms}{steps}{level}")
    _items(show, log["notes"])
    if log["num_falling"]:
        are = count(log["num_falling"], "norm is", "norms are")
        show.items([f"{are} above 2x the local median because the level falls, and no outliers"])
    if "recommend" in report:
        _print_choice(show, report["recommend"])
    show.table(*_comparison(rules))
    scores = [(name, log[key]) for name, key in (("norm", "spike_score"), ("loss", "loss_spike_score"))]
    told = [f"{name} {score:.3%}" for name, score in scores if score is not None]
    if told:
        show.line(f"SpikeScore (OLMo 2: 7 sigma, 1,000 values): {', '.join(told)}")
    if (total := log["olmo_core_spike_score"]) is not None:
        last = log["olmo_core_spike_score_last"]
        rolling = "" if last is None else f", of the last 10,000 {last:.3%}"
        show.line(f"SpikeScore (OLMo-core: 6 sigma, 128 values): {total:.3%} of the steps{rolling}")
    if len(runs) > 1:
        show.line(f"\nThe runs, in each of which {first} starts afresh")
        show.table(*_runs(runs[:MOST]))
        if len(runs) > MOST:
            show.line(f"and {len(runs) - MOST:,} more: --json tells of all, --run N of one")
    if rules[0]["largest_spikes"]:
        show.line(f"\nLargest spikes, and what {first} makes of them")
        show.table(*_spikes(rules[0]["largest_spikes"]))
    if "sweep" in report:
        show.line(f"\nSweep of {first}")
        show.table(*_sweep(report["sweep"]))
    if report["flags"]:
        show.line(f"\nWhat stands out, for {first}")
        _items(show, report["flags"])


def _items(show: Printer, lines: list[str]) -> None:
    show.items(lines[:MOST])
    if len(lines) > MOST:
        show.items([f"and {len(lines) - MOST:,} more: --json tells all"])


Table = tuple[list[str], list[list[str]]]


def _comparison(rules: list[dict[str, Any]]) -> Table:
    """A column for each rule, or where they are many a row."""
    columns = [_figures(rule) for rule in rules]
    if len(rules) > MANY:
        kept = [name for name in columns[0] if name in FEW]
        rows = [
            [rule["rule"], *(its[name] for name in kept)] for rule, its in zip(rules, columns, strict=True)
        ]
        return ["", *(FEW[name] for name in kept)], rows
    return ["", *(rule["rule"] for rule in rules)], [
        [name, *(its[name] for its in columns)] for name in columns[0]
    ]


def _figures(rule: dict[str, Any]) -> dict[str, str]:
    """What is told of a rule, of one run or of several, by the names of the rows."""
    told = {
        "scaled down, by rule or cap": _share(rule, "scaled"),
        "to, median (least)": _scale(rule),
        "fired": _share(rule, "fired"),
        "capped": _share(rule, "capped"),
        "outliers that fired": _caught(rule),
        "fired below 1.3x": _part(rule["num_false_alarms"], rule["num_steps"]),
        "longest run": f"{rule['longest_run']:,}",
    }
    if "num_locked_in" in rule:
        told["runs that lock in"] = f"{rule['num_locked_in']:,}"
    else:
        told["locked in from step"] = _or_dash(rule["locked_in_from"])
        told["outliers in warm-up"] = _warm_up(rule["warm_up"])
    return told | {"not finite": f"{rule['num_nonfinite']:,}"}


def _runs(runs: list[dict[str, Any]]) -> Table:
    head = [
        "run",
        "norms",
        "steps",
        "median",
        "largest",
        "fired",
        "capped",
        "outliers",
        "below 1.3x",
        "locked in",
    ]
    rows = []
    for number, run in enumerate(runs, 1):
        log, rule = run["log"], run["rules"][0]
        level = ["-" if log[name] is None else f"{log[name]:.4g}" for name in ("median", "max")]
        steps = f"{log['first_step']} to {log['last_step']}"
        counted = [
            _share(rule, "fired"),
            _share(rule, "capped"),
            _caught(rule),
            f"{rule['num_false_alarms']:,}",
        ]
        locked = _or_dash(rule["locked_in_from"])
        rows.append([str(number), f"{log['num_norms']:,}", steps, *level, *counted, locked])
    return head, rows


def _spikes(spikes: list[dict[str, Any]]) -> Table:
    run = ["run"] if "run" in spikes[0] else []
    return [*run, "step", "norm", "local median", "ratio", "allowed", "fired"], [
        [
            *(str(spike[name]) for name in (*run, "step")),
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
    several = "num_locked_in" in rows[0]
    head = ["fired", "capped", "outliers that fired", "fired below 1.3x", "longest run"]
    return [*names, *head, "runs that lock in" if several else "locked in from"], [
        [
            *("inf" if row["settings"][name] is None else f"{row['settings'][name]:g}" for name in names),
            _share(row, "fired"),
            _share(row, "capped"),
            _caught(row),
            _part(row["num_false_alarms"], row["num_steps"]),
            f"{row['longest_run']:,}",
            f"{row['num_locked_in']:,}" if several else _or_dash(row["locked_in_from"]),
        ]
        for row in rows
    ]


def _print_choice(show: Printer, found: dict[str, Any]) -> None:
    best, curve = found["best"], found["curve"]
    show.line(f"\nBest of {found['num_candidates']} candidates: {best['call']}")
    show.items([f"the same on the command line: --rule {best['rule']}; without a cap, which played no part"])
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


def _caught(rule: dict[str, Any]) -> str:
    return f"{rule['num_caught']:,} of {rule['num_outliers']:,}"


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
