"""Lines and tables on a terminal, or where the output is none."""

import sys
from collections.abc import Sequence

from zclip_jax._extras import require

WIDTH = 120  # where the output is no terminal


def _reraise() -> None:
    raise


class Printer:
    """Prints text as it is: names in a log may look like markup."""

    def __init__(self) -> None:
        console = require("rich.console", "replay", "the report")
        self._table, self._box = (
            require("rich.table", "replay", "the report"),
            require("rich.box", "replay", "the report"),
        )
        self._console = console.Console(
            width=None if sys.stdout.isatty() else WIDTH, highlight=False, emoji=False
        )
        self._console.on_broken_pipe = _reraise  # rich would exit with 1

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)

    def items(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.line(f"- {line}")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        text = require("rich.text", "replay", "the report").Text
        table = self._table.Table(box=self._box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(head):
            table.add_column(text(name), justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(text, row))
        self._console.print(table)
