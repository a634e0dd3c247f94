"""A run on a terminal: charts of a line each, rates, alarms and spikes."""

import textwrap
from typing import Any

import numpy as np

from zclip_jax._extras import require
from zclip_jax.monitor._records import describe_rows
from zclip_jax.monitor._run import FLAGS, RECENT, Run

BARS, ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
NAMES = {"nonfinite": "not finite"}
BESIDE = 9 + 10  # characters beside a chart: its name and its last number
LEAST = 8  # characters that a chart has at least
STYLES = ("", "yellow", "bold red", "bold magenta")  # plain, scaled down, a spike, not finite
MOST = 20  # spikes, at most
WHOLE = 100_000  # lines: more than there are


def draw(run: Run, width: int, height: int = WHOLE, *, ascii_only: bool = False) -> Any:
    """The run as a `rich.text.Text` of at most so many lines: the newest spikes that fit, and what is above them."""
    text = require("rich.text", "monitor", "the view of a run").Text
    steps = run.columns["step"].size
    head = [text(_title(run), style="bold")]
    head += [text(line, style="dim") for note in run.notes for line in _wrap(note, width)]
    if not steps:
        return text("\n").join([*head, text("no rows yet")])
    bars = ASCII if ascii_only else BARS
    recent = _charts(run, slice(max(steps - RECENT, 0), None), width, bars)
    whole = _charts(run, slice(None), width, bars) if steps > RECENT else []
    rest = [text(line) for line in _rates(run, width)]
    for alarm in run.find_alarms()[-3:]:
        rest += [text(line, style="bold red") for line in _wrap(f"! {alarm}", width)]
    room = height - len(head) - len(recent) - len(rest) - 1
    spikes = []
    for spike in _spikes(run):
        lines = _wrap(spike, width)
        if len(spikes) + len(lines) > room:
            break
        spikes += lines
    if spikes:
        rest += [text("last spikes", style="dim"), *map(text, spikes)]
    if len(whole) > room - len(spikes):
        whole = []
    lines = [*head, *whole, *recent, *rest][:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return text("\n").join(lines)


def _title(run: Run) -> str:
    steps = run.columns["step"]
    rule = f", {run.rule} replayed" if run.rule else ""
    return run.name + (f", step {steps[-1]:,.0f}" if steps.size else "") + rule


def _charts(run: Run, part: slice, width: int, bars: str) -> list[Any]:
    """Loss, norm, and what is allowed, of some of the steps; the two norms on the same log scale."""
    text = require("rich.text", "monitor", "the view of a run").Text
    columns = {name: x[part] for name, x in run.columns.items()}
    norm, allowed = columns["grad_norm"], run.allowed[part]
    kind = np.zeros(norm.size, int)
    kind[run.scaled[part]] = 1
    kind[columns["fired"] > 0] = 2
    kind[columns["nonfinite"] > 0] = 3
    edges = bins(norm.size, max(width - BESIDE, LEAST))
    first, last = columns["step"][[0, -1]]
    lines = [text(f"steps {first:,.0f} to {last:,.0f}", style="dim")]
    if np.isfinite(columns["loss"]).any():
        shown = sparkline(peaks(columns["loss"], edges), bars)
        lines.append(text(f"{'loss':9}{shown} {_number(columns['loss'])}"))
    logs = [peaks(_log(norm), edges), peaks(-_log(allowed), edges) * -1.0]
    known = [x[np.isfinite(x)] for x in logs]
    low, high = (
        min((x.min() for x in known if x.size), default=0.0),
        max((x.max() for x in known if x.size), default=0.0),
    )
    line = text(f"{'norm':9}")
    styles = np.maximum.reduceat(kind, edges)
    for bar, style in zip(sparkline(logs[0], bars, low, high), styles, strict=True):
        line.append("!" if style == 3 else bar, style=STYLES[style])
    lines.append(line.append(f" {_number(norm)}"))
    if known[1].size:
        lines.append(
            text(f"{'allowed':9}{sparkline(logs[1], bars, low, high)} {_number(allowed)}", style="cyan")
        )
    return lines


def bins(size: int, width: int) -> np.ndarray:
    """Where each of at most `width` parts of `size` values begins."""
    return np.unique(np.arange(min(size, width)) * size // max(min(size, width), 1))


def peaks(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The highest finite value of each part; NaN where it has none."""
    highest = np.maximum.reduceat(np.where(np.isfinite(values), values, -np.inf), edges)
    return np.where(np.isfinite(highest), highest, np.nan)


def sparkline(values: np.ndarray, bars: str, low: float | None = None, high: float | None = None) -> str:
    """A bar for each value between `low` and `high`, a space for NaN; the least and largest unless given."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return " " * values.size
    low, high = finite.min() if low is None else low, finite.max() if high is None else high
    place = (values - low) / (high - low) if high > low else np.where(np.isfinite(values), 0.0, np.nan)
    return "".join(
        " " if np.isnan(x) else bars[min(max(int(x * len(bars)), 0), len(bars) - 1)] for x in place.tolist()
    )


def _rates(run: Run, width: int) -> list[str]:
    """What share of the last 100, the last 1,000 and all steps fired, was bound, and so on."""
    flags = {name: run.columns[name] for name in FLAGS if not np.isnan(run.columns[name]).all()}
    steps, lines = run.columns["step"].size, []
    if not flags:
        return []
    for last in [n for n in (100, RECENT) if n < steps] + [steps]:
        name = f"last {last:,}" if last < steps else f"all {steps:,}"
        parts = [f"{NAMES.get(flag, flag)} {np.nanmean(x[-last:]):.1%}" for flag, x in flags.items()]
        lines += _wrap(f"{name + ':':12}" + ", ".join(parts), width)
    return lines


def _spikes(run: Run) -> list[str]:
    """The last ones, the newest first; with groups and rows where there are records."""
    if records := run.current_records():
        return [
            " · ".join(filter(None, (str(record), describe_rows(record))))
            for record in records[: -MOST - 1 : -1]
        ]
    columns, allowed = run.columns, run.allowed
    rows = np.flatnonzero(columns["fired"] > 0)[: -MOST - 1 : -1]
    told = [
        f"step {columns['step'][i]:,.0f}: norm {columns['grad_norm'][i]:.3g}"
        + (f", allowed {allowed[i]:.3g}" if np.isfinite(allowed[i]) else "")
        for i in rows
    ]
    if (lost := columns["step"][columns["nonfinite"] > 0]).size:
        told.insert(0, f"steps without a finite norm: {lost.size:,}, the last of them {lost[-1]:,.0f}")
    return told


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 12), subsequent_indent="  ", break_on_hyphens=False) or [""]


def _number(values: np.ndarray) -> str:
    return f"{values[-1]:.4g}" if np.isfinite(values[-1]) else "-" if np.isnan(values[-1]) else "inf"


def _log(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)
