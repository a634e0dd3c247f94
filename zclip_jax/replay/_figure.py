"""A replay as a static figure, for a report or a README."""

import os
from collections.abc import Mapping

import numpy as np

from zclip_jax._extras import require
from zclip_jax.replay._drawing import (
    LOSS,
    NONFINITE,
    NORM,
    OTHERS,
    SCALED,
    SHORT,
    SPIKE,
    THRESHOLD,
    alone,
    on_log_axis,
    positions,
    scaled_only,
)
from zclip_jax.replay._replay import Replay
from zclip_jax.replay.readers._recording import Recording


def write_figure(path: str | os.PathLike[str], recording: Recording, results: Mapping[str, Replay]) -> None:
    """Draws the first of `results` over the recorded norms, the thresholds of the others, and the loss.

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
    norms, threshold = on_log_axis(recording.norms), on_log_axis(result.outcomes.threshold)
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
        color, limit = OTHERS[i % len(OTHERS)], on_log_axis(its.outcomes.threshold)
        above.plot(x, limit, lw=0.8, color=color, label=f"allowed by {plain(other)}")
    above.plot(x, threshold, lw=0.8, color=THRESHOLD, label=f"allowed by {plain(name)}")
    above.plot(x[alone(threshold)], threshold[alone(threshold)], "s", ms=3, color=THRESHOLD)
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
    above.set(yscale="log", ylabel="gradient norm")
    axes[-1].set_xlabel(xlabel)
    # Below the axes, where it covers nothing, in as many columns as fit.
    longest = max(map(len, above.get_legend_handles_labels()[1]))
    figure.legend(loc="outside lower left", ncols=min(max(120 // (longest + 8), 1), 4), frameon=False)
    figure.suptitle(f"{plain(recording.name)}: {x.size:,} norms", fontsize=11)
    figure.savefig(path, dpi=130)


def plain(text: str) -> str:
    """`text` short enough to fit, and without a meaning for matplotlib, to which dollars enclose maths."""
    return (text if len(text) <= 60 else f"{text[:59]}…").replace("$", r"\$")
