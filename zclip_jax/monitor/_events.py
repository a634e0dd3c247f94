"""TensorBoard's event files: records of protocol buffers, framed with checksums.

The few messages that scalars need are encoded here. tensorboardX queues them for a thread of its own, and once that
has died of a full disk, whoever logs waits forever.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

START = b"\x3a\x02\x08\x01"  # the field session_log = 7 with status = 1, which is START


class EventFile:
    """Appends events to a new file, which sorts behind those that are in the folder already."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(name[3]) for name in _event_files(folder) if name[3].isdigit()]
        number = max(int(time.time()), *(n + 1 for n in numbers), 0)
        path = folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}"
        self._file = path.open("xb", buffering=0)
        try:
            self.write(_version())
        except BaseException:
            self._file.close()
            path.unlink()
            raise

    def write(self, *events: bytes) -> None:
        """Writes whole records, or none of them and raises."""
        data, written = b"".join(map(_record, events)), 0
        size = self._file.tell()
        try:
            while written < len(data):  # a disk that fills up takes a part, and then raises
                written += self._file.write(data[written:]) or 0
        except BaseException:
            # Readers stop at half a record.
            self._file.truncate(size)
            self._file.seek(size)
            raise

    @property
    def deleted(self) -> bool:
        return os.fstat(self._file.fileno()).st_nlink == 0

    def close(self) -> None:
        self._file.close()


def has_events(folder: Path) -> bool:
    """Whether a folder holds event files."""
    return bool(_event_files(folder))


def scalars(step: int, values: Mapping[str, int | float]) -> bytes:
    """An event with the scalars of a step, as float32."""
    summary = b"".join(
        _field(1, _field(1, name.encode()) + b"\x15" + _float(x)) for name, x in values.items()
    )
    return _event(step, _field(5, summary))


def start(step: int) -> bytes:
    """An event that makes readers drop what was logged before of this step and later ones."""
    return _event(step, START)


def _version() -> bytes:
    return _event(0, _field(3, b"brain.Event:2"))


def _event(step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    number &= 2**64 - 1  # negative ones as two's complement
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def _float(x: int | float) -> bytes:
    try:
        return struct.pack("<f", x)
    except OverflowError:  # beyond float32
        return struct.pack("<f", float("inf") if x > 0 else float("-inf"))


def _event_files(folder: Path) -> list[list[str]]:
    if not folder.exists():
        return []
    return [name.split(".") for name in os.listdir(folder) if name.startswith("events.out.tfevents.")]


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_table() -> list[int]:
    """Of CRC-32C, whose polynomial is 0x1EDC6F41, here with its bits in reverse."""
    table = list(range(256))
    for _ in range(8):
        table = [x >> 1 ^ 0x82F63B78 * (x & 1) for x in table]
    return table


CRC_TABLE = _crc_table()
