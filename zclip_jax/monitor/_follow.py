"""`zclip-jax follow`: a run on a terminal, as it goes on."""

import signal
import time
from pathlib import Path
from typing import Any

from zclip_jax._extras import require
from zclip_jax.monitor._logs import OtherLog, RunLog, empty_run, open_log, read_run
from zclip_jax.monitor._run import Run
from zclip_jax.monitor._tail import ReplacedError
from zclip_jax.monitor._view import draw

INTERVAL = 1.0  # seconds between two looks
READING = 0.5  # seconds of reading between two looks


def follow(path: Path) -> None:
    """Shows a run until Ctrl-C, and leaves its last state; where the output is no terminal, shows it once.

    Raises:
      ImportError: rich isn't installed.
      OSError: the output is no terminal, and there is no such log.
      ValueError: likewise, and it holds no norms.
    """
    console = require("rich.console", "monitor", "the live view").Console(highlight=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        console.width = console.width if console.is_terminal else 120
        _show(console, read_run(path))
        return
    live, text = (
        require("rich.live", "monitor", "the live view").Live,
        require("rich.text", "monitor", "the live view").Text,
    )
    watcher = Watcher(path)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves the screen as it was, too
    try:
        with live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                more, start = watcher.look(), time.monotonic()
                width, height = console.size
                message = [text(line[:width], style="yellow") for line in watcher.message.splitlines()]
                body = draw(watcher.run, width, max(height - len(message), 1), ascii_only=_is_ascii(console))
                screen.update(text("\n").join([*message, body]), refresh=True)
                if not more:
                    time.sleep(max(INTERVAL, 10 * (time.monotonic() - start)))
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    _show(console, watcher.run)


class Watcher:
    """A run as it goes on, whatever becomes of its file.

    Attributes:
      run: as last read.
      message: what keeps it from being read; empty where nothing does.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.message = path, ""
        self.run = empty_run(path)
        self._log: RunLog | OtherLog | None = None

    def look(self) -> bool:
        """Reads what is new; True where there is more to read at once."""
        try:
            log = self._log = self._log or open_log(self.path)
            more = log.update(READING)
            self.run, self.message = log.run(), "reading …" if more else ""
            return more
        except ReplacedError:
            self._log, self.message = None, ""
            return True
        except FileNotFoundError:
            self.message = f"waiting for {self.path}"
            self._log = None
        except (OSError, ValueError) as error:
            self.message = f"waiting: {error}"
        return False


def _show(console: Any, run: Run) -> None:
    console.print(draw(run, console.width, ascii_only=_is_ascii(console)), soft_wrap=True)


def _is_ascii(console: Any) -> bool:
    return console.options.ascii_only
