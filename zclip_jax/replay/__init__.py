"""What a rule would have decided on recorded gradient norms."""

from zclip_jax.replay._candidates import Candidate
from zclip_jax.replay._recommend import Recommendation, recommend
from zclip_jax.replay._replay import Replay, replay, sweep
from zclip_jax.replay.readers import Recording, read

__all__ = ["Candidate", "Recommendation", "Recording", "Replay", "read", "recommend", "replay", "sweep"]
