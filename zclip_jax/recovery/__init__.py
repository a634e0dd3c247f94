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
from zclip_jax.recovery._checkpoints import GoodCheckpoints
from zclip_jax.recovery._config import RecoveryConfig
from zclip_jax.recovery._data import SkippingIterator
from zclip_jax.recovery._keep_good import KeepGood
from zclip_jax.recovery._log import RecoveryLog
from zclip_jax.recovery._recovery import Recovery
from zclip_jax.recovery._ring import MemoryRing
from zclip_jax.recovery._skips import SkipRanges
from zclip_jax.recovery._verify import Verdict, verify

__all__ = [
    "Action",
    "Continue",
    "ExitCode",
    "GoodCheckpoints",
    "KeepGood",
    "MemoryRing",
    "Mitigation",
    "Recovery",
    "RecoveryConfig",
    "RecoveryLog",
    "Retry",
    "Rewind",
    "SkipRanges",
    "SkippingIterator",
    "Stop",
    "Verdict",
    "verify",
]
