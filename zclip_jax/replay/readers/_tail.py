"""The last lines of a text log: whether the last row is cut off, or runs into other text."""

import re
from collections import deque
from collections.abc import Iterable

from zclip_jax.replay.readers._tokens import Token

MOST_FORMS = 100  # of rows, by their words
LINES = 100  # since the last row, that are remembered
ENDS = ("\n", "\r")
# Numbers, and what bars are drawn with.
_DRAWN = re.compile(r"(?i)[-+]?\d(?:[\d.,]*\d)?(e[-+]?\d+)?|[-+]?\b(nan|inf)(?![a-y])|[^ -~]+")
_TROUBLE = re.compile(
    r"(?i)error|cancel|kill|abort|terminat|traceback|exception|fatal|signal|srun|slurm|exceed"
)


class Tail:
    """Remembers the last row and the lines behind it."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LINES)
        self.row = self._odd = ""  # the last row, and the last that is unlike the rows before it
        self._forms: set[tuple[str, ...]] = set()
        self._words: set[str] = set()  # of these rows

    def compare(self, row: str, numbered: bool) -> None:
        """Remembers what a row looks like, and whether it is unlike all before, as if it ran into other text."""
        form = tuple(_DRAWN.sub(" ", row).split())
        words = {word.strip(".,:;*") for word in form}
        odd = form not in self._forms and len(self._forms) > 0
        if odd and row.endswith(ENDS):
            new = [word for word in words - self._words if word.isalpha() and len(word) > 3]
            odd = any(numbered or _TROUBLE.search(word) for word in new)
        self._odd = row if odd else ""
        if len(self._forms) < MOST_FORMS:
            self._forms.add(form)
            self._words |= words

    def begin(self, row: str) -> None:
        """Takes a row: what was behind the last one is behind it no more."""
        self.row = row
        self.lines.clear()

    def cut_line(self, last: str, tokens: Iterable[Token]) -> str:
        """The line behind which the log breaks off, if it seems to.

        Args:
          last: the last line of the log.
          tokens: the numbers that matter in the last row.
        """
        if last is self.row:
            return last if self._odd is last else ""
        begun = min((token.start + len(token.text.partition("/")[0]) for token in tokens), default=None)
        for line in self.lines:
            if begun is not None and _runs_into_other_text(line, self.row, begun):
                return line
        return last if not last.endswith(ENDS) and _is_begun(last, self.row) else ""


def _is_begun(line: str, row: str) -> bool:
    """Whether a line is the beginning of one like the row."""
    begun, whole = _masked(line), _masked(row)
    return bool(begun.strip()) and whole.startswith(begun) and len(begun) < len(whole)


def _runs_into_other_text(line: str, row: str, end: int) -> bool:
    """Whether a line begins like the row, up to the end of its first number, and goes on as something else."""
    begun, whole = _masked(line), _masked(row)
    behind = len(_masked(row[:end]))
    shared = next(
        (i for i, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), min(len(begun), len(whole))
    )
    if shared < behind or shared == len(whole):
        return False
    return begun.count("#", behind, shared) > 0 or _TROUBLE.search(begun, shared) is not None


def _masked(text: str) -> str:
    return re.sub(r"\s+", " ", _DRAWN.sub("#", text.rstrip("\r\n")))
