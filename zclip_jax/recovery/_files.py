"""What a checkpoint's folder must hold, and the small files that recovery adds to it."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from zclip_jax._extras import require
from zclip_jax.recovery._sums import crc

OURS = "zclip_jax"  # in Orbax's custom metadata of a checkpoint
FILES = "zclip_files.json"  # in a checkpoint: its files and their sizes


def damage_of(folder: Any) -> str | None:
    """What is wrong with a checkpoint, as far as can be seen without reading the arrays; None if nothing."""
    try:
        written, about, listed = _orbax(folder), about_of(folder), read_json(folder / FILES)
        handlers = written.get("item_handlers")
        missing = (
            [name for name in handlers if not (folder / name).exists()] if isinstance(handlers, dict) else []
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its metadata can't be read ({first_line(error)})"
    if "crc" in about and about["crc"] != crc({"metadata": about["metadata"], "sums": about["sums"]}):
        return "its metadata changed since it was saved"
    if missing:
        return f"it has no {missing[0]}"
    found = sizes(folder)
    for name, size in (listed or {}).items():
        if found.get(name) != size:
            return f"{name} has {found.get(name, 'no')} bytes instead of {size}"
    return None


def about_of(folder: Any) -> dict[str, Any]:
    """What `GoodCheckpoints.save` added to Orbax's metadata; nothing in a checkpoint that something else saved."""
    return (_orbax(folder).get("custom_metadata") or {}).get(OURS) or {"metadata": None, "sums": {}}


def _orbax(folder: Any) -> dict[str, Any]:
    return json.loads((folder / "_CHECKPOINT_METADATA").read_text())


def sizes(folder: Any) -> dict[str, int]:
    """Bytes of each of Orbax's files, by its path in the checkpoint; none in a bucket, where asking takes long."""
    root = Path(os.fspath(folder))  # of a bucket's path it makes one that does not exist
    files = (path for path in root.rglob("*") if not path.name.startswith("zclip_") and path.is_file())
    return {path.relative_to(root).as_posix(): path.stat().st_size for path in files}


def read_json(path: Any) -> Any:
    """What the file holds, or None where there is no file."""
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path: Any, value: Any) -> None:
    """Writes a file that is whole at any time: the old one or the new one."""
    beside = path.parent / (path.name + ".new")
    beside.write_text(json.dumps(value))
    beside.replace(path)


def try_to_write(path: Any, value: Any) -> bool:
    """Writes a file, or warns and returns False."""
    try:
        write_json(path, value)
    except OSError as error:
        warnings.warn(f"{path} could not be written: {first_line(error)}", stacklevel=3)
        return False
    return True


def of_the_disk(error: Exception) -> bool:
    """Whether the system refused to write, which TensorStore tells by an error of another type."""
    return isinstance(error, OSError) or "os_error_code" in str(error)


def first_line(error: Any) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def as_path(folder: Any) -> Any:
    """The folder as the kind of path that Orbax works with, on a disk or in a bucket."""
    name = os.fspath(folder)
    return require("etils.epath", "recovery", "checkpoints").Path(
        name if "://" in name else os.path.abspath(name)
    )
