"""Recovery from loss spikes: when to rewind, how far, which data to leave out, and when to ask a person."""

from zclip_jax.recovery._actions import (
    Action,
    Continue,
    ExitCode,
    Mitigation,
    Retry,
    Rewind,
    Stop,
)
from zclip_jax.recovery._config import RecoveryConfig
from zclip_jax.recovery._log import RecoveryLog
from zclip_jax.recovery._recovery import Recovery
from zclip_jax.recovery._skips import SkipRanges

__all__ = [
    "Action",
    "Continue",
    "ExitCode",
    "Mitigation",
    "Recovery",
    "RecoveryConfig",
    "RecoveryLog",
    "Retry",
    "Rewind",
    "SkipRanges",
    "Stop",
]
