"""A replay as a page to zoom and hover in: one HTML file, which asks nothing of any network."""

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zclip_jax._extras import require
from zclip_jax.replay import _drawing as drawing
from zclip_jax.replay._replay import Replay
from zclip_jax.replay.readers._notes import count
from zclip_jax.replay.readers._recording import Recording

# The traces are SVG. 100,000 steps with three rules took headless Chromium on two CPU cores 2 to 3 s to open and 0.05
# to 0.3 s to zoom; WebGL without a GPU took 9 s and 4 s or more, needs `eval`, and some machines have none at all.
# Only markers are slow in SVG, so of more than so many in view plotly.js leaves out all but every n-th. The spikes
# that were scaled most are exempt: they are a trace of their own.
MARKERS = 1000

# The policy keeps the browser from loading or sending anything, whatever plotly.js or a name in the log asks for.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; form-action 'none'; img-src data: blob:;
 script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 1rem 1.5rem; font: 15px/1.4 system-ui, sans-serif; color: #222; background: white; }}
h1 {{ font-size: 1.3rem; margin: 0; }}
p, ul {{ margin: 0.3rem 0; max-width: 60rem; overflow-wrap: anywhere; }}
.flags {{ font-weight: 600; }}
</style>
</head>
<body>
<h1>{title}</h1>
{text}
{plot}
</body>
</html>
"""


def write_page(
    path: str | os.PathLike[str],
    recording: Recording,
    results: Mapping[str, Replay],
    *,
    flags: Sequence[str] = (),
) -> None:
    """Draws the recorded norms and the loss, and of one of `results` the line above which it fires, and its spikes.

    What was allowed on a step that was scaled is shown where the mouse is over it. Several runs are drawn one after
    the other, each behind a line.

    Args:
      path: the HTML file to write.
      recording: the log that was replayed.
      results: by the rule's name, from `recording.norms`; the first is shown until another is chosen.
      flags: what to know about the run, a sentence each.

    Raises:
      ImportError: plotly isn't installed.
    """
    go = require("plotly.graph_objects", "replay", "the HTML page")
    first = next(iter(results))
    traces = [(None, trace) for trace in _log_traces(recording, results[first])]
    traces += [(name, trace) for name in results for trace in _rule_traces(recording, name, results[name])]
    visible = {name: [owner in (None, name) for owner, _ in traces] for name in results}
    drawn = [trace | {"visible": shown} for (_, trace), shown in zip(traces, visible[first], strict=True)]
    config = {
        "displaylogo": False,
        "showSendToCloud": False,
        "modeBarButtonsToRemove": ["select2d", "lasso2d"],
    }
    plot = go.Figure(drawn, _layout(recording, visible)).to_html(
        config=config, full_html=False, div_id="replay", default_height="max(75vh, 30rem)"
    )
    title = html.escape(
        f"Replay of {recording.name}: {count(recording.norms.size, 'gradient norm')}{drawing.of_runs(recording)}"
    )
    page = PAGE.format(title=title, text=_text(recording, results, flags), plot=plot)
    Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")


def _log_traces(recording: Recording, result: Replay) -> Iterator[dict[str, Any]]:
    norms, loss, bad = recording.norms, recording.loss, np.asarray(result.outcomes.nonfinite)
    curve = {"mode": "lines+markers" if norms.size <= drawing.SHORT else "lines"}
    kept = ~np.isnan(drawing.on_log_axis(norms)) & ~bad
    yield _trace(recording, kept, norms, "norm %{y:.4g}", drawing.NORM, name="norm", **curve)
    if loss is not None:
        curve |= {"showlegend": False, "yaxis": "y2"}
        yield _trace(recording, np.isfinite(loss), loss, "loss %{y:.4g}", drawing.LOSS, **curve)
    if bad.any():
        look = {"yaxis": "y3", "marker_symbol": "triangle-down", "marker_size": 10}
        look |= {"name": f"not finite: {bad.sum():,}", "customdata": norms[bad].astype(str)}
        edge = np.full(norms.size, 0.98)
        yield _trace(recording, bad, edge, "norm %{customdata}", drawing.NONFINITE, **look)


def _rule_traces(recording: Recording, name: str, result: Replay) -> Iterator[dict[str, Any]]:
    norms, outcomes = recording.norms, result.outcomes
    allowed, trigger = drawing.on_log_axis(outcomes.threshold), drawing.on_log_axis(outcomes.trigger)
    hover, color, group = "fires above %{y:.4g}", drawing.TRIGGER, {"legendgroup": "trigger"}
    line = group | {"mode": "lines", "name": drawing.name_line(_plain(name), trigger)}
    dots = group | {"marker_symbol": "square", "marker_size": 5, "showlegend": False}
    yield _trace(recording, np.full(norms.size, True), trigger, hover, color, **line)
    yield _trace(recording, drawing.alone(trigger), trigger, hover, color, **dots)

    scale, fired = np.asarray(outcomes.clip_scale), np.asarray(outcomes.fired)
    details = np.stack([allowed, trigger, outcomes.z_score, scale], axis=-1).astype(np.float32)
    scaled, most = drawing.scaled_only(result), np.zeros_like(fired)
    most[np.flatnonzero(fired)[np.argsort(scale[fired])][:MARKERS]] = True
    hover = "<br>".join(
        [
            "norm %{y:.4g}",
            *(
                f"{x} %{{customdata[{i}]:.4g}}"
                for i, x in enumerate(("allowed", "fires above", "z-score", "scale"))
            ),
        ]
    )
    # Over a larger marker, plotly.js would show the hover text of the norm's line instead.
    spike = {"legendgroup": "spikes", "marker_size": 6}
    for steps, color, look in (
        (scaled, drawing.SCALED, {"name": f"scaled, no spike: {scaled.sum():,}"}),
        (fired & ~most, drawing.SPIKE, spike | {"showlegend": False}),
        (most, drawing.SPIKE, spike | {"name": f"spikes: {fired.sum():,}"}),
    ):
        if steps.any():
            yield _trace(recording, steps, norms, hover, color, customdata=details[steps], **look)


def _trace(
    recording: Recording, kept: np.ndarray, y: np.ndarray, hover: str, color: str, **look: Any
) -> dict[str, Any]:
    """A scatter trace of the steps `kept`, in half the bytes of float64."""
    x, title = drawing.positions(recording)
    where, text = "step %{x}", {}
    if title != "step":
        where, text = "row %{x}, step %{text}", {"text": recording.steps[kept].astype(str)}
    with np.errstate(over="ignore"):
        places = {
            "x": x[kept],
            "y": y[kept].astype(np.float32),
            "hovertemplate": f"{where}<br>{hover}<extra></extra>",
        }
    drawn = {"mode": "markers", "line_width": 1, "marker_size": 4, "marker_maxdisplayed": MARKERS}
    return places | text | drawn | {"line_color": color, "marker_color": color} | look


def _layout(recording: Recording, visible: Mapping[str, list[bool]]) -> dict[str, Any]:
    two = recording.loss is not None
    above = {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    buttons = [
        {"label": _plain(name), "method": "restyle", "args": [{"visible": shown}]}
        for name, shown in visible.items()
    ]
    return {
        "template": "simple_white",
        # One x axis for both panels, so that they move together.
        "xaxis": {
            "title": drawing.positions(recording)[1],
            "anchor": "y2" if two else "y",
            "tickformat": ",~f",
        },
        # With few enough ticks that plotly.js labels 1, 2 and 5 and not every digit.
        "yaxis": {
            "title": "gradient norm",
            "type": "log",
            "domain": [0.35 * two, 1],
            "tickformat": "~g",
            "nticks": 4,
        },
        "yaxis2": {"title": "loss", "domain": [0, 0.3], "visible": two},
        # What isn't finite has no place on a log axis; it is marked along the upper edge.
        "yaxis3": {"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False},
        "shapes": [
            {"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1}
            | {"line": {"width": 1, "dash": "dot", "color": drawing.START}}
            for x in drawing.run_starts(recording).tolist()
        ],
        "updatemenus": [above | {"buttons": buttons}] if len(buttons) > 1 else [],
        "legend": {"orientation": "h", "x": 0, "y": -0.13, "yanchor": "top"},
        "margin": {"l": 70, "r": 20, "t": 60, "b": 50},
        "hovermode": "closest",
    }


def _text(recording: Recording, results: Mapping[str, Replay], flags: Sequence[str]) -> str:
    cadence = f", one every {recording.cadence:,} steps" if recording.cadence > 1 else ""
    about = (
        f"From {recording.column!r}, {recording.format}{cadence}. The rules judge the norms as "
        "they were recorded: had one of them clipped, later norms would have been others."
    )
    notes = list(recording.notes)
    if undrawn := int(np.sum(recording.norms <= 0)):
        notes.append(f"Norms of zero or less have no place on a log axis and aren't drawn: {undrawn:,}.")
    if max(np.sum(result.outcomes.clip_scale < 1) for result in results.values()) > MARKERS:
        notes.append(
            f"Where more than {MARKERS:,} steps in view were scaled, some aren't marked until you zoom in."
        )
    told = [f"For {next(iter(results))}: {flag}" for flag in flags]
    lists = [
        f'<ul class="{kind}">' + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"
        for kind, lines in (("flags", told), ("notes", notes))
        if lines
    ]
    return "\n".join([f"<p>{html.escape(about)}</p>", *lists])


def _plain(text: str) -> str:
    """`text` without a meaning for plotly.js, which reads some HTML tags in labels."""
    return html.escape(text, quote=False)
