"""What must hold of a wheel installed alone: `make dist` runs this outside the clone, with that environment's Python.

    python -I tests/installed_wheel.py

It needs nothing but the wheel and its dependencies: no pytest, and no extra.
"""

import doctest
import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def check_files():
    """The wheel is the package, its types and its metadata, and nothing beside."""
    files = [str(path) for path in importlib.metadata.files("zclip-jax") or ()]
    installed = [path for path in files if not path.startswith("..") and "__pycache__" not in path]
    assert "zclip_jax/py.typed" in installed, installed
    strangers = [path for path in installed if not path.startswith(("zclip_jax/", "zclip_jax-"))]
    assert not strangers, strangers
    tracked = {str(path.relative_to(CLONE)) for path in CLONE.glob("zclip_jax/**/*.py")}
    assert {path for path in installed if path.endswith(".py")} == tracked, "the wheel is not of this clone"


def check_metadata():
    import zclip_jax

    assert CLONE not in Path(zclip_jax.__file__).resolve().parents, zclip_jax.__file__
    version = importlib.metadata.version("zclip-jax")
    assert zclip_jax.__version__ == version, (zclip_jax.__version__, version)
    changes = (CLONE / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {version}" in changes, f"CHANGELOG.md has no entry for {version}"
    citation = (CLONE / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation, f"CITATION.cff is not of version {version}"


def run_doctests():
    """Of the core: the parts above it need the extra `replay` to run, but not to be imported."""
    import zclip_jax

    run = modules = 0
    for found in pkgutil.walk_packages(zclip_jax.__path__, "zclip_jax."):
        module = importlib.import_module(found.name)
        part = found.name.split(".")[1]
        if part.startswith("_") or part == "rules":
            failed, attempted = doctest.testmod(module, optionflags=FLAGS)
            assert not failed, found.name
            run, modules = run + attempted, modules + bool(attempted)
    assert run > 50, run
    return f"{run} examples in {modules} modules"


def check_command():
    command = Path(sys.executable).with_name("zclip-jax")
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "replay" in shown, shown


def main():
    check_files()
    check_metadata()
    check_command()
    done = run_doctests()
    print(f"zclip-jax {importlib.metadata.version('zclip-jax')} on Python {sys.version.split()[0]}: {done}")


if __name__ == "__main__":
    main()
