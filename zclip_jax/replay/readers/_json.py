"""JSON: trainer states of Hugging Face, lists of rows, and rows on lines of their own."""

import json
from collections.abc import Iterable
from io import TextIOWrapper
from typing import Any

from zclip_jax.replay.readers._columns import Columns, flatten
from zclip_jax.replay.readers._last_stage import make_recording
from zclip_jax.replay.readers._notes import count, listing, shorten
from zclip_jax.replay.readers._recording import Recording

# The flags of examples/llama/train.py that are arguments of `zclip`, and by what name there.
SETTINGS = {
    name: name
    for name in (
        "alpha",
        "z_thresh",
        "max_grad_norm",
        "clip_factor",
        "strategy",
        "absorb",
        "patience",
        "robust_warmup",
        "min_rel_std",
    )
} | {"clip_warmup": "warmup_steps"}

TAGS = ("tag", "metric", "name", "key")  # what a number is called in rows of one

SAMPLE = 100  # rows on lines that are searched for names that stand twice

_decode = json.JSONDecoder().raw_decode


class _Twice(dict[str, None]):
    """The names that stand twice in one object of JSON, of which `json` keeps the last value without a word."""

    def hook(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Makes an object of its names and values, as `object_pairs_hook`."""
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            self.update(dict.fromkeys(name for name in made if names.count(name) > 1))
        return made

    def notes(self) -> list[str]:
        return [f"{listing(list(self))} stands twice in a row: the last value is read"] if self else []


def parse_object(line: str) -> dict[str, Any] | None:
    """The JSON object that a line is; None for any other line."""
    line = line.strip()
    try:
        value, end = _decode(line)
    except (ValueError, RecursionError):
        return None
    return value if type(value) is dict and end == len(line) else None


def read_document(file: TextIOWrapper, column: str | None) -> Recording:
    """A whole file of JSON: `{"log_history": [row, …]}` or a list of rows."""
    twice = _Twice()
    try:
        document = json.load(file, object_pairs_hook=twice.hook)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply for a log") from None
    except ValueError as error:
        raise ValueError(f"JSON that is cut off or damaged: {error}") from None
    form, rows = "JSON list", document
    if isinstance(document, dict):
        form, rows = "Hugging Face trainer state", document.get("log_history")
    if not isinstance(rows, list):
        found = listing(list(document)) if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"JSON without a list of rows, found {found};\nlooked for log_history or a list")
    columns = Columns(column, typed=True)
    objects = [row for row in rows if isinstance(row, dict)]
    for row in objects:
        _add(columns, row)
    others = len(rows) - len(objects)
    are = count(others, "entry is no row and is", "entries are no rows and are")
    return make_recording(columns, form, twice.notes() + ([f"{are} left out"] if others else []))


def read_lines(lines: Iterable[str], column: str | None) -> Recording:
    """A JSON object on each line, and perhaps the run's config on the first."""
    columns = Columns(column, typed=True)
    notes, settings, config = [], {}, None
    num_bad, first_bad, line, twice = 0, "", "", _Twice()
    for line in lines:
        row = parse_object(line)
        if row is not None and columns.num_rows < SAMPLE:
            json.loads(line, object_pairs_hook=twice.hook)
        if row is None:
            if line.strip():
                num_bad += 1
                first_bad = first_bad or line
        elif columns.num_rows == 0 and isinstance(config := row.get("config"), dict):
            if config.get("clip") == "zclip":
                settings = {SETTINGS[flag]: value for flag, value in config.items() if flag in SETTINGS}
        else:
            _add(columns, row)
    if num_bad and not line.endswith(("\n", "\r")) and parse_object(line) is None:
        num_bad -= 1
        notes.append("the last line is cut off and left out")
    if num_bad:
        are = count(num_bad, "line is no JSON object and is", "lines are no JSON objects and are")
        notes.append(f"{are} left out, first {shorten(first_bad, 40)!r}")
    return make_recording(columns, "JSON lines", twice.notes() + notes, settings)


def _add(columns: Columns, row: dict[str, Any]) -> None:
    tag = next((row[key] for key in TAGS if isinstance(row.get(key), str)), None) if "value" in row else None
    if tag is not None:  # a row for each number
        row = {name: value for name, value in row.items() if name != "value"} | {tag: row["value"]}
    try:
        if dict in map(type, row.values()):
            row = dict(flatten(row))
        there = (
            row if None not in row.values() else [name for name, value in row.items() if value is not None]
        )
        columns.add(row, tuple(there))
    except RecursionError:
        raise ValueError("JSON that is nested too deeply for a log") from None
