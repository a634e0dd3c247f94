"""The lines of a log: encodings, compression, colours, and what launchers put before them."""

import codecs
import gzip
import io
import re
from pathlib import Path

_COLOUR = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>A-Z78])")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# What a launcher puts at the start of each line to say which process it is of.
_LAUNCHERS = re.compile(
    r"\s*(?:"
    r"\[[A-Za-z_]+(\d+)\]:"  # torchrun: [default0]:
    r"|\[[^\]\s]*?(\d+,\d+)\]<std\w+>:"  # mpirun: [1,0]<stdout>:
    r"|\((?:[\w.]+(?:\(\w*\))? )?pid=(\d+[^()]*)\)"  # Ray: (Worker pid=1, ip=10.0.0.1)
    r"|\[pod/([^\]\s]+)\]"  # kubectl: [pod/trainer-0/main]
    r"|(\d{1,6}):(?=\s)"  # srun --label: 0:
    r"|((?!step|epoch|iter)[A-Za-z][\w.-]*?-?\d+):(?=\s)"  # pdsh: worker-0:
    r"|((?!step|epoch|iter)[A-Za-z][\w.-]*?-?\d+)\s+\|(?=\s)"  # docker compose: trainer-0  |
    r")"
)
_RANK = re.compile(
    r"(?i)(?:^\s*|[\[(<]\s*)(?:(?:local|global|world|node|dp)[_ -]?)?"
    r"(?:rank|worker|process|proc|gpu|host)[ _#:=-]?\s?(\d+)(?:/\d+)?(?=\s*[\])>:|]|\s)"
)
RANK_WITHIN = 120  # characters: behind them it is text


def open_text(path: Path) -> io.TextIOWrapper:
    """Opens text in whatever encoding, gzipped or not, with the ends of its lines as they are."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    opener = gzip.open if packed else open
    with opener(path, "rb") as file:
        start = file.read(256)
    # A progress bar returns the carriage, and a line cut off has no end.
    return opener(path, "rt", encoding=_encoding(start), errors="replace", newline="")


def _encoding(start: bytes) -> str:
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return encoding
    pairs = len(start) // 2
    if pairs > 3 and not any(start[: 2 * pairs : 2]) and all(start[1 : 2 * pairs : 2]):
        return "utf-16-be"
    if pairs > 3 and not any(start[1 : 2 * pairs : 2]) and all(start[: 2 * pairs : 2]):
        return "utf-16-le"
    return "utf-8"


def without_colours(line: str) -> str:
    """The line without what colours it or moves the cursor."""
    return _COLOUR.sub("", line) if "\x1b" in line else line


def find_process(line: str) -> tuple[int, int] | None:
    """From where to where the line says which process it is of; None if it doesn't."""
    launcher = _LAUNCHERS.match(line)
    if launcher:
        return launcher.span(launcher.lastindex or 0)
    if "r" not in line[:RANK_WITHIN].lower():
        return None
    rank = _RANK.search(line, 0, RANK_WITHIN)
    return rank.span(1) if rank else None
