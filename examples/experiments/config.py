"""Experiments: a YAML file each, and the runs that it asks for.

A value in the file may be a mapping of the budgets `toy`, `small` and `full`.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # pyrefly: ignore[untyped-import]

import zclip_jax
from examples.experiments.arms import parse_arm
from examples.llama.model import PRESETS, TYPE_NAMES

FOLDER = Path(__file__).parent
BUDGETS = ("toy", "small", "full")
FAULTS = ("none", "noise", "repeat", "shuffle", "ngram", "nan")
OPTIMIZERS = ("adamw", "lion", "sgd", "muon")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What defines a run, beside its arm and its seed. None is the preset's."""

    preset: str = "tiny"
    hidden_size: int | None = None
    ffn_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    context: int | None = None
    dtype: str | None = None
    norm_dtype: str | None = None
    qk_norm: bool = False
    tie_embeddings: bool = False
    data: str | None = None  # glob of text files; the source of Python's standard library unless given
    vocab_size: int | None = None  # bytes unless given
    batch: int = 8  # windows a step
    optimizer: str = "adamw"
    lr: float = 1e-2  # peak; falls to a tenth over the last 30 % of the steps
    warmup: int = 30  # steps over which it rises
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    z_loss: float = 0.0  # coefficient of the squared logarithm of the partition function
    update_rms: float | None = None  # largest root mean square of a tensor's update, before the rate
    loss_factor: float = 1.0  # the gradient's factor: batch * context for a sum over tokens
    loss_scale: float = 1.0  # of the backward pass, undone before clipping
    fault: str = "none"  # what bad batches are
    period: int = 0  # one batch of so many is bad, the middle one; 0 for none
    rows: int | None = None  # windows a step after the shift
    positions: int | None = None  # tokens of each window after the shift
    mix: bool = False  # the first half of the corpus before the shift, the second after it
    trunk: int = 0  # steps with a fixed clip of 1.0, shared by all arms of a seed, before those compared
    steps: int = 400  # steps compared; a shift comes after a quarter of them
    evals: int = 5  # measurements of the held-out loss, evenly over them

    def __post_init__(self) -> None:
        accepted = {
            "preset": tuple(PRESETS),
            "dtype": (None, *TYPE_NAMES),
            "norm_dtype": (None, *TYPE_NAMES),
            "fault": FAULTS,
            "optimizer": OPTIMIZERS,
        }
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in accepted:
                if value not in accepted[name]:
                    raise ValueError(f"{name}={value!r}: expected one of {accepted[name]}")
            elif "bool" in str(field.type):
                if not isinstance(value, bool):
                    raise ValueError(f"{name}={value!r}: expected true or false")
            elif (value is None and "None" in str(field.type)) or "str" in str(field.type):
                pass
            elif "int" in str(field.type) and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name}={value!r}: expected an integer")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name}={value!r}: expected a number >= 0 (in YAML, 1e-3 is 1.0e-3)")
        for name in ("batch", "steps", "evals"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected at least 1")


NAMES = [field.name for field in dataclasses.fields(Settings)]
# What the toy budget makes of every run.
TOY = {"hidden_size": 16, "ffn_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "context": 8}
TOY |= {"batch": 2, "steps": 8, "evals": 8}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run; `vary` holds the settings that its block varies."""

    experiment: str
    block: str
    cell: str
    arm: str
    seed: int
    vary: Mapping[str, Any]
    settings: Settings
    curve: bool = False  # whether a plot wants its loss step by step

    @property
    def key(self) -> str:
        """A hash of all that the result depends on but names of cells, the machine and the code."""
        arm = parse_arm(self.arm)
        parts = [dataclasses.asdict(self.settings), dataclasses.asdict(arm), self.seed, zclip_jax.__version__]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Experiment:
    name: str
    text: Mapping[str, str]  # title, question, compares, number
    runs: Sequence[Run]
    tables: Sequence[Mapping[str, Any]]
    plots: Sequence[Mapping[str, Any]]


TEXT = ("title", "question", "compares", "number")
FILE = {*TEXT, "base", "blocks", "tables", "plots"}
BLOCK = {"name", "seeds", "arms", "cells", "base", "vary"}


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(
    name: str, budget: str, overrides: Mapping[str, Any] | None = None, folder: Path = FOLDER
) -> Experiment:
    """Raises ValueError, one line, for what is wrong in the file."""
    path = folder / f"{name}.yaml"
    if not path.exists():
        raise ValueError(f"no experiment {name!r}: expected one of {', '.join(names())}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _experiment(name, content, budget, overrides or {})
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from None


def _experiment(name: str, content: Any, budget: str, overrides: Mapping[str, Any]) -> Experiment:
    if not isinstance(content, dict):
        raise ValueError("expected a mapping")
    _check_names("the file", content, FILE)
    for key in (*TEXT, "blocks"):
        if key not in content:
            raise ValueError(f"{key!r} is missing")
    runs: list[Run] = []
    for block in content["blocks"]:
        _check_names("a block", block, BLOCK)
        drawn = any(p["kind"] == "curves" and p["block"] == block["name"] for p in content.get("plots", []))
        found = _runs(name, content.get("base", {}), block, budget, overrides)
        runs += (dataclasses.replace(run, curve=drawn and run.seed == 0) for run in found)
    return Experiment(
        name=name,
        text={key: " ".join(content[key].split()) for key in TEXT},
        runs=runs,
        tables=content.get("tables", []),
        plots=content.get("plots", []),
    )


def _runs(
    name: str, base: Mapping[str, Any], block: Mapping[str, Any], budget: str, overrides: Mapping[str, Any]
) -> Iterator[Run]:
    where = f"block {block.get('name')!r}"
    for key in ("name", "seeds", "arms", "cells"):
        if key not in block:
            raise ValueError(f"{where}: {key!r} is missing")
    seeds = _pick(block["seeds"], budget)
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 0:
        raise ValueError(f"{where}: seeds={seeds!r}: expected an integer >= 0")
    arms, cells = _pick(block["arms"], budget), _pick(block["cells"], budget)
    vary = {key: _pick(value, budget) for key, value in block.get("vary", {}).items()}
    if budget == "toy":  # one cell, two arms
        arms, cells = arms[:2], dict(list(cells.items())[:1])
        vary = {key: value[:1] for key, value in vary.items()}
    for arm in arms:
        parse_arm(arm)
    for (cell, change), arm, seed in itertools.product(cells.items(), arms, range(seeds)):
        for values in itertools.product(*vary.values()):
            varied = dict(zip(vary, values, strict=True))
            merged = {**base, **block.get("base", {}), **(change or {}), **varied}
            _check_names(f"{where}, cell {cell!r}", merged, NAMES)
            merged = {key: _pick(value, budget) for key, value in merged.items()}
            if budget == "toy":
                merged |= TOY | {"trunk": min(merged.get("trunk", 0), 8)}
            try:
                settings = Settings(**merged | dict(overrides))
            except ValueError as error:
                raise ValueError(f"{where}, cell {cell!r}: {error}") from None
            yield Run(name, block["name"], cell, arm, seed, varied, settings)


def _check_names(where: str, given: Any, known: Any) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{where}: expected a mapping, got {given!r}")
    for key in given:
        if key not in known:
            raise ValueError(f"{where}: no {key!r}: expected one of {', '.join(sorted(known))}")


def _pick(value: Any, budget: str) -> Any:
    if not isinstance(value, dict) or not value or not set(value) <= set(BUDGETS):
        return value
    if budget not in value:
        raise ValueError(f"{value!r} says nothing for the budget {budget!r}")
    return value[budget]
