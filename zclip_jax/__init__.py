"""Training-stability control for JAX: gradient clipping that adapts to the run.

tx = optax.chain(zclip(), optax.adamw(3e-4))
"""

from zclip_jax import rules
from zclip_jax._clip import clip_by_rule
from zclip_jax._groups import group_names
from zclip_jax._loss_scale import unscale
from zclip_jax._metrics import metrics
from zclip_jax._presets import levelclip, zclip
from zclip_jax._rule import Decision, Outcome, Rule, decide
from zclip_jax._skip import SkipState, skip_by_rule
from zclip_jax._spikes import SpikeRecord, spikes, step_record
from zclip_jax._state import ClipState
from zclip_jax._transplant import TransplantReport, transplant
from zclip_jax._watch import watch
from zclip_jax._watch_state import WatchState

__version__ = "0.1.0"

__all__ = [
    "ClipState",
    "Decision",
    "Outcome",
    "Rule",
    "SkipState",
    "SpikeRecord",
    "TransplantReport",
    "WatchState",
    "clip_by_rule",
    "decide",
    "group_names",
    "levelclip",
    "metrics",
    "rules",
    "skip_by_rule",
    "spikes",
    "step_record",
    "transplant",
    "unscale",
    "watch",
    "zclip",
]
