"""Reads the gradient norms of recorded runs, from whatever the trainer left behind."""

from zclip_jax.replay.readers._read import read
from zclip_jax.replay.readers._recording import Recording

__all__ = ["Recording", "read"]
