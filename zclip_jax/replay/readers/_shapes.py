"""Shapes of lines: one pattern reads at once all lines that differ in their numbers alone."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zclip_jax.replay.readers._names import LAUNCHER, process_rank, step_rank
from zclip_jax.replay.readers._tokens import Token

# Spaces; a bar; a run of what numbers are written with, of which the number proper is a part.
_RUN = r"(?:[-+.,]|\d|(?<=\d)e(?=[-+\d]))*\d(?:[-+.,\d]|(?<=\d)e(?=[-+\d]))*"
_VARYING = re.compile(rf"([ \t]+)|(?<=%)(\|[^|]*\|)|({_RUN}|(?<![a-z])(?:nan|inf)(?![a-y]))")
_SPACES, _BAR, _ANY = r"[ \t]++", r"\|[^|\r\n]*+\|", r"[-+.,\de]*+(?:nan|inf)?"
_NUMBER = r"([-+.\de]++|[-+]?(?:nan|inf))"
_WHOLE = re.compile(r"\d+", re.A)
_FLOAT = re.compile(r"[-+.\de]+|[-+]?(?:nan|inf)", re.A)


class Shape(NamedTuple):
    """What lines have in common.

    Args:
      match: matches such a line, its numbers that matter in groups.
      names: of these numbers.
      kind: of such rows.
      numbered: whether they say their step.
      drawn: whether they end in a return of the carriage.
    """

    match: Callable[[str], re.Match[str] | None]
    names: tuple[str, ...]
    kind: tuple[str, ...]
    numbered: bool
    drawn: bool


def learn(line: str, tokens: Iterable[Token], kind: tuple[str, ...]) -> Shape | None:
    """The shape of a line with these numbers; None if they are written in a way that patterns are not for."""
    tokens = sorted(tokens, key=lambda token: token.start)
    text = line.rstrip("\r\n")
    pattern, end = "", 0
    for token in tokens:
        number = token.text.partition("/")[0]
        if token.start < end or token.several or not _FLOAT.fullmatch(number):
            return None
        whole = (
            any(rank(token.name) is not None for rank in (step_rank, process_rank)) or token.name == LAUNCHER
        )
        if whole and not _WHOLE.fullmatch(number):
            return None
        pattern += _general(text[end : token.start]) + (r"(\d++)" if whole else _NUMBER)
        end = token.start + len(number)
    drawn = line.endswith("\r")
    match = re.compile(pattern + _general(text[end:]) + (r"\r" if drawn else r"\r?\n"), re.A).fullmatch
    found = match(line)
    if not found or list(found.groups()) != [token.text.partition("/")[0] for token in tokens]:
        return None
    names = tuple(token.name for token in tokens)
    return Shape(match, names, kind, any(step_rank(name) is not None for name in names), drawn)


def _general(text: str) -> str:
    pieces, end = [], 0
    for varying in _VARYING.finditer(text):
        pattern = _SPACES if varying[1] else _BAR if varying[2] else _ANY
        pieces += [re.escape(text[end : varying.start()]), pattern]
        end = varying.end()
    return "".join(pieces) + re.escape(text[end:])
