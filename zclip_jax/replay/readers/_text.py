r"""Plain text: what trainers print, as in `step 5/100 | loss 3.1 | norm 0.27 (+0.10z)`."""

import re
from collections import deque
from collections.abc import Sequence
from io import TextIOWrapper

from zclip_jax.replay.readers._choice import LOOKED_FOR
from zclip_jax.replay.readers._columns import Columns
from zclip_jax.replay.readers._lines import without_colours
from zclip_jax.replay.readers._names import (
    ABOVE,
    COUNTER,
    epoch_rank,
    is_clipped,
    norm_rank,
    step_rank,
)
from zclip_jax.replay.readers._notes import count, listing, shorten
from zclip_jax.replay.readers._recording import Recording
from zclip_jax.replay.readers._series import make_recording
from zclip_jax.replay.readers._shapes import (
    Shape,
    is_begun,
    learn,
    runs_into_other_text,
    words_between,
)
from zclip_jax.replay.readers._tokens import Token, find_literal, find_unread, tokens_of

MOST_SHAPES = 4
MOST_FORMS = 100  # of rows, by their words
LINES_ABOVE = 100  # a step that is further above is of something else
MOST_OPEN = 60  # lines of a dict
BLOCK = 1 << 8  # rows that are converted at once: few enough to stay in the cache


def read_text(file: TextIOWrapper, column: str | None) -> Recording:
    """The rows of a text log that have a norm, and a step where the log numbers them."""
    rows = _Rows(column)
    block: list[Sequence[str]] = []
    shape: Shape | None = None
    match = _no_match
    line = ""
    for line in file:
        if "\x1b" in line:
            line = without_colours(line)
        found = match(line)
        if found and rows.since:  # where one may say the step
            if shape and shape.numbered:
                rows.since.clear()
            else:
                found = None
        if found:
            block.append(found.groups())
            rows.last = line
            if len(block) < BLOCK:
                continue
        if shape and block:
            rows.take_block(shape, block)
            block = []
        if not found:
            shape = rows.take(line, shape)
            match = shape.match if shape else _no_match
    if shape and block:
        rows.take_block(shape, block)
    rows.close()
    if not rows.columns.num_rows:
        file.seek(0)
        raise ValueError(_nothing(file, column))
    return make_recording(rows.columns, "text log", rows.notes(line))


def _no_match(_: str) -> None:
    return None


