"""Tables: a number of each run, against a reference, over seeds.

A table of an experiment's file has `title`, `block`, `number` and `lacks`, what it does not show. If needed also
`rows` and `columns` (`arm`, `cell` or a setting that the block varies), `only` (a selection), `against` (what is
other in the reference, such as `{arm: none}`, or `best fixed`), `over` (a setting of which each arm gets its best),
`summary`, `unit`, `digits`; and `several`, a list of such with a `name`, each of which is a column.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]
Grid = dict[tuple[Any, Any], dict[int, float]]  # by row and column, then by seed
SPEC = {
    "title",
    "block",
    "lacks",
    "number",
    "rows",
    "columns",
    "against",
    "over",
    "only",
    "summary",
    "unit",
    "digits",
    "several",
    "name",
}
MINUS = "\N{MINUS SIGN}"


def grid_of(spec: Mapping[str, Any], found: Sequence[Record]) -> Grid:
    """The table's numbers. Those of failed runs are infinite, those of runs without a result are absent."""
    row, column = spec.get("rows", "arm"), spec.get("columns", "cell")
    against, over = spec.get("against"), ("arm", spec["over"]) if "over" in spec else ("arm",)
    pool = [r for r in found if r["block"] == spec["block"]]
    chosen = {key: x if isinstance(x, list) else [x] for key, x in spec.get("only", {}).items()}
    groups: dict[tuple[Any, Any], list[Record]] = collections.defaultdict(list)
    for record in pool:
        if all(record[key] in accepted for key, accepted in chosen.items()):
            groups[record[row], record[column]].append(record)
    grid: Grid = {}
    for place, same in groups.items():
        grid[place] = _best(same, spec["number"], over)
        if against:
            # The same place but for what `against` changes, out of all arms and cells.
            like = {key: x[0] for key, x in chosen.items()} | {key: same[0][key] for key in ("arm", "cell")}
            like |= dict(zip((row, column), place, strict=True))
            like = (
                like | against if isinstance(against, dict) else {k: x for k, x in like.items() if k != "arm"}
            )
            there = [r for r in pool if all(r[key] == x for key, x in like.items())]
            if not isinstance(against, dict):
                there = [r for r in there if r["arm"] == "none" or r["arm"].startswith("fixed:")]
            reference = _best(there, spec["number"], over)
            less: Any = _reach if spec["number"] == "reach" else _minus
            grid[place] = {s: less(x, reference[s]) for s, x in grid[place].items() if s in reference}
    return grid


def _best(records: Sequence[Record], number: str, choice: Sequence[str]) -> dict[int, Any]:
    """By seed, the number of the choice that has the lowest mean loss over the *other* seeds.

    So nothing is tuned on what is reported. With one seed there is no other, and with one choice nothing to choose.
    """
    options: dict[Any, dict[int, Record]] = collections.defaultdict(dict)
    for record in records:
        options[tuple(record[key] for key in choice)][record["seed"]] = record
    seeds = sorted({seed for runs in options.values() for seed in runs})
    best = {}
    for seed in seeds:
        known = [runs for runs in options.values() if seed in runs]
        means = [_mean_loss(runs, without=seed if len(seeds) > 1 else None) for runs in known]
        best[seed] = number_of(known[int(np.argmin(means))][seed], number)
    return best


def _mean_loss(runs: Mapping[int, Record], without: int | None) -> float:
    losses = [_loss(record) for seed, record in runs.items() if seed != without]
    return float(np.mean(losses)) if losses else math.inf


def _loss(record: Record) -> float:
    return math.inf if record["failed"] else record["loss"]


def number_of(record: Record, number: str) -> Any:
    if number == "reach":
        return record
    if number == "norm":
        return _number(record["norm_5_50_95"][1])
    if number == "loss":
        return _loss(record)
    return _number(record[number])


def _number(x: float | None) -> float:
    return math.inf if x is None else x


def _minus(mine: float, reference: float) -> float:
    return math.inf if not math.isfinite(mine) or not math.isfinite(reference) else mine - reference


