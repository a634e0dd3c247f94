"""What a rule would have decided on recorded gradient norms."""

import copyreg
import importlib
import sys
import types

from zclip_jax.replay._recommend import Candidate, Recommendation, recommend
from zclip_jax.replay._replay import Replay, replay, sweep
from zclip_jax.replay.readers import Recording, read

__all__ = ["Candidate", "Recommendation", "Recording", "Replay", "read", "recommend", "replay", "sweep"]


class _Module(types.ModuleType):
    """Makes `zclip_jax.replay(rule, norms)` the same as `zclip_jax.replay.replay(rule, norms)`."""

    __call__ = staticmethod(replay)


sys.modules[__name__].__class__ = _Module
copyreg.pickle(_Module, lambda module: (importlib.import_module, (module.__name__,)))  # for cloudpickle
