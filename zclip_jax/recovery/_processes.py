"""What several processes must do together."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def everywhere(fine: bool) -> bool:
    """Whether it is so on every process."""
    if jax.process_count() == 1:
        return fine
    return bool(multihost_utils.process_allgather(np.asarray(fine)).all())


def sync(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"zclip_jax {name}")
