"""Training-stability control for JAX: gradient clipping that adapts to the run.

tx = optax.chain(zclip(), optax.adamw(3e-4))
"""

from zclip_jax import rules
from zclip_jax._clip import ClipState, clip_by_rule, zclip
from zclip_jax._metrics import metrics
from zclip_jax._rule import Decision, Outcome, Rule, decide

__version__ = "0.1.0"

__all__ = [
    "ClipState",
    "Decision",
    "Outcome",
    "Rule",
    "clip_by_rule",
    "decide",
    "metrics",
    "rules",
    "zclip",
]
