"""`zclip-jax plot`: the losses, norms and clip rates of runs as a picture."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from zclip_jax._extras import require
from zclip_jax.monitor._run import Run

# Okabe and Ito's colors, which color-blind people can tell apart as well.
RUNS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")
NORM, TRIGGER, CAP, SPIKE, NONFINITE = "#56b4e9", "black", "#e69f00", "#d55e00", "#cc79a7"
BOUND = "#999999"
WINDOW = 100  # steps that a rate is of
POINTS = 4000  # of a curve; of more, the least and the largest of each part are drawn
NAMES = 8  # groups that are named at most
APART = 0.08  # of the width, between two names


def plot_runs(path: str | os.PathLike[str], runs: Sequence[Run]) -> None:
    """Draws the losses; the norms before clipping with what was allowed, on a log scale; and how much was clipped.

    Of one run every kind of step is marked, and the largest spikes with the group that was furthest above its own
    history. Of several each has a color.

    Args:
      path: where to; its suffix says as what, out of those matplotlib knows.
      runs: of which at least one has rows.

    Raises:
      ImportError: matplotlib isn't installed.
      ValueError: there are no rows to draw, or the suffix is none that matplotlib knows.

    Examples:
      >>> from zclip_jax.monitor import plot_runs, read_run
      >>> plot_runs("runs.png", [read_run("runs/fixed"), read_run("runs/zclip")])  # doctest: +SKIP
    """
    # A figure of its own, without pyplot: the caller's backend and open figures stay as they are.
    figure = require("matplotlib.figure", "monitor", "the picture").Figure(
        figsize=(9, 7), layout="constrained"
    )
    if empty := [run.name for run in runs if not run.columns["step"].size]:
        raise ValueError(f"{empty[0]} has no rows to draw")
    has_loss = any(np.isfinite(run.columns["loss"]).any() for run in runs)
    has_rate = any(_rates(run) for run in runs)
    heights = [2] * has_loss + [3] + [1] * has_rate
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[
        :, 0
    ].tolist()
    norm_panel = panels[has_loss]
    for i, run in enumerate(runs):
        color = RUNS[i % len(RUNS)] if len(runs) > 1 else None
        if has_loss:
            _draw_loss(panels[0], run, color)
        _draw_norm(norm_panel, run, color)
        if has_rate:
            _draw_rates(panels[-1], run, color)
    _name_spikes(norm_panel, runs)
    norm_panel.set(yscale="log", ylabel="gradient norm", ymargin=0.1)
    panels[-1].set_xlabel("step")
    for panel in panels:
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False, ncols=4, fontsize=8)
    if len(runs) == 1:
        rule = f", {runs[0].rule} replayed" if runs[0].rule else ""
        figure.suptitle(plain(f"{runs[0].name}{rule}"), fontsize=11)
    figure.savefig(path, dpi=130)


def _draw_loss(panel: Any, run: Run, color: str | None) -> None:
    columns, label = run.columns, plain(run.name) if color else "training"
    _curve(panel, columns["step"], columns["loss"], lw=0.8, color=color or RUNS[0], label=label)
    held_out = np.isfinite(columns["val_loss"])
    if held_out.any():
        panel.plot(
            columns["step"][held_out],
            columns["val_loss"][held_out],
            "o-",
            ms=4,
            lw=1,
            color=color or "black",
            label=None if color else "held out",
        )
    panel.set_ylabel("loss")


def _draw_norm(panel: Any, run: Run, color: str | None) -> None:
    columns = run.columns
    steps, norm, allowed = columns["step"], _on_log_axis(columns["grad_norm"]), _on_log_axis(run.allowed)
    fired, capped = columns["fired"] > 0, (columns["capped"] > 0) & ~(columns["fired"] > 0)
    _curve(panel, steps, norm, lw=0.8, color=color or NORM, label=plain(run.name) if color else "norm")
    trigger = _on_log_axis(columns["trigger"])
    line = {"ls": ":", "color": color} if color else {"color": TRIGGER, "label": "spike above"}
    if np.isfinite(trigger).any():
        _curve(panel, steps, trigger, lw=0.9, **line)
    if color is None and capped.any():
        _curve(panel, steps, _on_log_axis(run.cap), ls="--", lw=0.9, color=CAP, label="cap")
    for hit, its, label in ((capped, CAP, "capped"), (fired, SPIKE, "spike")):
        if color is None and hit.any():
            label = f"{label}: {hit.sum():,}"
            # On runs of many steps lines would hide the norm.
            if hit.sum() <= POINTS / 4:
                panel.vlines(steps[hit], allowed[hit], norm[hit], lw=0.6, color=its)
            panel.plot(steps[hit], norm[hit], "o", ms=3, color=its, label=label)
    if color is not None and fired.any():
        panel.plot(steps[fired], norm[fired], "o", ms=3, color=color)
    lost = columns["nonfinite"] > 0
    if lost.any():
        panel.plot(
            steps[lost],
            np.full(lost.sum(), 0.98),
            "v",
            ms=5,
            color=color or NONFINITE,
            transform=panel.get_xaxis_transform(),
            label=None if color else f"not finite: {lost.sum():,}",
        )
    if (recorded := _recorded(run)).size and color is None:
        panel.plot(
            steps[recorded],
            norm[recorded],
            "o",
            ms=7,
            mfc="none",
            color=SPIKE,
            label=f"recorded: {recorded.size:,}",
        )


def _recorded(run: Run) -> np.ndarray:
    """The rows of the steps with a record of the gradients."""
    steps = [one["step"] for one in run.current_records() if one["watch"].startswith("grads")]
    return np.searchsorted(run.columns["step"], np.unique(steps))


def _name_spikes(panel: Any, runs: Sequence[Run]) -> None:
    """Writes which group it was beside the largest spikes, so far apart that one can read them."""
    first, last = (pick(run.columns["step"][i] for run in runs) for pick, i in ((min, 0), (max, -1)))
    places: list[float] = []
    records = [(run, i, one) for i, run in enumerate(runs) for one in run.current_records()]
    for run, i, record in sorted(records, key=lambda one: -float(one[2]["times_level"] or 0.0)):
        group = record["rise"] or record["share"]
        step, row = record["step"], np.searchsorted(run.columns["step"], record["step"])
        height = _on_log_axis(run.columns["grad_norm"])[row]
        near = any(abs(step - other) <= APART * (last - first) for other in places)
        if group is None or near or np.isnan(height) or not record["watch"].startswith("grads"):
            continue
        late = step > first + 0.8 * (last - first)
        panel.annotate(
            plain(group["group"]),
            (step, height),
            xytext=(-5 if late else 5, 4),
            ha="right" if late else "left",
            textcoords="offset points",
            fontsize=7,
            color=RUNS[i % len(RUNS)] if len(runs) > 1 else SPIKE,
        )
        places.append(step)
        if len(places) == NAMES:
            return


def _draw_rates(panel: Any, run: Run, color: str | None) -> None:
    rates = _rates(run)
    if color is not None and rates:  # of several runs only what was scaled down, by rule or cap
        rates = {"": (run.scaled.astype(float), color)}
    for name, (flags, its) in rates.items():
        steps = run.columns["step"]
        total = np.cumsum(np.r_[0.0, flags])
        since = np.maximum(np.arange(1, total.size) - WINDOW, 0)
        rate = (total[1:] - total[since]) / (np.arange(1, total.size) - since)
        lw = 2.5 if name == "bound" else 0.9  # most often as many as fired
        _curve(panel, steps, 100 * rate, lw=lw, color=its, label=name or None)
    panel.set_ylim(-2, 102)
    what = "scaled" if color else "clipped"
    panel.set_ylabel(f"{what} [%]\nof {WINDOW} steps", fontsize=8)


def _rates(run: Run) -> dict[str, tuple[np.ndarray, str]]:
    """The flags to draw rates of, as 0 and 1, with a color; only those that the log tells."""
    colors = {"bound": BOUND, "fired": SPIKE, "capped": CAP, "skipped": NONFINITE}
    flags = {name: (run.columns[name], color) for name, color in colors.items()}
    return {name: (np.nan_to_num(x), color) for name, (x, color) in flags.items() if not np.isnan(x).all()}


def _curve(panel: Any, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """A line through values that are finite, and gaps elsewhere; a dot for each where they are few."""
    kept = thin(y)
    panel.plot(
        x[kept], np.where(np.isfinite(y), y, np.nan)[kept], marker="." if kept.size <= 3 else "", **style
    )


def thin(y: np.ndarray) -> np.ndarray:
    """Which of many values to draw: the least and the largest of each part, so that no spike is lost."""
    if y.size <= POINTS:
        return np.arange(y.size)
    edges = np.arange(POINTS // 2 + 1) * y.size // (POINTS // 2)
    low, high = np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), y, -np.inf)
    parts = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    kept = [a + int(np.argmin(low[a:b])) for a, b in parts] + [
        a + int(np.argmax(high[a:b])) for a, b in parts
    ]
    return np.unique(kept)


def _on_log_axis(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def plain(text: str) -> str:
    """`text` short enough to fit, and without a meaning for matplotlib, to which dollars enclose maths."""
    return (text if len(text) <= 60 else f"{text[:59]}…").replace("$", r"\$")
