"""How `rules.level` tells spikes from noise, beside `zscore`: the tables of `docs/level.md`.

    python -m tests.benchmarks.detector                  # synthetic traces
    python -m tests.benchmarks.detector FOLDER           # and the recorded runs in this folder
    python -m tests.benchmarks.detector FOLDER --write   # and puts the tables into the docs
    python -m tests.benchmarks.detector LOG[:COLUMN] …   # any recorded runs, a row each

An outlier is a norm above 2 times its local median, centred, of up to 101 norms, that stands out against the norms
before it, too: above 1.3 times the median of the last 5 or of the last 50. It stands out from the run's own tail if,
besides, the logarithm of its ratio to the local median is above 3 robust standard deviations: 3 x 1.4826 times the
median, over the whole run, of that logarithm's absolute value. A false alarm is a step that fires below 1.3 times the
local median. Synthetic traces have 3,000 norms and 10 seeds, none of them used to choose the rule.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.benchmarks.choosing import until_calm
from tests.benchmarks.detector_traces import (
    CHANGE_AT,
    SHIFT_AT,
    beginnings,
    changed_tails,
    heavy_tails,
    planted,
    shifted,
    with_spikes,
)
from zclip_jax import Rule, rules
from zclip_jax.replay import read, replay
from zclip_jax.replay._outliers import OUTLIER, Hindsight, look_back

RULES: dict[str, Rule] = {
    "`zscore()`": rules.zscore(),
    "`zscore(min_rel_std=0.12)`": rules.zscore(min_rel_std=0.12),
    "`level(num_std=0)`": rules.level(num_std=0.0),
    "`level()`": rules.level(),
}
SEEDS, SHIFT_SEEDS = range(200, 210), range(300, 330)
OWN_TAIL, YOUNG_STEPS = 3.0, 50
# Recorded runs: what the rule was chosen on, and what it was then run on once.
CHOSEN_ON = (
    "log_llmc_main_compact.log",
    "hf_star_sft.json",
    "hf_grpo_verified.json",
    "csv_tomslm_blanks.csv",
    "csv_sycophancy_two_norms.csv:defend_grad_norm",
)
HELD_OUT = (
    "log_buildnanogpt_nowarmup.out",
    "hf_bisenx_small_spiky.json",
    "jsonl_kuixing_step_resets.jsonl",
    "jsonl_openpi_jax.jsonl",
    "log_llmc_stdout_750.log",
    "csv_sycophancy_two_norms.csv:attack_grad_norm",
)
TARGET = Path(__file__).parents[2] / "docs" / "level_tables.md"


class Seen(NamedTuple):
    """Norms `[steps]` with what hindsight says of them."""

    norms: np.ndarray
    hindsight: Hindsight
    own_tail: np.ndarray


def see(norms: np.ndarray) -> Seen:
    """Looks back on norms."""
    hindsight = look_back(norms)
    deviation = np.log(np.maximum(hindsight.ratio, np.finfo(float).tiny))
    std = 1.4826 * np.median(np.abs(deviation))
    return Seen(norms, hindsight, hindsight.outlier & (deviation > OWN_TAIL * std))


def fired(rule: Rule, traces: np.ndarray) -> np.ndarray:
    """Which steps of which trace fire, `[traces, steps]`."""
    return np.asarray(
        jax.jit(jax.vmap(lambda norms: replay(rule, norms).outcomes.fired))(jnp.asarray(traces))
    )


def by_trace(make: Callable[[int], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The traces that `make` gives for each seed, `[seeds, steps]` each."""
    by_seed = [make(seed) for seed in SEEDS]
    return {name: np.stack([traces[name] for traces in by_seed]) for name in by_seed[0]}


def share(steps: np.ndarray, among: np.ndarray) -> str:
    """The share of `among` that is in `steps`."""
    return f"{(steps & among).sum() / among.sum():.0%}" if among.any() else "none"


