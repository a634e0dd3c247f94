"""Makes states known to `flax.serialization`, without importing flax."""

import dataclasses
import sys
from typing import Any

import jax


def register_with_flax(state: Any) -> None:
    """Registers the dataclasses that make up `state`, where the program has imported flax.

    Flax turns states into msgpack (`to_bytes`, `from_bytes`) by their exact type, and would reject a
    dataclass that it was not told of.
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
        return dataclasses.replace(
            x,
            **{
                name: serialization.from_state_dict(getattr(x, name), saved[name], name=name)
                for name in names
            },
        )

    serialization.register_serialization_state(type(state), to_state_dict, from_state_dict, override=True)
    for name in names:
        register_with_flax(getattr(state, name))
