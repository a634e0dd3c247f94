"""Makes states known to `flax.serialization`, without importing flax."""

import contextlib
import dataclasses
import sys
from typing import Any

import jax


def register_with_flax(state: Any) -> None:
    """Registers the dataclasses that make up `state`, where the program has imported flax.

    Flax turns states into msgpack (`to_bytes`, `from_bytes`) by their exact type, and rejects a dataclass
    that it was not told of. Types that it knows already stay as they are.
    """
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is None:
        return
    if not dataclasses.is_dataclass(state):
        for child in jax.tree.leaves(state, is_leaf=dataclasses.is_dataclass):
            if dataclasses.is_dataclass(child):
                register_with_flax(child)
        return

    names = [field.name for field in dataclasses.fields(state)]

    def to_state_dict(x):
        return {name: serialization.to_state_dict(getattr(x, name)) for name in names}

    def from_state_dict(x, saved):
        present = {name for name in names if getattr(x, name) is not None}
        found = {name for name, value in saved.items() if value is not None}
        if present != found:
            raise ValueError(
                f"the saved state of {type(x).__name__} is of another chain or rule: it lacks "
                f"{sorted(present - found)} and has {sorted(found - present)} besides"
            )
        values = {
            name: serialization.from_state_dict(getattr(x, name), saved[name], name=name) for name in present
        }
        return dataclasses.replace(x, **values)

    with contextlib.suppress(ValueError):  # known already, from an earlier call or from its owner
        serialization.register_serialization_state(type(state), to_state_dict, from_state_dict)
    for name in names:
        register_with_flax(getattr(state, name))
