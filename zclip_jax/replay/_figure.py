"""A replay as a static figure, for a report or a README."""

import os
from collections.abc import Mapping

import numpy as np

from zclip_jax._extras import require
from zclip_jax.replay._drawing import (
    ALLOWED,
    LOSS,
    NONFINITE,
    NORM,
    OTHERS,
    SCALED,
    SHORT,
    SPIKE,
    START,
    TRIGGER,
    alone,
    name_line,
    of_runs,
    on_log_axis,
    positions,
    run_starts,
    scaled_only,
)
from zclip_jax.replay._replay import Replay
from zclip_jax.replay.readers._recording import Recording


def write_figure(path: str | os.PathLike[str], recording: Recording, results: Mapping[str, Replay]) -> None:
    """Draws the recorded norms and the loss, and of each of `results` the line above which the rule fires.

    Of the first it also marks the steps that it would have scaled down, at the norm and at what was allowed. Several
    runs are drawn one after the other, each behind a line.

    Args:
      path: where to; its suffix says as what, out of those matplotlib knows.
      recording: the log that was replayed.
      results: by the rule's name, from `recording.norms`.

    Raises:
      ImportError: matplotlib isn't installed.
    """
    # A figure of its own, without pyplot: the caller's backend and open figures stay as they are.
    figure = require("matplotlib.figure", "replay", "the figure").Figure(figsize=(9, 6), layout="constrained")
    (name, result), *others = results.items()
    x, xlabel = positions(recording)
    norms, allowed, trigger = map(
        on_log_axis, (recording.norms, result.outcomes.threshold, result.outcomes.trigger)
    )
    fired, nonfinite, scaled = (
        np.asarray(steps) for steps in (result.outcomes.fired, result.outcomes.nonfinite, scaled_only(result))
    )
    curve = {"lw": 0.8, "marker": "." if x.size <= SHORT else ""}

    if recording.loss is None:
        axes = [figure.subplots()]
    else:
        axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        kept = np.isfinite(recording.loss)
        axes[1].plot(x[kept], recording.loss[kept], color=LOSS, **curve)
        axes[1].set_ylabel("loss")
    above = axes[0]
    drawn = ~np.isnan(norms) & ~nonfinite
    above.plot(x[drawn], norms[drawn], color=NORM, label="norm", **curve)
    for i, (other, its) in enumerate(others):
        line = on_log_axis(its.outcomes.trigger)
        above.plot(x, line, lw=0.8, color=OTHERS[i % len(OTHERS)], label=name_line(plain(other), line))
    above.plot(x, trigger, lw=0.8, color=TRIGGER, label=name_line(plain(name), trigger))
    above.plot(x[alone(trigger)], trigger[alone(trigger)], "s", ms=3, color=TRIGGER)
    if (marked := scaled | fired).any():
        above.plot(x[marked], allowed[marked], "_", ms=3, color=ALLOWED, label="allowed where scaled")
    if scaled.any():
        above.plot(
            x[scaled], norms[scaled], ".", ms=3, color=SCALED, label=f"scaled, no spike: {scaled.sum():,}"
        )
    if fired.any():
        above.plot(x[fired], norms[fired], "o", ms=4, color=SPIKE, label=f"spikes: {fired.sum():,}")
    if nonfinite.any():
        edge = np.full(nonfinite.sum(), 0.98)
        above.plot(
            x[nonfinite],
            edge,
            "v",
            ms=6,
            color=NONFINITE,
            transform=above.get_xaxis_transform(),
            label=f"not finite: {edge.size:,}",
        )
    for start in run_starts(recording):
        for panel in axes:
            panel.axvline(start, lw=0.6, ls=":", color=START)
    above.set(yscale="log", ylabel="gradient norm")
    axes[-1].set_xlabel(xlabel)
    # Below the axes, where it covers nothing, in as many columns as fit.
    longest = max(map(len, above.get_legend_handles_labels()[1]))
    figure.legend(loc="outside lower left", ncols=min(max(120 // (longest + 8), 1), 4), frameon=False)
    figure.suptitle(f"{plain(recording.name)}: {x.size:,} norms{of_runs(recording)}", fontsize=11)
    figure.savefig(path, dpi=130)


def plain(text: str) -> str:
    """`text` short enough to fit, and without a meaning for matplotlib, to which dollars enclose maths."""
    return (text if len(text) <= 60 else f"{text[:59]}…").replace("$", r"\$")
