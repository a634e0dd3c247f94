"""What a rule would have decided on recorded gradient norms."""

from zclip_jax.replay._replay import Replay, replay, sweep

__all__ = ["Replay", "replay", "sweep"]
