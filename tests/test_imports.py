"""Who may import whom, read off the syntax trees: arrows point one way, and the core stays light."""

import ast
from pathlib import Path

import zclip_jax
import zclip_jax.monitor
import zclip_jax.recovery
import zclip_jax.replay

ROOT = Path(zclip_jax.__file__).parent

# Each part of the package: the parts, and the outside packages beside the standard library, it may import.
ALLOWED = {
    "_typing": (set(), {"jax", "chex", "jaxtyping", "numpy"}),
    "_extras": (set(), set()),
    "_json": (set(), set()),
    "_numerics": (set(), {"jax", "numpy"}),
    "_checks": ({"_numerics"}, {"jax", "numpy"}),
    "_rule": ({"_typing", "_numerics"}, {"jax"}),
    "_norm": ({"_typing", "_numerics"}, {"jax", "numpy"}),
    "_groups": ({"_typing", "_norm"}, {"jax", "numpy"}),
    "_loss_scale": ({"_typing", "_norm"}, {"jax"}),
    "rules": ({"_typing", "_numerics", "_checks", "_rule", "rules"}, {"jax"}),
    "_flax": (set(), {"jax"}),
    "_state": ({"_typing", "_numerics", "_rule", "_flax"}, {"jax"}),
    "_frame": ({"_typing", "_numerics", "_rule", "_norm", "_groups", "_state"}, {"jax", "numpy"}),
    "_clip": ({"_typing", "_checks", "_rule", "_norm", "_groups", "_state", "_frame"}, {"jax", "optax"}),
    "_skip": (
        {"_typing", "_numerics", "_checks", "_rule", "_norm", "_groups", "_flax", "_state", "_frame"},
        {"jax", "optax"},
    ),
    "_history": ({"_typing", "_numerics"}, {"jax"}),
    "_watch_state": (
        {"_typing", "_numerics", "_rule", "_groups", "_flax", "_history"},
        {"jax", "numpy"},
    ),
    "_watch": (
        {
            "_typing",
            "_numerics",
            "_checks",
            "_rule",
            "_norm",
            "_groups",
            "_state",
            "_history",
            "_watch_state",
            "rules",
        },
        {"jax", "numpy", "optax"},
    ),
    "_spikes": ({"_typing", "_groups", "_metrics", "_watch_state"}, {"jax", "numpy"}),
    "_units": ({"_state", "_watch_state", "rules"}, {"jax", "numpy"}),
    "_transplant": ({"_typing", "_units"}, {"jax", "numpy"}),
    "_presets": ({"_checks", "_norm", "_groups", "_clip", "rules"}, {"optax"}),
    "_metrics": ({"_rule", "_state", "_skip", "_watch_state"}, {"jax"}),
    "_alarms": (set(), {"numpy"}),
    "_spike_score": (set(), {"numpy"}),
    # Packages of the extras come through `_extras`.
    "monitor": (
        {"_typing", "_norm", "_alarms", "_spikes", "_spike_score", "_extras", "_json", "replay", "monitor"},
        {"jax", "numpy"},
    ),
    "replay": (
        {"_typing", "_numerics", "_checks", "_rule", "_alarms", "_spike_score", "_extras", "rules", "replay"},
        {"jax", "numpy"},
    ),
    "recovery": ({"_checks", "_extras", "_json", "recovery"}, {"jax", "numpy"}),
    "cli": ({"replay", "monitor"}, {"jax", "numpy"}),
    "__init__": (
        {
            "_rule",
            "_clip",
            "_groups",
            "_loss_scale",
            "_metrics",
            "_presets",
            "_skip",
            "_spikes",
            "_state",
            "_transplant",
            "_watch",
            "_watch_state",
            "rules",
        },
        set(),
    ),
}
STANDARD = {
    "abc",
    "argparse",
    "array",
    "ast",
    "atexit",
    "bisect",
    "codecs",
    "collections",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "enum",
    "functools",
    "gzip",
    "html",
    "importlib",
    "inspect",
    "io",
    "itertools",
    "json",
    "logging",
    "math",
    "operator",
    "os",
    "pathlib",
    "queue",
    "re",
    "signal",
    "socket",
    "struct",
    "sys",
    "textwrap",
    "threading",
    "time",
    "types",
    "typing",
    "warnings",
    "zlib",
}


def part(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    """Dotted names of all modules that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "zclip_jax":
                yield from (f"zclip_jax.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_every_file_imports_only_what_it_may():
    files = sorted(ROOT.rglob("*.py"))
    assert {part(path) for path in files} == set(ALLOWED)
    for path in files:
        inside, outside = ALLOWED[part(path)]
        for name in imported(path):
            top, *rest = name.split(".")
            if top == "zclip_jax":
                assert rest[0] in inside, f"{part(path)} imports {name}"
            else:
                assert top in outside | STANDARD, f"{part(path)} imports {name}"


def test_all_is_sorted_and_complete():
    for module in (zclip_jax, zclip_jax.monitor, zclip_jax.recovery, zclip_jax.replay, zclip_jax.rules):
        names = module.__all__
        assert sorted(names) == list(names)
        assert all(hasattr(module, name) for name in names)
        assert all(getattr(module, name).__doc__ for name in names)
