r"""Experiments on what clipping is worth: runs them, and makes tables and plots of the results.

    python -m examples.experiments run all --budget small   # under half an hour on two CPU cores
    python -m examples.experiments run stress --budget full
    python -m examples.experiments report                   # docs/evidence, from the results
    python -m examples.experiments run stress --lanes 1 --results runs/130m --set preset=llama-130m \
        hidden_size=none num_layers=none ffn_size=none num_heads=none num_kv_heads=none context=none \
        dtype=none batch=256 vocab_size=32000 'data=text/*.jsonl' lr=1e-3 steps=20000 warmup=1000

A run whose result is in the results is not run again.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # pyrefly: ignore[untyped-import]

from examples.experiments.config import BUDGETS, Run, load, names

RESULTS = Path(__file__).parent / "results"
DOCS = Path("docs/evidence")


def run(
    names: Sequence[str], budget: str, results: Path, cache: Path, lanes: int, overrides: dict[str, Any]
) -> int:
    """Runs what is missing; returns how many runs that were. Raises ValueError for what it cannot run."""
    from examples.experiments.report import read_results
    from examples.experiments.work import corpus_for, work  # JAX starts here, after the arguments are read

    experiments = [load(name, budget, overrides) for name in names]  # complain of all before any is run
    total = 0
    for experiment in experiments:
        known = read_results(results, experiment.name)
        todo: dict[str, Run] = {r.key: r for r in experiment.runs if r.key not in known}
        print(
            f"{experiment.name}: {len(todo)} of {len({r.key for r in experiment.runs})} runs to do",
            flush=True,
        )
        for record in known.values():
            if (
                todo
                and (mine := corpus_for(next(iter(todo.values())).settings, cache).name) != record["corpus"]
            ):
                raise ValueError(
                    f"{results / experiment.name}.jsonl was made on {record['corpus']!r}, not {mine!r}: "
                    "give another --results"
                )
        start = time.perf_counter()
        results.mkdir(parents=True, exist_ok=True)
        path = results / f"{experiment.name}.jsonl"
        if path.exists() and not path.read_bytes().endswith(b"\n"):  # stopped while it wrote
            path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]))
        with path.open("a") as file:
            for batch in work(list(todo.values()), cache, lanes):
                for done, record in batch:
                    where = {"block": done.block, "cell": done.cell, "arm": done.arm, "seed": done.seed}
                    line = (
                        {"key": done.key} | where | dict(done.vary) | {"steps": done.settings.steps} | record
                    )
                    file.write(json.dumps(line) + "\n")
                file.flush()
                total += len(batch)
                last, record = batch[-1]
                failed = sum(r["failed"] is not None for _, r in batch)
                print(
                    f"  {time.perf_counter() - start:6.0f} s  {len(batch):3} runs, to {last.cell} / {last.arm}: "
                    f"loss {record['loss']}" + (f", {failed} failed" if failed else ""),
                    flush=True,
                )
    return total


def _value(text: str) -> Any:
    """What YAML makes of it, but for `none` and for numbers such as 1e-3."""
    if text == "none":
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return yaml.safe_load(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run what the results lack")
    runner.add_argument("names", nargs="+", metavar="NAME", help=f"all, or some of {', '.join(names())}")
    runner.add_argument("--lanes", type=int, default=16, help="most runs side by side")
    runner.add_argument("--cache", type=Path, default=Path("runs/experiments"), help="folder of tokenizers")
    runner.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of every run")
    report = commands.add_parser("report", help="make tables and plots of the results")
    report.add_argument("names", nargs="*", metavar="NAME", help="all unless given")
    report.add_argument("--out", type=Path, default=DOCS, help="folder of tables and plots")
    for command in (runner, report):
        command.add_argument("--budget", choices=BUDGETS, default="small")
        command.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON lines")
    options = parser.parse_args(argv)
    wanted = names() if options.names in ([], ["all"]) else options.names
    try:
        if options.command == "run":
            pairs = [text.partition("=") for text in options.set]
            overrides = {key: _value(value) for key, _, value in pairs}
            if options.lanes < 1:
                raise ValueError(f"--lanes {options.lanes}: expected at least 1")
            run(wanted, options.budget, options.results, options.cache, options.lanes, overrides)
        else:
            from examples.experiments.report import write

            write(wanted, options.budget, options.results, options.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
