"""How the cost of clipping grows with parameters and with leaves, and what each rule costs: `docs/overhead.md`.

    nice -n 10 python -m tests.benchmarks.growth            # prints the tables
    nice -n 10 python -m tests.benchmarks.growth --write    # and puts them into the docs

The update of adamw behind each way of clipping, as in `tests.benchmarks.overhead`. Every number is the median over
rounds of this chain's time divided by that of adamw alone in the same round, with the quartiles.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import optax

from tests.benchmarks.overhead import CHAINS, RULES, compile_update, make_params, ratio_quartiles, time_rounds
from zclip_jax import clip_by_rule, zclip

TARGET = Path(__file__).parents[2] / "docs" / "overhead_table.md"
NONE, SIZE, SIZES, LEAVES = "adamw alone", 1_000_000, (1_000_000, 10_000_000, 50_000_000), (10, 100, 1000)
Make = Callable[[], optax.GradientTransformation]


def behind(clip: Make) -> Make:
    return lambda: optax.chain(clip(), optax.adamw(3e-4))


BY_LEAF: dict[str, Make] = {"zclip, granularity='leaf'": behind(lambda: zclip(granularity="leaf"))}
EVERY_RULE: dict[str, Make] = {
    NONE: CHAINS[NONE],
    **{name: behind(lambda rule=rule: clip_by_rule(rule)) for name, rule in RULES.items()},
}


def measure(chains: Mapping[str, Make], params, rounds: int) -> tuple[dict[str, str], dict[str, float]]:
    """A cell of the table for each chain, and the seconds its compilation takes."""
    runs, compilation = {}, {}
    for name, make in chains.items():
        start = time.process_time()
        runs[name] = compile_update(make(), params)
        compilation[name] = time.process_time() - start
    total = sum(x.size for x in jax.tree.leaves(params))
    updates = max(4, 20_000_000 // total)  # so that a small update is not timed by itself
    times = time_rounds(runs, params, rounds, updates)
    cells = {NONE: f"{1e3 * statistics.median(times[NONE]) / updates:.1f} ms"}
    for name in chains:
        if name != NONE:
            low, median, high = ratio_quartiles(times[name], times[NONE])
            cells[name] = f"{median:.2f} ({low:.2f}-{high:.2f})"
    return cells, compilation


def table(first: str, columns: dict[str, dict[str, str]]) -> list[str]:
    """Rows of Markdown, from a mapping of column to row to cell."""
    names = list(next(iter(columns.values())))
    rows = [f"| {name} | " + " | ".join(cells[name] for cells in columns.values()) + " |" for name in names]
    return [f"| {first} | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns), *rows, ""]


def tables(rounds: int) -> str:
    lines = ["Growth with parameters, in 96 leaves:", ""]
    lines += table("", {f"{n:,}": measure(CHAINS, make_params(n), rounds)[0] for n in SIZES})
    by_leaves, compilation = {}, {}
    for n in LEAVES:
        cells, seconds = measure(CHAINS | BY_LEAF, make_params(SIZE, n // 2), rounds)
        by_leaves[f"{n} leaves"] = cells
        compilation[f"{n} leaves"] = {name: f"{x:.1f}" for name, x in seconds.items()}
    lines += [f"Growth with leaves, {SIZE:,} parameters:", "", *table("", by_leaves)]
    lines += ["CPU seconds of compilation:", "", *table("", compilation)]
    cells, _ = measure(EVERY_RULE, make_params(SIZE), rounds)
    lines += [f"Every rule, {SIZE:,} parameters in 96 leaves:", "", *table("Rule", {"time": cells})]
    machine = f"{jax.devices()[0].device_kind} with {os.cpu_count()} cores"
    note = f"jax {jax.__version__}, optax {optax.__version__}, {machine}; medians and quartiles of {rounds} rounds."
    return "\n".join([*lines, note, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of all chains")
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name} into the docs")
    args = parser.parse_args()
    text = tables(args.rounds)
    print(text)
    if args.write:
        TARGET.write_text(text)


if __name__ == "__main__":
    main()
