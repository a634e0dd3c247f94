"""Shapes of lines: one pattern reads at once all lines that differ in their numbers alone."""

import re
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from zclip_jax.replay.readers._names import LAUNCHER, process_rank, step_rank
from zclip_jax.replay.readers._tokens import Token

# Spaces; a run of what numbers are written with, of which the number proper is a part.
_VARYING = re.compile(
    r"([ \t]+)|((?:[-+.,]|\d|(?<=\d)e(?=[-+\d]))*\d(?:[-+.,\d]|(?<=\d)e(?=[-+\d]))*|(?<![a-z])(?:nan|inf)(?![a-y]))"
)
_SPACES, _ANY = r"[ \t]++", r"[-+.,\de]*+(?:nan|inf)?"
_NUMBER = r"([-+.\de]++|[-+]?(?:nan|inf))"
_WHOLE = re.compile(r"\d+", re.A)
_FLOAT = re.compile(r"[-+.\de]+|[-+]?(?:nan|inf)", re.A)
_DRAWN = re.compile(
    r"(?i)[-+]?\d(?:[\d.,]*\d)?(e[-+]?\d+)?|[-+]?\b(nan|inf)(?![a-y])|[^ -~]+"
)  # numbers, and what bars are drawn with
_TROUBLE = re.compile(
    r"(?i)error|cancel|kill|abort|terminat|traceback|exception|fatal|signal|srun|slurm|exceed"
)


class Shape(NamedTuple):
    """What lines have in common.

    Args:
      match: matches such a line, its numbers that matter in groups.
      names: of these numbers.
      kind: of such rows.
      numbered: whether they say their step.
    """

    match: Callable[[str], re.Match[str] | None]
    names: tuple[str, ...]
    kind: Hashable
    numbered: bool


def learn(line: str, tokens: Iterable[Token], kind: Hashable) -> Shape | None:
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
    match = re.compile(pattern + _general(text[end:]) + r"\r?\n", re.A).fullmatch
    found = match(text + "\n")
    if not found or list(found.groups()) != [token.text.partition("/")[0] for token in tokens]:
        return None
    names = tuple(token.name for token in tokens)
    return Shape(match, names, kind, any(step_rank(name) is not None for name in names))


def _general(text: str) -> str:
    pieces, end = [], 0
    for varying in _VARYING.finditer(text):
        pieces += [re.escape(text[end : varying.start()]), _SPACES if varying[1] else _ANY]
        end = varying.end()
    return "".join(pieces) + re.escape(text[end:])


def words_between(line: str) -> tuple[str, ...]:
    """What a line says beside its numbers."""
    return tuple(_DRAWN.sub(" ", line).split())


def is_begun(line: str, row: str) -> bool:
    """Whether a line is the beginning of one like the row."""
    begun, whole = _masked(line), _masked(row)
    return bool(begun.strip()) and whole.startswith(begun) and len(begun) < len(whole)


def runs_into_other_text(line: str, row: str, tokens: Iterable[Token]) -> bool:
    """Whether a line begins like the row, to behind its first number that matters, and goes on as something else."""
    first = min((token.start + len(token.text.partition("/")[0]) for token in tokens), default=len(row))
    begun, whole = _masked(line), _masked(row)
    behind = len(_masked(row[:first]))
    shared = next(
        (i for i, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), min(len(begun), len(whole))
    )
    if shared < behind or shared == len(whole):
        return False
    return begun.count("#", behind, shared) > 0 or _TROUBLE.search(begun, shared) is not None


def _masked(text: str) -> str:
    return re.sub(r"\s+", " ", _DRAWN.sub("#", text.rstrip("\r\n")))
