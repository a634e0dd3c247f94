"""The rows of a text log: which names and numbers belong together, also over several lines."""

import re
from collections.abc import Sequence

from zclip_jax.replay.readers._columns import Columns
from zclip_jax.replay.readers._lines import find_process
from zclip_jax.replay.readers._names import (
    ABOVE,
    COUNTER,
    LAUNCHER,
    epoch_rank,
    is_clipped,
    norm_rank,
    process_rank,
    step_rank,
)
from zclip_jax.replay.readers._notes import shorten
from zclip_jax.replay.readers._shapes import Shape, learn
from zclip_jax.replay.readers._tail import ENDS, Tail
from zclip_jax.replay.readers._tokens import Token, find_literal, find_unread, tokens_of

MOST_SHAPES = 4
MOST_OPEN = 60  # lines of a dict


class Rows:
    """Finds the rows in lines.

    Args:
      column: the name of the norm; None for the one that fits best.
    """

    def __init__(self, column: str | None) -> None:
        self.columns = Columns(column, unit="line")
        self.tail = Tail()
        self._find = find_literal(column) if column else None
        # What is in each line with a norm, in lower case.
        self._cue = "norm" if column is None else re.split(r"[/.]", column)[0].lower() or column.lower()
        self._shapes: list[Shape] = []
        self._num_read, self._learn_at = 0, 2
        self._open: list[str] = []  # lines of a dict that isn't closed yet
        self._epoch = ""  # of the rows to come, if a line says so
        self._cut: list[str] = []

    def take_block(self, shape: Shape, block: Sequence[Sequence[str]]) -> None:
        """Takes the numbers of lines of one shape."""
        names = shape.names
        if self._epoch and not any(epoch_rank(name) is not None for name in names):
            names = (*names, ABOVE + "epoch")
            block = [(*row, self._epoch) for row in block]
        if shape.drawn:
            self.columns.drawn.extend(range(self.columns.num_rows, self.columns.num_rows + len(block)))
        self.columns.extend(names, block, shape.kind)

    def take(self, line: str, shape: Shape | None) -> Shape | None:
        """Takes a line that is unlike the one before; returns the shape to expect next."""
        if self._open or ("{" in line and line.count("{") > line.count("}")):
            return self._take_part(line, shape)
        if self._cue not in line.lower():
            self._pass_over(line)
            return shape
        for other in self._shapes:
            if (other.numbered or not self.tail.lines) and (found := other.match(line)):
                self.take_block(other, [found.groups()])
                self.tail.begin(line)
                return other
        return self._take_whole(line) or shape

    def close(self) -> None:
        """Takes what is left of a dict that isn't closed."""
        for part in self._open:
            self._take_whole(part)
        self._open = []

    def notes(self, last: str) -> list[str]:
        """What is odd about the text, whose last line is given."""
        matter = [
            token
            for token in tokens_of(self.tail.row.rstrip("\r\n"))[0]
            if self.columns[token.name] is not None and process_rank(token.name) is None
        ]
        cut = "" if self._cut else self.tail.cut_line(last, matter)
        if cut:
            return [f"the last line is cut off or runs into other text: {shorten(cut[-60:])!r}"]
        return self._cut

    def _take_part(self, line: str, shape: Shape | None) -> Shape | None:
        """Takes a line of a dict that is written over several."""
        self._open.append(line)
        whole = " ".join(part.strip() for part in self._open)
        is_open = whole.count("{") > whole.count("}")
        if is_open and len(self._open) < MOST_OPEN:
            return shape
        if is_open:
            self.close()
            return shape
        self._open = []
        return self._take_whole(whole + line[len(line.rstrip("\r\n")) :]) or shape

    def _take_whole(self, line: str) -> Shape | None:
        """Takes a line by its names and numbers; returns the shape that was learned from it, if one was."""
        tokens, phrases = self._tokens(line) if self._cue in line.lower() else ([], ())
        if not any(self._is_norm(token.name) for token in tokens):
            self._pass_over(line)
            return None
        row = self.columns.num_rows
        for token in [*tokens, *self._above(tokens)]:
            column = self.columns[token.name]
            if column is None:
                continue
            column.append(row, token.text)
            if token.several:
                column.note_several(token.several)
        self.columns.end_row(phrases)
        if line.endswith("\r"):
            self.columns.drawn.append(row)
        self.tail.compare(line, any(step_rank(token.name) is not None for token in tokens))
        self.tail.begin(line)
        return self._learn(line, tokens, phrases)

    def _learn(self, line: str, tokens: list[Token], phrases: tuple[str, ...]) -> Shape | None:
        """Learns a shape from a few of the lines, ever fewer, since where lines vary none will fit."""
        self._num_read += 1
        if self._num_read < self._learn_at or not line.endswith(ENDS):
            return None
        self._learn_at = self._num_read + max(1, self._num_read // 4)
        matter = [token for token in tokens if self.columns[token.name] is not None]
        shape = learn(line, matter, phrases)
        if shape:
            self._shapes = [shape, *self._shapes[: MOST_SHAPES - 1]]
        return shape

    def _pass_over(self, line: str) -> None:
        """A line without a norm, which may say the step or epoch of the rows below."""
        if line.strip():
            self.tail.lines.append(line)
        if "poch" in line:
            tokens, _ = tokens_of(line.rstrip("\r\n"))
            found = [token for token in tokens if epoch_rank(token.name) is not None]
            self._epoch = found[0].text.partition("/")[0] if found else self._epoch

    def _tokens(self, line: str) -> tuple[list[Token], tuple[str, ...]]:
        """The numbers of a line, without those that may be cut off."""
        text = line.rstrip("\r\n")
        tokens, phrases = tokens_of(text)
        if self._find and (found := self._find(text)):
            tokens = [token for token in tokens if token.start != found.start and token.name != found.name]
            tokens.append(found)
        if not self._find and not any(self._is_norm(token.name) for token in tokens):
            unread = find_unread(text)
            if unread and unread.text[0] == "{" and "}" not in text[unread.start :]:
                self._cut.append(f"a line is cut off or runs into other text: {shorten(text[-60:])!r}")
                return [], phrases
            tokens += [unread] if unread else []
        if text == line:
            for token in [token for token in tokens if token.start + len(token.text) == len(text)]:
                tokens.remove(token)
                what = "norm" if self._is_norm(token.name) else token.name
                self._cut.append(
                    f"the last line has no line end, so its {what} {token.text} may be cut off and is left out"
                )
        return tokens, phrases

    def _is_norm(self, name: str) -> bool:
        if self.columns.wanted is not None:
            return self.columns.is_wanted(name)
        return norm_rank(name) is not None or is_clipped(name)

    def _above(self, tokens: list[Token]) -> list[Token]:
        """The step, epoch and process that lines above tell, where the row itself doesn't."""
        above = []
        if not any(step_rank(token.name) is not None for token in tokens):
            for line in reversed(self.tail.lines):
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
        # A bar that is drawn over keeps what a launcher has put before it for what comes behind.
        bar = self.tail.lines[-1] if self.tail.lines and self.tail.lines[-1].endswith("\r") else ""
        if (process := find_process(bar)) and not any(token.name == LAUNCHER for token in tokens):
            above.append(Token(LAUNCHER, bar[slice(*process)], 0))
        if self._epoch and not any(epoch_rank(token.name) is not None for token in tokens):
            above.append(Token(ABOVE + "epoch", self._epoch, 0))
        return above