def spikes_table() -> list[str]:
    """For each trace, and each rule, the share of outliers caught, false alarms and steps that fire."""
    rows = []
    for name, traces in by_trace(with_spikes).items():
        views = [look_back(norms) for norms in traces]
        outlier = np.stack([view.outlier for view in views])
        row = []
        for rule in RULES.values():
            steps = fired(rule, traces)
            alarms = [
                view.score(its)["num_false_alarms"] / its.size for view, its in zip(views, steps, strict=True)
            ]
            row.append(
                f"{(steps & outlier).sum() / outlier.sum():.1%}, {np.mean(alarms):.2%} ({np.max(alarms):.2%}), "
                f"{steps.mean():.1%}"
            )
        rows.append([name, f"{outlier.sum():,}", *row])
    return table(["Trace", "outliers", *RULES], rows)


def heavy_table() -> list[str]:
    """Steps that fire after the first 100, and outliers of the own tail caught."""
    rows = []
    for name, traces in by_trace(heavy_tails).items():
        seen = [see(norms) for norms in traces]
        tail = np.stack([its.own_tail for its in seen])
        row = []
        for rule in RULES.values():
            steps = fired(rule, traces)
            row.append(f"{steps[:, 100:].mean():.1%}, {share(steps, tail)}")
        rows.append([name, f"{tail.sum():,}", *row])
    return table(["Trace", "outliers of the own tail", *RULES], rows)


def planted_table(factors: tuple[float, ...] = (1.5, 3, 5, 10)) -> list[str]:
    """Spikes planted on heavy tails that are caught, by how large they are."""
    rows = []
    for name, traces in by_trace(heavy_tails).items():
        row = {rule: [] for rule in RULES}
        for factor in factors:
            made = [planted(seed, norms, factor) for seed, norms in zip(SEEDS, traces, strict=True)]
            for rule_name, rule in RULES.items():
                steps = fired(rule, np.stack([norms for norms, _ in made]))
                caught = [its[at].mean() for its, (_, at) in zip(steps, made, strict=True)]
                row[rule_name].append(f"{np.mean(caught):.0%}")
        rows.append([name, *(", ".join(cells) for cells in row.values())])
    return table(["Trace", *RULES], rows)


def beginnings_table() -> list[str]:
    """How many of the first 50 steps fire: mean (most) over the seeds."""
    rows = []
    for name, traces in by_trace(beginnings).items():
        counts = [fired(rule, traces)[:, :YOUNG_STEPS].sum(1) for rule in RULES.values()]
        rows.append([name, *(f"{count.mean():.1f} ({count.max()})" for count in counts)])
    return table(["Trace", *RULES], rows)


def changed_tail_table() -> list[str]:
    """Fired steps in the hundreds of steps after the tail changes."""
    rows = []
    for name, traces in by_trace(changed_tails).items():
        row = []
        for rule in RULES.values():
            after = fired(rule, traces)[:, CHANGE_AT : CHANGE_AT + 400].reshape(len(SEEDS), 4, 100)
            row.append(", ".join(f"{rate:.1%}" for rate in after.mean((0, 2))))
        rows.append([name, *row])
    return table(["Trace", *RULES], rows)