def _reach(mine: Record, reference: Record) -> float:
    """Steps to the reference's last loss, as a part of its steps; infinite where it was not reached."""
    if reference["failed"]:
        return math.inf
    goal, before = reference["held_out"][-1][1], None
    for step, loss in mine["held_out"]:
        if loss is not None and loss <= goal:
            if before is not None:
                step = before[0] + (step - before[0]) * (before[1] - goal) / (before[1] - loss)
            return step / reference["steps"]
        before = None if loss is None else (step, loss)
    return math.inf


def spread(values: Mapping[int, float]) -> tuple[float, float, int]:
    """Mean and standard error of what is finite, and how many are not."""
    finite = [x for x in values.values() if math.isfinite(x)]
    if not finite:
        return math.nan, math.nan, len(values)
    error = float(np.std(finite, ddof=1)) / math.sqrt(len(finite)) if len(finite) > 1 else math.nan
    return float(np.mean(finite)), error, len(values) - len(finite)


def cell_text(values: Mapping[int, float], spec: Mapping[str, Any]) -> str:
    """`+0.012 ± 0.004`; with `unit: "%"` a share in percent."""
    if not values:
        return ""
    mean, error, failed = spread(values)
    factor, digits = (100, spec.get("digits", 1)) if spec.get("unit") == "%" else (1, spec.get("digits", 3))
    sign = "+" if spec.get("against") and spec["number"] != "reach" else ""
    fail = "never" if spec["number"] == "reach" else "fail"
    if math.isnan(mean):
        return f"{failed} of {len(values)} {fail}"
    text = f"{mean * factor:{sign}.{digits}f}".replace("-", MINUS)
    if not math.isnan(error) and not spec.get("unit"):
        text += f" ± {error * factor:.{digits}f}"
    return text + (f" ({failed} of {len(values)} {fail})" if failed else "")


def markdown(spec: Mapping[str, Any], found: Sequence[Record]) -> str:
    """The table with its seeds, and the sentence on what it does not show."""
    unknown = set(spec) - SPEC
    if unknown:
        raise ValueError(f"a table has no {sorted(unknown)[0]!r}: expected some of {', '.join(sorted(SPEC))}")
    grid, specs = grid_of(spec, found) if "number" in spec else {}, collections.defaultdict(lambda: spec)
    for part in spec.get("several", ()):
        specs[part["name"]] = spec | part
        grid |= {(row, part["name"]): values for (row, _), values in grid_of(spec | part, found).items()}
    rows, columns = (list(dict.fromkeys(key[i] for key in grid)) for i in (0, 1))
    counts = sorted({len(values) for values in grid.values()})
    seeds = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
    summary = ["mean", "worst"] if spec.get("summary") else []
    lines = [
        f"**{spec['title']}** {seeds} seed{'' if seeds == '1' else 's'}.",
        "",
        f"| | {' | '.join(_name(column, spec.get('columns', 'cell')) for column in columns + summary)} |",
        "| --- |" + " --: |" * len(columns + summary),
    ]
    for row in rows:
        texts = [cell_text(grid.get((row, column), {}), specs[column]) for column in columns]
        if summary:
            all_values = [grid.get((row, column), {}) for column in columns]
            good = [spread(x)[0] for x in all_values if x and all(map(math.isfinite, x.values()))]
            without = f" without {len(columns) - len(good)}" if len(good) < len(columns) else ""
            texts.append(cell_text({0: float(np.mean(good))}, spec) + without if good else "")
            texts.append("fails" if without else cell_text({0: max(good)}, spec))
        lines.append(f"| {_name(row, spec.get('rows', 'arm'))} | {' | '.join(texts)} |")
    return "\n".join(lines) + f"\n\n*Not shown:* {' '.join(spec['lacks'].split())}"


def _name(value: Any, kind: str) -> str:
    if kind == "arm" and value not in ("mean", "worst"):
        return f"`{value}`"
    return value if isinstance(value, str) else f"{kind} {value:g}"
