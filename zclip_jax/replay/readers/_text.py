r"""Plain text: what trainers print, as in `step 5/100 | loss 3.1 | norm 0.27 (+0.10z)`."""

from collections.abc import Sequence
from io import TextIOWrapper

from zclip_jax.replay.readers._choice import LOOKED_FOR
from zclip_jax.replay.readers._last_stage import make_recording
from zclip_jax.replay.readers._lines import without_colours
from zclip_jax.replay.readers._notes import listing, shorten
from zclip_jax.replay.readers._recording import Recording
from zclip_jax.replay.readers._rows import Rows
from zclip_jax.replay.readers._shapes import Shape
from zclip_jax.replay.readers._tokens import tokens_of

BLOCK = 1 << 8  # rows that are converted at once: few enough to stay in the cache


def read_text(file: TextIOWrapper, column: str | None) -> Recording:
    """The rows of a text log that have a norm, and a step where the log numbers them."""
    rows = Rows(column)
    tail, above = rows.tail, rows.tail.lines
    block: list[Sequence[str]] = []
    shape: Shape | None = None
    line = ""
    for line in file:
        if "\x1b" in line:
            line = without_colours(line)
        found = shape.match(line) if shape else None
        if found and above:  # where one may say the step
            if shape and shape.numbered:
                above.clear()
            else:
                found = None
        if found:
            block.append(found.groups())
            tail.row = line
            if len(block) < BLOCK:
                continue
        if shape and block:
            rows.take_block(shape, block)
            block = []
        if not found:
            shape = rows.take(line, shape)
    if shape and block:
        rows.take_block(shape, block)
    rows.close()
    if not rows.columns.num_rows:
        file.seek(0)
        raise ValueError(_nothing(file, column))
    return make_recording(rows.columns, "text log", rows.notes(line))


def _nothing(file: TextIOWrapper, column: str | None) -> str:
    """What a text without norms holds."""
    seen: dict[str, None] = {}
    example = ""
    for line in file:
        text = without_colours(line).rstrip("\r\n")
        tokens, _ = tokens_of(text)
        example = text if (tokens and not seen) or not example.strip() else example
        seen |= dict.fromkeys(token.name.strip() for token in tokens)
        if len(seen) >= 20:
            break
    what = "gradient norm" if column is None else f"number after {column!r}"
    found = f"found {listing(list(seen))}" if seen else "found no named numbers"
    return f"no {what} in this text: {found}, in lines like {shorten(example)!r};\n{LOOKED_FOR}"
