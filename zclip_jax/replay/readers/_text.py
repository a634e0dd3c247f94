r"""Plain text: what trainers print, as in `step 5/100 | loss 3.1 | norm 0.27 (+0.10z)`."""

import re
from collections.abc import Callable, Iterator
from typing import TextIO

from zclip_jax.replay.readers._columns import LOOKED_FOR, Columns
from zclip_jax.replay.readers._names import loss_rank, norm_rank, step_rank
from zclip_jax.replay.readers._notes import count, listing, shorten
from zclip_jax.replay.readers._recording import Recording

SAMPLE = 200  # lines with a norm that tell what this trainer calls things

_BETWEEN = r"""[\s:='"\[(]+(?:tensor\()?"""
_NUMBER = r"(?i:[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf(?:inity)?)(?![\w.]))"
# A name of one word or two before a number: "norm 0.2", "'grad_norm': 0.2", "| grad norm: 0.2 |".
_PAIR = re.compile(
    rf"(?<![\w/.-])((?:(?!nan |inf )[A-Za-z_][\w/.-]* )?[A-Za-z_][\w/.-]*){_BETWEEN}({_NUMBER})"
)
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"(?i)\brank[\s:=_]?\s*(\d+)")
_BAR = re.compile(r"(\d+)/\d+ \[")  # tqdm's "5/100 [00:01<00:19, 4.9it/s, …]"
# Words that make another quantity of the one after them.
_OTHER = ["param", "params", "parameter", "weight", "weights", "update", "updates", "layer", "rms", "batch"]
_OTHER += ["max", "val", "valid", "validation", "eval", "test"]

Finder = Callable[[str], re.Match[str] | None]


def read_text(file: TextIO, column: str | None) -> Recording:
    """The rows of a text log that have a norm, and a step where the log numbers them."""
    names, num_bars = _sample(file, column)
    norm, found, notes = names.norm()
    enough = len(found.values) / 2
    steps, losses = (
        [name for _, name, found in names.ranked(rank) if len(found.values) >= enough]
        for rank in (step_rank, loss_rank)
    )
    find_steps: dict[str, Finder] = {name: _finder(name, r"(\d+)") for name in steps}
    if not steps and num_bars >= enough:
        find_steps = {"step": lambda text: _BAR.search(text)}
    find_losses = {name: _finder(name) for name in losses[:1]}
    columns = Columns(norm)
    file.seek(0)
    for row in _rows(file, norm, find_steps, find_losses, notes):
        columns.add(row)
    return columns.recording("text log", notes)


def _finder(name: str, number: str = r"([-+.\w]+)") -> Finder:
    """Finds what follows a name. The name opens the pattern, since `re` looks for plain text fastest."""
    word = re.escape(name)
    others = "".join(f"(?<!(?i:{other})[ _]{word})" for other in _OTHER)
    return re.compile(rf"{word}(?<![\w/.-]{word}){others}{_BETWEEN}{number}").search


def _pairs(line: str) -> dict[str, str]:
    """The numbers in a line by the names before them."""
    pairs: dict[str, str] = {}
    for name, number in _PAIR.findall(_COLOUR.sub("", line)):
        first, _, last = name.rpartition(" ")
        has_rank = any(rank(name) is not None for rank in (norm_rank, step_rank, loss_rank))
        if first and first.lower() not in _OTHER and not has_rank:
            name = last  # "completed step" is a step, but "param norm" no norm
        pairs.setdefault(name, number)
    return pairs


def _sample(file: TextIO, column: str | None) -> tuple[Columns, int]:
    """The names and numbers in the first lines with a norm, and how many of them hold a progress bar."""
    names, num_bars = Columns(column), 0
    seen: dict[str, None] = {}
    example = ""
    find = None if column is None else _finder(column)
    for line in file:
        if len(seen) < 20:
            pairs = _pairs(line)
            example = line if (pairs and not seen) or not example.strip() else example
            seen |= dict.fromkeys(pairs)
        if find is None and "norm" not in line.lower():
            continue
        pairs = _pairs(line)
        if find and (match := find(line)):
            pairs[column or ""] = match[1]
        if any(norm_rank(name) is not None if column is None else name == column for name in pairs):
            names.add(pairs)
            num_bars += _BAR.search(line) is not None
            if names.num_rows == SAMPLE:
                break
    if not names.num_rows:
        what = "gradient norm" if column is None else f"number after {column!r}"
        found = f"found {listing(list(seen))}" if seen else "found no named numbers"
        raise ValueError(
            f"no {what} in this text: {found}, in lines like {shorten(example)!r};\n{LOOKED_FOR}"
        )
    return names, num_bars


def _rows(
    file: TextIO, norm: str, find_steps: dict[str, Finder], find_losses: dict[str, Finder], notes: list[str]
) -> Iterator[dict[str, str]]:
    """The norm, steps and loss of each row, as text; what was left out is added to the notes."""
    find_norm, find_others = _finder(norm), (*find_steps.items(), *find_losses.items())
    held: dict[str, str] = {}  # the last row, until it is clear that it is not drawn anew
    drawn = end = False
    rank, ranks, num_redrawn, num_unnumbered = None, set(), 0, 0
    line = row_line = ""
    whole: list[str] = []  # the first row and the last but one, as printed
    for line in file:
        if norm not in line:
            continue
        text = _COLOUR.sub("", line) if "\x1b" in line else line
        match = find_norm(text)
        if match is None:
            continue
        row = {norm: match[1]}
        for name, find in find_others:
            if found := find(text):
                row[name] = found[1]
        if find_steps and row.keys().isdisjoint(find_steps):
            num_unnumbered += 1
            continue
        if "ank" in text and (found := _RANK.search(text)):
            ranks.add(found[1])
            rank = rank or found[1]
            if found[1] != rank:
                continue
        if drawn and find_steps and all(row.get(step) == held.get(step) for step in find_steps):
            num_redrawn += 1
        elif held:
            yield held
        held, drawn = row, text.endswith("\r")
        whole = [whole[0] if whole else line, row_line]
        row_line, end = line, match.end() == len(text)
    if held:
        if line is row_line and end:
            notes.append(
                f"the last line has no line end, so its norm {held[norm]} may be cut off and is left out"
            )
        else:
            yield held
            if _is_cut(line, whole if line is row_line else [row_line], line is row_line):
                notes.append(f"the last line is cut off or runs into other text: {shorten(line[-60:])!r}")
    if num_redrawn:
        notes.append(f"a progress bar drew {count(num_redrawn, 'row')} anew; of each step the last is read")
    if len(ranks) > 1:
        notes.append(f"{len(ranks)} ranks log their rows; those of rank {rank} are read")
    if num_unnumbered:
        notes.append(f"{count(num_unnumbered, 'line has', 'lines have')} {norm} but no step; left out")


def _is_cut(line: str, rows: list[str], has_norm: bool) -> bool:
    """Whether the last line is no whole row like those before it, be it that other text runs into it."""
    varying = r"(?i)[-+]?\d[\d.]*(e[-+]?\d+)?|[-+]?(nan|inf)|[^ -~]"  # numbers, and what bars are drawn with
    shape, *shapes = (re.sub(varying, " ", text).split() for text in (line, *rows))
    if has_norm:
        return shape not in shapes
    begun = shape[:-1]  # the last word may be cut, too
    return bool(shape) and not line.endswith(("\n", "\r")) and begun == shapes[0][: len(begun)]
