"""What a line of text says: names, and the numbers behind them."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from zclip_jax.replay.readers._lines import find_process
from zclip_jax.replay.readers._names import (
    COUNTER,
    LAUNCHER,
    OTHER,
    epoch_rank,
    is_clipped,
    listed,
    loss_rank,
    norm_rank,
    process_rank,
    step_rank,
    words_of,
)
from zclip_jax.replay.readers._numbers import WRAPPER, is_function, parse_number

_NO_WORD = r"(?!(?:nan|inf|infinity|none|null|true|false)(?![\w/.-]))"
_WORD = rf"(?i:{_NO_WORD})[A-Za-z_][\w/.\-]*+"
_CALL = r"(?<!norm)(?<!loss)(?<!step)\("  # behind a word that is no name: "grad_norm tensor(0.4)"
_NAME = rf"(?<![\w/.\-])({_WORD}(?: {_WORD}(?!{_CALL})){{0,5}}+)"
_ASIDE = r"( ?[(\[](?!(?i:nan|inf(?:inity)?)[)\]])[A-Za-z][\w /.%-]*[)\]])?"  # "grad norm (pre-clip): 5"
_BETWEEN = r"""["']?(?:\s*+(?:[:=]=?|->|=>)\s*+|\s++)[\s"'\[(]*+|["'\[(]++[\s:="'\[(]*+"""
# From a first digit to where no number can go on; a comma or an apostrophe is in it if a digit follows.
_NUMBER = (
    r"""[-+\u2212]?(?:\d|\.\d|(?i:nan|inf(?:inity)?)(?![A-Za-z_]))"""
    r"""(?:[^\s|;,()\]}"'<>=→-]|[,'](?=\d)|[\u00a0\u2009\u202f](?=\d{3})|-(?!>))*+"""
)
_PAIR = re.compile(rf"{_NAME}{_ASIDE}(?:{_BETWEEN})(?:({WRAPPER}{{1,4}}+))?({_NUMBER})")
_UNREAD = re.compile(rf"""{_NAME}{_ASIDE}["']?\s*[:=]\s*["']?([^\s|,;"']+)""")
_DICT = re.compile(rf"""{_NAME}["']?\s*[:=]\s*\{{([^{{}}]*)\}}""")
_PART = re.compile(rf"""["']?([\w./-]+)["']?\s*[:=]\s*["']?(?:{WRAPPER}{{1,4}}+)?({_NUMBER})""")
_COUNTER = re.compile(r"(?<![\w/.,])(\d+)/\d+ \[|\[\s*(\d+)/\d+(?=[\s\](])")
# A second number, and what follows it: an end, another number, or a word, which may be its unit or the next name.
_MORE = re.compile(
    rf"\s*+(?:(?:,|->|=>|→|±|\+/-|\+-|/|;)\s*+)?({_NUMBER})"
    rf"(?=(\s*$|\s*[,;|\])(\[]|\s+[-+]?[\d.]|\s*(?:->|→))|\s+([^\s:=]+)\s*([:=\d])?)"
)
_APART = re.compile(r"\s*(?:[eE][-+]\d+|[x*\u00b7\u00d7]\s*10\b)")  # "1.2 e-3" is no 1.2
_LIST = re.compile(rf"\s*,\s*{_NUMBER}")
# Words before a name that leave it what it is.
_NEUTRAL = listed(
    "the a an of its is was are and with my our this that info debug warning error root main train training trainer"
    " total global final current curr overall new last now then done finished has had got computed step steps"
    " iteration results metrics stats log logger value model"
)
_UNITS = listed("ms s sec secs seconds min h gb mb gib mib tokens tok samples it steps % mfu tflops")
_AFTER = listed("is was of at value equals")
_NOT_STEPS = OTHER | listed("total warmup warm every per save log logging accumulation accum skipped nan")


class Token(NamedTuple):
    """A number in a line.

    Args:
      name: what it is called.
      text: the number, as it is written.
      start: where it begins in the line.
      several: what follows, if more numbers do.
    """

    name: str
    text: str
    start: int
    several: str = ""


def tokens_of(line: str) -> tuple[list[Token], tuple[str, ...]]:
    """The numbers in a line that have a name, the first of each name, and all phrases before numbers."""
    found: dict[str, Token] = {}
    phrases = []
    if "{" in line:
        line = _take_dicts(line, found)
    for match in _PAIR.finditer(line):
        phrase, aside, wrapper, text = match.groups()
        phrases.append(phrase)
        if wrapper and is_function(wrapper):
            continue
        name = name_of(phrase + (aside or ""))
        if name in found:
            continue
        start, several = match.start(4), ""
        if norm_rank(name) is not None or is_clipped(name):
            several = _several(line, match.end(), wrapper or line[match.end(1) : match.start(4)], text)
            text = text.partition("/")[0] if several else text
        if apart := _APART.match(line, match.end()):
            text += apart[0]
        if text[-1] in ".:/" and parse_number(text) is None:
            text = text.rstrip(".:/")
        found[name] = Token(name, text, start, several)
    if COUNTER not in found and "/" in line:
        *_, counter = [None, *_COUNTER.finditer(line)]
        if counter:
            place = counter.lastindex or 1
            epochs = [token.start for token in found.values() if epoch_rank(token.name) is not None]
            if counter.start(place) not in epochs:
                found[COUNTER] = Token(COUNTER, counter[place], counter.start(place))
    process = find_process(line)
    if process:
        found[LAUNCHER] = Token(LAUNCHER, line[slice(*process)], process[0])
    return list(found.values()), tuple(phrases)


def find_unread(line: str) -> Token | None:
    """The norm of a line, if what stands there is no number."""
    for match in _UNREAD.finditer(line):
        name = name_of(match[1] + (match[2] or ""))
        if norm_rank(name) is not None:
            return Token(name, match[3], match.start(3))
    return None


def find_literal(name: str) -> Callable[[str], Token | None]:
    """Finds the number behind a name that was asked for, whatever it looks like."""
    search = re.compile(
        rf"""(?<![\w/.-]){re.escape(name)}((?:{_BETWEEN})(?:{WRAPPER}{{1,4}}+)?)({_NUMBER})"""
    ).search

    def find(line: str) -> Token | None:
        match = search(line)
        if match is None:
            return None
        several = _several(line, match.end(), match[1], match[2])
        return Token(name, match[2].partition("/")[0] if several else match[2], match.start(2), several)

    return find


def _take_dicts(line: str, found: dict[str, Token]) -> str:
    """Finds the parts of norms that are dicts, as in "grad_norm={'0_default': 0.4}", and blanks them in the line."""
    for match in _DICT.finditer(line):
        name = name_of(match[1])
        if norm_rank(name) is None:
            continue
        for part in _PART.finditer(match[2]):
            token = Token(f"{name}/{part[1]}", part[2], match.start(2) + part.start(2))
            found.setdefault(token.name, token)
        line = line[: match.start(2)] + " " * len(match[2]) + line[match.end(2) :]
    return line


def _several(line: str, end: int, before: str, text: str) -> str:
    """The numbers that follow a number without a name of their own, and itself."""
    if parse_number(text) is None and re.fullmatch(r"[-+\d.eE]+(?:/[-+\d.eE]+)+", text):
        return text
    more = _LIST.match(line, end) if before.rstrip("\"'")[-1:] in ("[", "(") else None
    if more is None:
        more = _MORE.match(line, end)
        if more is None or parse_number(more[1]) is None:
            return ""
        if more[2] is None and (not more[4] or "/" in more[3] or more[3].lower() in _UNITS):
            return ""
        if line[end:].lstrip()[:1] == "|":
            return ""
    return line[end - len(text) : more.end()].strip()


@functools.lru_cache(4096)
def name_of(phrase: str) -> str:
    """The name in the words before a number: the shortest that is still the same quantity."""
    words = phrase.split(" ")
    while len(words) > 1 and words[-1].lower() in _AFTER:
        words.pop()
    last = words[-1]
    has_norm = [place for place, word in enumerate(words) if "norm" in word.lower()]
    if has_norm and step_rank(last) is None and loss_rank(last) is None and epoch_rank(last) is None:
        return _name_of_norm(words, has_norm[0])
    before = words[-2].lower() if len(words) > 1 else ""
    two = f"{words[-2]} {last}" if before else last
    if step_rank(last) is not None or epoch_rank(last) is not None:
        if step_rank(two) is not None:
            return two
        return last if _NOT_STEPS.keys().isdisjoint(word.lower() for word in words[:-1]) else phrase
    if loss_rank(two) is not None:
        return two
    if loss_rank(last) is not None or process_rank(last) is not None:
        return last if not before or before in _NEUTRAL else two
    return last if before not in OTHER else two


def _name_of_norm(words: list[str], place: int) -> str:
    """From the words that say which norm it is to the end."""
    first = place
    if first and re.fullmatch(r"(?i)g|grads?|gradients?|gradient's", words[first - 1]):
        first -= 1
    name = " ".join(words[first:])
    while first and (word := words[first - 1].lower()) not in _NEUTRAL and not word.endswith((".", ":")):
        first -= 1
        name = " ".join(words[first:])
    if first == place and words_of(name) == "norm" and place:
        return words[place]
    return name
