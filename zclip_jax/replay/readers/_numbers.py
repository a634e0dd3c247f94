"""Numbers as trainers write them, each read whole or not at all."""

import re
from typing import NamedTuple

_EXPONENT = r"(?:e[-+]?\d+)?"
_PLAIN = re.compile(rf"[-+]?(?:\d+\.?\d*|\.\d+){_EXPONENT}|[-+]?(?:nan|inf(?:inity)?)", re.I | re.A)
# Groups of three: "12,345.6", "12_345", "12'345"; or "12.345,6", where points stand between groups.
_GROUPED = re.compile(
    rf"([-+]?\d{{1,3}})([,_'\u00a0\u2009\u202f])(\d{{3}}(?:\2\d{{3}})*)(\.\d*)?{_EXPONENT}", re.A
)
_POINTS_BETWEEN = re.compile(
    rf"[-+]?\d{{1,3}}(?:\.\d{{3}})+,\d+{_EXPONENT}|[-+]?\d{{1,3}}(?:\.\d{{3}}){{2,}}", re.A
)
_COMMA = re.compile(rf"[-+]?\d*,\d+{_EXPONENT}", re.I | re.A)
_SHORTENED = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))([kKMBGT])", re.A)
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_EXACT = re.compile(r"[-+]?\d+(?:\.\d*)?|[-+]?\.\d+", re.A)
# What libraries print around a number: "np.float64(0.4)", "Array(0.4, dtype=float32)", "tensor([0.4], device=0)".
WRAPPER = r"(?:[A-Za-z_][\w.]*+\(\s*(?:local_tensor=|value=)?[\s\['\"(]*|<tf\.[^<>]*numpy=)"
_WRAPPED = re.compile(
    rf"""[\s\['"(]*(?P<wrapper>{WRAPPER}{{0,4}}+)(?P<number>[^\s,()\[\]"'<>]+)(?P<rest>.*)""", re.S
)
_NAMED_ONLY = re.compile(r"""[\])'"\s>]*(?:,\s*(?:[A-Za-z_]\w*=.*)?[\])'">\s]*)?""", re.S)
# Calls that make another number of the one in their parentheses.
_FUNCTION = re.compile(
    r"\b(?:a?log(?:10|2|1p)?|ln|exp(?:m1)?|sqrt|square|min|max|mean|avg|std|var|sum|abs|clip|clamp)\(", re.I
)


class Number(NamedTuple):
    """A number that was read.

    Args:
      value: the number.
      rounded: whether it is written with fewer digits than a whole number of its size has, as "1.2e+5" or "12K".
      comma: whether a comma in it is for the decimals ("decimal") or may be for decimals and thousands ("either").
    """

    value: float
    rounded: bool = False
    comma: str = ""


def parse_number(text: str) -> Number | None:
    """The number that a text is, wrapped or not; None for all else."""
    text = text.strip().replace("\u2212", "-")
    if _PLAIN.fullmatch(text):
        return Number(float(text), _is_rounded(text))
    if found := _GROUPED.fullmatch(text):
        value = float(text.replace(found[2], ""))
        if found[2] != ",":
            return Number(value, _is_rounded(text))
        if found[1].lstrip("-+").startswith("0"):  # "0,271" has no thousands
            return (
                Number(float(text.replace(",", ".", 1)), False, "decimal") if text.count(",") == 1 else None
            )
        alone = text.count(",") == 1 and found[4] is None
        return Number(value, _is_rounded(text), "either" if alone else "")
    if _POINTS_BETWEEN.fullmatch(text):
        return Number(float(text.replace(".", "").replace(",", ".")), False, "decimal")
    if _COMMA.fullmatch(text):
        return Number(float(text.replace(",", ".")), False, "decimal")
    if found := _SHORTENED.fullmatch(text):
        return Number(float(found[1]) * _SUFFIXES[found[2].lower()], True)
    return _unwrapped(text)


def is_function(wrapper: str) -> bool:
    """Whether what stands around a number makes another number of it."""
    return _FUNCTION.search(wrapper) is not None


def _unwrapped(text: str) -> Number | None:
    found = _WRAPPED.fullmatch(text)
    if not found or found["number"] == text or is_function(found["wrapper"]):
        return None
    return parse_number(found["number"]) if _NAMED_ONLY.fullmatch(found["rest"]) else None


def _is_rounded(text: str) -> bool:
    """Whether a whole number of this size has digits that the text lacks."""
    mantissa, _, exponent = text.lower().partition("e")
    if not exponent or not _EXACT.fullmatch(mantissa):
        return False
    return int(exponent) > len(mantissa.partition(".")[2])