class _Rows:
    """Finds the rows in lines."""

    def __init__(self, column: str | None) -> None:
        self.columns = Columns(column, unit="line")
        self.find = find_literal(column) if column else None
        self.cue = "norm" if column is None else re.split(r"[/.]", column)[0].lower() or column.lower()
        self.shapes: list[Shape] = []
        self.num_read, self.learn_at = 0, 2
        self.since: deque[str] = deque(maxlen=LINES_ABOVE)  # lines since the last row
        self.last = self.last_odd = ""  # the last row, and the last that is unlike the rows before it
        self.forms: set[tuple[str, ...]] = set()
        self.words: set[str] = set()  # of these rows
        self.open: list[str] = []  # lines of a dict that isn't closed yet
        self.epoch = ""
        self.several: dict[str, list[str]] = {}
        self.cut: list[str] = []

    def take_block(self, shape: Shape, block: Sequence[Sequence[str]]) -> None:
        """Takes lines of one shape."""
        names = shape.names
        if self.epoch and not any(epoch_rank(name) is not None for name in names):
            names = (*names, ABOVE + "epoch")
            block = [(*row, self.epoch) for row in block]
        self.columns.extend(names, block, shape.kind)

    def take(self, line: str, shape: Shape | None) -> Shape | None:
        """Takes a line that is unlike the one before; returns the shape to expect next."""
        for other in self.shapes:
            if (other.numbered or not self.since) and (found := other.match(line)):
                self.take_block(other, [found.groups()])
                self._end(line)
                return other
        if self.open or line.count("{") > line.count("}"):
            self.open.append(line)
            whole = " ".join(part.strip() for part in self.open)
            if whole.count("{") > whole.count("}") and len(self.open) < MOST_OPEN:
                return shape
            parts, self.open = self.open, []
            if whole.count("{") > whole.count("}"):
                for part in parts:
                    self._take(part, shape)
                return shape
            line = whole + line[len(line.rstrip("\r\n")) :]
        return self._take(line, shape)

    def close(self) -> None:
        """Takes what is left of a dict that isn't closed."""
        for part in self.open:
            self._take(part, None)
        self.open = []

    def _take(self, line: str, shape: Shape | None) -> Shape | None:
        if self.cue not in line.lower():
            self._pass_over(line)
            return shape
        tokens, phrases = self._tokens(line)
        norms = [token for token in tokens if self._is_norm(token.name)]
        if not norms:
            self._pass_over(line)
            return shape
        row = self.columns.num_rows
        for token in [*tokens, *self._above(tokens)]:
            column = self.columns[token.name]
            if column is not None:
                column.append(row, token.text)
            if token.several:
                self.several.setdefault(token.name, []).append(token.several)
        self.columns.end_row(phrases)
        if line.endswith("\r"):
            self.columns.drawn.append(row)
        self._compare(line, any(step_rank(token.name) is not None for token in tokens))
        self._end(line)
        return self._learn(line, tokens, phrases) or shape

    def _compare(self, line: str, numbered: bool) -> None:
        """Remembers what a row looks like, and whether it is unlike all before, as if it ran into other text."""
        form = words_between(line)
        odd = form not in self.forms and len(self.forms) > 0
        if odd and line.endswith(("\n", "\r")):
            new = {word.strip(".,:;*") for word in form} - self.words
            odd = numbered and any(word.isalpha() and len(word) > 3 for word in new)
        self.last_odd = line if odd else ""
        if len(self.forms) < MOST_FORMS:
            self.forms.add(form)
            self.words.update(word.strip(".,:;*") for word in form)

    def _learn(self, line: str, tokens: list[Token], phrases: tuple[str, ...]) -> Shape | None:
        """Learns a shape from a few of the lines, ever fewer, since where lines vary none will fit."""
        self.num_read += 1
        if self.num_read < self.learn_at or not line.endswith("\n"):
            return None
        self.learn_at = self.num_read + max(1, self.num_read // 4)
        matter = [token for token in tokens if self.columns[token.name] is not None]
        shape = learn(line, matter, phrases)
        if shape:
            self.shapes = [shape, *self.shapes[: MOST_SHAPES - 1]]
        return shape

    def _end(self, line: str) -> None:
        self.last = line
        self.since.clear()

    def _pass_over(self, line: str) -> None:
        """A line without a norm, which may say the step or epoch of the rows below."""
        if line.strip():
            self.since.append(line)
        if "poch" in line:
            found = [
                token for token in tokens_of(line.rstrip("\r\n"))[0] if epoch_rank(token.name) is not None
            ]
            self.epoch = found[0].text.partition("/")[0] if found else self.epoch

    def _tokens(self, line: str) -> tuple[list[Token], tuple[str, ...]]:
        """The numbers of a line, without those that may be cut off."""
        text = line.rstrip("\r\n")
        tokens, phrases = tokens_of(text)
        if self.find and (found := self.find(text)):
            tokens = [token for token in tokens if token.start != found.start and token.name != found.name]
            tokens.append(found)
        if not self.find and not any(self._is_norm(token.name) for token in tokens):
            unread = find_unread(text)
            tokens += [unread] if unread else []
        if text == line:
            for token in [token for token in tokens if token.start + len(token.text) == len(text)]:
                tokens.remove(token)
                what = "norm" if self._is_norm(token.name) else token.name
                self.cut.append(
                    f"the last line has no line end, so its {what} {token.text} may be cut off and is left out"
                )
        return tokens, phrases

    def _is_norm(self, name: str) -> bool:
        if self.columns.wanted is not None:
            return self.columns.is_wanted(name)
        return norm_rank(name) is not None or is_clipped(name)

    def _above(self, tokens: list[Token]) -> list[Token]:
        """The step and epoch that lines above tell, where the row itself doesn't."""
        above = []
        if not any(step_rank(token.name) is not None for token in tokens):
            for line in reversed(self.since):
                if not any(word in line.lower() for word in ("step", "iter", "update")):
                    continue
                steps = [
                    token
                    for token in tokens_of(line.rstrip("\r\n"))[0]
                    if step_rank(token.name) is not None and token.name != COUNTER
                ]
                if steps:
                    above.append(steps[0]._replace(name=ABOVE + steps[0].name))
                    break
        if self.epoch and not any(epoch_rank(token.name) is not None for token in tokens):
            above.append(Token(ABOVE + "epoch", self.epoch, 0))
        return above

    def notes(self, line: str) -> list[str]:
        """What is odd about the text, whose last line is given."""
        notes = [*self.cut]
        for name, examples in self.several.items():
            lines = count(len(examples), "line has", "lines have")
            notes.append(
                f"{lines} several numbers after {name}, first {shorten(examples[0], 60)!r}; the first is read"
            )
        cut = self._cut_line(line)
        if cut and not self.cut:
            notes.append(f"the last line is cut off or runs into other text: {shorten(cut[-60:])!r}")
        return notes

    def _cut_line(self, line: str) -> str:
        """The line behind which the log breaks off, if it seems to."""
        if line is self.last:
            return line if self.last_odd is line else ""
        tokens = tokens_of(self.last.rstrip("\r\n"))[0]
        matter = [token for token in tokens if self.columns[token.name] is not None]
        for other in self.since:
            if runs_into_other_text(other, self.last, matter):
                return other
        return line if not line.endswith(("\n", "\r")) and is_begun(line, self.last) else ""


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