def shift_table() -> list[str]:
    """Steps from a shift until less than a tenth of the next 50 fire: median (largest) over the seeds."""
    sizes, noises = (1.5, 2, 5, 100, 0.1), (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
    rows = []
    for name, rule in RULES.items():
        for size in sizes:
            row = [name, f"x{size:g}"]
            for scale in noises:
                after = fired(rule, np.stack([shifted(seed, size, scale) for seed in SHIFT_SEEDS]))
                out = [until_calm(steps) for steps in after[:, SHIFT_AT:]]
                row.append(f"{np.median(out):.0f} ({max(out):.0f})")
            rows.append(row)
    return table(["Rule", "shift", *(f"noise {scale:.0%}" for scale in noises)], rows)


def probe_table(probes: tuple[int, ...] = (30, 50, 100)) -> list[str]:
    """After a shift, the share of seeds on which a spike of 2.5 times the new level is caught."""
    rows = []
    for size in (1.5, 2, 5, 100, 0.1):
        for scale in (0.1, 0.2):
            row = [f"x{size:g}, noise {scale:.0%}"]
            for rule in RULES.values():
                traces = [[shifted(seed, size, scale, probe) for seed in SHIFT_SEEDS] for probe in probes]
                steps = [
                    fired(rule, np.stack(its))[:, SHIFT_AT + probe]
                    for its, probe in zip(traces, probes, strict=True)
                ]
                row.append(", ".join(f"{caught.mean():.0%}" for caught in steps))
            rows.append(row)
    return table(["Shift", *RULES], rows)


def recorded_table(logs: list[str], held_out: tuple[str, ...] = ()) -> list[str]:
    """For recorded runs, outliers caught, those of the own tail, false alarms, steps that fire, of the first 50."""
    rows = []
    for log in logs:
        path, colon, column = log.partition(":")
        norms = read(path, column=column or None).norms
        seen = see(norms[np.isfinite(norms)])
        ratio, outlier = seen.hindsight.ratio, seen.hindsight.outlier
        row = []
        for rule in RULES.values():
            steps = fired(rule, seen.norms[None])[0]
            alarms = seen.hindsight.score(steps)["num_false_alarms"] / steps.size
            row.append(
                f"{(steps & outlier).sum()}, {(steps & seen.own_tail).sum()}, {alarms:.2%}, {steps.mean():.2%}, "
                f"{steps[:YOUNG_STEPS].sum()}"
            )
        name = Path(path).name + colon + column
        numbers = [seen.norms.size, np.sum(ratio > OUTLIER), outlier.sum(), seen.own_tail.sum()]
        rows.append(
            [
                f"{'*held out:* ' if name in held_out else ''}`{name}`",
                *(f"{number:,}" for number in numbers),
                *row,
            ]
        )
    return table(["Log", "norms", "above 2x", "outliers", "own tail", *RULES], rows)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] + ["--:"] * (len(head) - 1), *rows)]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("logs", nargs="*", metavar="FOLDER | LOG[:COLUMN]", help="recorded runs")
    parser.add_argument("--write", action="store_true", help=f"write docs/{TARGET.name}")
    options = parser.parse_args()
    folder = Path(options.logs[0]) if len(options.logs) == 1 and Path(options.logs[0]).is_dir() else None
    if options.logs and not folder:
        print("\n".join(recorded_table(options.logs)))
        return
    parts = {
        "Spikes on synthetic traces: outliers caught, false alarms (worst seed), steps that fire:": spikes_table,
        "Heavy tails: steps that fire after the first 100, outliers of the own tail caught:": heavy_table,
        "Spikes planted on them, 1.5, 3, 5 and 10 times the norm that 1 % exceed: caught:": planted_table,
        "Steps that fire in the first to fourth hundred after the tail changes:": changed_tail_table,
        "Of the first 50 steps, those that fire, mean (most) over the seeds:": beginnings_table,
        "Steps after a shift until less than a tenth of the next 50 fire, median (largest) of "
        f"{len(SHIFT_SEEDS)} seeds:": shift_table,
        "A spike of 2.5 times the new level, 30, 50 and 100 steps after a shift: caught:": probe_table,
    }
    if folder:
        logs = [str(folder / log) for log in CHOSEN_ON + HELD_OUT]
        title = (
            "Recorded runs: outliers caught, those of the own tail, false alarms, fires, those in 50 steps:"
        )
        parts = {title: lambda: recorded_table(logs, HELD_OUT), **parts}
    text = "\n".join("\n".join([title, "", *make(), ""]) for title, make in parts.items())
    print(text)
    if options.write:
        TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
