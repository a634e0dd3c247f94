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
from pathlib import Path

import numpy as np

from tests.benchmarks import detector_tables as tables
from tests.benchmarks.detector_tables import RULES, SHIFT_SEEDS, YOUNG_STEPS, each_rule, fired, see, table
from zclip_jax.replay import read
from zclip_jax.replay._outliers import OUTLIER

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


def recorded_table(logs: list[str], held_out: tuple[str, ...] = ()) -> list[str]:
    """For recorded runs, outliers caught, those of the own tail, false alarms, steps that fire, of the first 50."""
    rows = []
    for log in logs:
        path, colon, column = log.partition(":")
        norms = read(path, column=column or None).norms
        seen = see(norms[np.isfinite(norms)])
        ratio, outlier = seen.hindsight.ratio, seen.hindsight.outlier

        def cell(rule, seen=seen):
            steps = fired(rule, seen.norms[None])[0]
            caught = [(steps & which).sum() for which in (seen.hindsight.outlier, seen.own_tail)]
            alarms = seen.hindsight.score(steps)["num_false_alarms"] / steps.size
            return f"{caught[0]}, {caught[1]}, {alarms:.2%}, {steps.mean():.2%}, {steps[:YOUNG_STEPS].sum()}"

        name = Path(path).name + colon + column
        numbers = [seen.norms.size, np.sum(ratio > OUTLIER), outlier.sum(), seen.own_tail.sum()]
        rows.append(
            [
                f"{'*held out:* ' if name in held_out else ''}`{name}`",
                *(f"{number:,}" for number in numbers),
                *each_rule(cell),
            ]
        )
    return table(["Log", "norms", "above 2x", "outliers", "own tail", *RULES], rows)


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
        "Synthetic traces: outliers caught, false alarms (worst seed), steps that fire:": tables.spikes_table,
        "Heavy tails: steps that fire after the first 100, outliers of the own tail caught:": tables.heavy_table,
        "Spikes planted on them, 1.5, 3, 5 and 10 times the norm that 1 % exceed: caught:": tables.planted_table,
        "Steps that fire in the first to fourth hundred after the tail changes:": tables.changed_tail_table,
        "Of the first 50 steps, those that fire, mean (most) over the seeds:": tables.beginnings_table,
        "Steps after a shift until less than a tenth of the next 50 fire, median (largest) of "
        f"{len(SHIFT_SEEDS)} seeds:": tables.shift_table,
        "A spike of 2.5 times the new level, 30, 50 and 100 steps after a shift: caught:": tables.probe_table,
    }
    if folder:
        logs = [str(folder / log) for log in CHOSEN_ON + HELD_OUT]
        title = (
            "Recorded runs: outliers caught, those of the own tail, false alarms, steps that fire, first 50:"
        )
        parts = {title: lambda: recorded_table(logs, HELD_OUT), **parts}
    text = "\n".join("\n".join([title, "", *make(), ""]) for title, make in parts.items())
    print(text)
    if options.write:
        TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
