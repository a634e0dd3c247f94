"""Pages with the tables and plots of each experiment, made of the JSON lines and of nothing else."""

import collections
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from examples.experiments.config import Experiment, load
from examples.experiments.tables import Record, grid_of, markdown, spread


def read_results(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """Records by key; a line that was cut off is left out."""
    path = folder / f"{name}.jsonl"
    records = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[record["key"]] = record
    return records


def write(names: Sequence[str], budget: str, results: Path, out: Path) -> None:
    """Writes `NAME.md` and its plots into `out` for each experiment that has results."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        experiment, known = load(name, budget), read_results(results, name)
        # Cells that ask for the same run share its result.
        found = [
            known[run.key]
            | {"block": run.block, "cell": run.cell, "arm": run.arm, "seed": run.seed, **run.vary}
            for run in experiment.runs
            if run.key in known
        ]
        if not found:
            print(f"{name}: {results} has no results for the budget {budget}")
            continue
        plots = []
        for i, plot in enumerate(experiment.plots):
            if picture := draw(plot, found, out / f"{name}-{i + 1}.png"):
                plots.append((picture, plot["title"]))
        text = page(experiment, budget, found, plots)
        (out / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"{out / name}.md: {len(found)} of {len(experiment.runs)} runs")


def page(
    experiment: Experiment, budget: str, found: Sequence[Record], plots: Sequence[tuple[str, str]]
) -> str:
    text = experiment.text
    parts = [
        f"## {text['title']}",
        f"*Asked beforehand.* {text['question']}",
        f"*Compared.* {text['compares']} {text['number']}",
        *(
            markdown(spec, found)
            for spec in experiment.tables
            if spec["block"] in {r["block"] for r in found}
        ),
        *(f"![{title}]({file})\n\n{title}" for file, title in plots),
    ]
    failed = collections.Counter(
        f"{r['cell']}, `{r['arm']}`" + (f", lr {r['lr']:g}" if "lr" in r else "") + f": {r['failed']}"
        for r in found
        if r["failed"]
    )
    told = "; ".join(f"{where} ({count})" for where, count in failed.items())
    parts.append(
        f"Of {len(found)} runs {sum(failed.values())} failed: {told}."
        if failed
        else f"None of the {len(found)} runs failed."
    )
    seconds = sum(r["seconds"] for r in {r["key"]: r for r in found}.values())
    missing = len(experiment.runs) - len(found)
    parts.append(
        f"Made by `python -m examples.experiments run {experiment.name} --budget {budget}`; "
        f"{seconds / 60:.1f} minutes, jax {found[0]['jax']}, {found[0]['corpus']}."
        + (f" {missing} runs are missing." if missing else "")
    )
    return "\n\n".join(parts) + "\n"


def draw(plot: Mapping[str, Any], found: Sequence[Record], path: Path) -> str | None:
    """Draws a plot of the kind `curves`, `lines` or `dots`; returns the file's name, None if there is nothing."""
    kinds = {"curves": _curves, "lines": _lines, "dots": _dots}
    if plot["kind"] not in kinds:
        raise ValueError(f"plot {plot['title']!r}: kind={plot['kind']!r}: expected one of {', '.join(kinds)}")
    figure = kinds[plot["kind"]](plot, found)
    if figure is None:
        return None
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path.name


def _curves(plot: Mapping[str, Any], found: Sequence[Record]) -> Any:
    """Loss and norm, step by step, of seed 0 in each cell."""
    records = [r for r in found if r["block"] == plot["block"] and r.get("curves")]
    records = [r for r in records if r["arm"] == plot.get("arm", r["arm"])]
    if not records:
        return None
    columns = min(5, len(records))
    rows = -(-len(records) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 2.1 * rows), sharex=True, layout="constrained")
    for axis, record in zip(np.atleast_1d(axes).ravel(), records, strict=False):
        steps = np.linspace(0, record["steps"], len(record["curves"]["loss"]))
        curves = {name: np.asarray(record["curves"][name], float) for name in ("loss", "grad_norm")}
        axis.plot(steps, curves["loss"], lw=1, label="loss")
        axis.plot(steps, curves["grad_norm"], lw=0.8, alpha=0.7, label="gradient norm")
        axis.set_yscale("log")
        axis.set_title(record["cell"], fontsize=9)
        axis.tick_params(which="both", labelsize=6)
    for axis in np.atleast_1d(axes).ravel()[len(records) :]:
        axis.set_axis_off()
    np.atleast_1d(axes).ravel()[0].legend(fontsize=7, frameon=False)
    figure.supxlabel("step", fontsize=9)
    return figure


def _lines(plot: Mapping[str, Any], found: Sequence[Record]) -> Any:
    """A table's number over the setting in its columns, one line an arm, with the range over seeds."""
    grid = grid_of(plot["table"], found)
    if not grid:
        return None
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for row in dict.fromkeys(row for row, _ in grid):
        points = [
            (column, [x for x in grid[row, column].values() if math.isfinite(x)])
            for r, column in grid
            if r == row
        ]
        points = [(column, values) for column, values in points if values]
        if not points:
            continue
        x = [column for column, _ in points]
        (line,) = axis.plot(x, [np.mean(values) for _, values in points], marker="o", ms=3, lw=1.2, label=row)
        axis.fill_between(
            x, [min(v) for _, v in points], [max(v) for _, v in points], alpha=0.12, color=line.get_color()
        )
    axis.set_xscale("log")
    axis.set_xlabel(plot.get("x", plot["table"]["columns"]))
    axis.set_ylabel(plot.get("y", plot["table"]["number"]))
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _dots(plot: Mapping[str, Any], found: Sequence[Record]) -> Any:
    """A table's rows as rows: mean and two standard errors, a colour a column."""
    grid = grid_of(plot["table"], found)
    if not grid:
        return None
    rows, columns = (list(dict.fromkeys(key[i] for key in grid)) for i in (0, 1))
    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.36 * len(rows)), layout="constrained")
    limit = plot.get("limit", math.inf)
    for j, column in enumerate(columns):
        known = [(i, *spread(grid.get((row, column), {}))) for i, row in enumerate(rows)]
        known = [(i, mean, error) for i, mean, error, _ in known if not math.isnan(mean)]
        y = np.asarray([i for i, _, _ in known]) + 0.6 * ((j + 0.5) / len(columns) - 0.5)
        x = np.asarray([mean for _, mean, _ in known])
        errors = [0 if math.isnan(error) or mean > limit else 2 * error for _, mean, error in known]
        dots = axis.errorbar(np.minimum(x, limit), y, xerr=errors, fmt="o", ms=3.5, lw=1, label=str(column))
        axis.plot(np.full(int(np.sum(x > limit)), limit), y[x > limit], ">", ms=6, color=dots[0].get_color())
    axis.axvline(0, color="0.6", lw=0.8, zorder=0)
    axis.set_yticks(range(len(rows)), [str(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(plot.get("x", plot["title"]), fontsize=9)
    axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.spines[["top", "right"]].set_visible(False)
    return figure
