"""Lines of JSON, which has no word for numbers that are not finite: they are the strings "nan", "inf" and "-inf"."""

import json
import math
from collections.abc import Iterable
from typing import Any


def finite_json(value: Any) -> Any:
    """`value` with each float that JSON can't hold as a string, which `float` reads."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: finite_json(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(x) for x in value]
    return value


def parse_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Those lines that are JSON objects; others were cut off by a crash, or are none of ours."""
    parsed = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            parsed.append(value)
    return parsed
