"""Flags: from the command line, from a file, and compared with those of an earlier run."""

import contextlib
import dataclasses
import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import tyro
import yaml  # pyrefly: ignore[untyped-import]

Flags = dict[str, Any]  # by name


def to_flags(config: Any) -> Flags:
    """A config and its groups as one mapping, without what only concerns one call."""
    flags = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("config", "fresh", "hosts"):
            continue
        if dataclasses.is_dataclass(value):
            flags |= to_flags(value)
        else:
            flags[field.name] = list(value) if isinstance(value, tuple) else value
    return flags


def parse_flags(default: Any, argv: list[str], description: str | None) -> Any:
    """`default` with the flags of the file that --config names, then those of the command line.

    Raises:
        ValueError: a flag is unknown or its value is wrong; one line.
    """
    cli = functools.partial(_parse, description=description)
    path = cli(argv, default).config
    if path is None:
        return cli(argv, default)
    try:
        file_args = _file_args(Path(path), to_flags(default))
        return cli(argv, cli(file_args, default))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_known(default: Any, argv: list[str]) -> Any:
    """`default` with those of its flags that are among the arguments; ValueError on a wrong value."""
    others_told = [arg for arg in argv if arg not in ("-h", "--help")]
    return _parse(others_told, default, None, return_unknown_args=True)[0]


def _parse(args: list[str], default: Any, description: str | None, **options: Any) -> Any:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                type(default),
                args=args,
                default=default,
                prog="train.py",
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
                **options,
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        # Out of the box that tyro draws, what it says before it explains the flag again.
        told = re.sub(r"\x1b\[[0-9;]*m", "", errors.getvalue())  # colours
        told = re.sub(r"[│╭╮╰╯]|─+ .*? ─+", " ", told)
        told = re.sub(r"Error parsing (?!--)\w+:", "", told)  # the name of a group of flags
        raise ValueError(" ".join(told.split("──")[0].split("Got errors")[0].split())) from None


def _file_args(path: Path, known: Flags) -> list[str]:
    """A file as arguments, so that its values are checked as those of the command line are."""
    text = path.read_text(encoding="utf-8")
    try:
        flags = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(flags, dict):
        raise ValueError("no mapping of flags to values")
    args = []
    for name, value in flags.items():
        if isinstance(value, bool) and isinstance(known.get(name), bool):
            args.append(f"--{name}" if value else f"--no-{name}")
        else:
            args += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return args


def check_same_run(saved: Flags, config: Flags, free: set[str], run_dir: str) -> None:
    """Raises ValueError where a flag that is not `free` is not as it was saved."""
    for name, value in config.items():
        if name not in free and saved.get(name) != value:
            raise ValueError(
                f"{run_dir} holds a run with {name}={saved.get(name)!r}, not {value!r}: "
                "give another --run-dir, or --fresh to delete that run"
            )
