"""SpikeScore as OLMo-core counts it: how much of a run is spikes of the loss or of the gradient norm."""

from typing import NamedTuple

import numpy as np

WINDOW = 128  # values before one that it is judged by; a power of two, see `_moments`
SIGMAS = 6.0
LEAST_STD = 1e-10
LAST = 10_000  # steps of the rolling score


class SpikeScore(NamedTuple):
    """Shares of steps that are spikes.

    Args:
      total: of all steps, the first 128 included; None where there are fewer than 128.
      last: of the last 10,000 steps; None where there are fewer.
    """

    total: float | None
    last: float | None


def spike_score(*series: np.ndarray) -> SpikeScore:
    """SpikeScore of OLMo-core: the share of steps at which one of these series, `[steps]` each, has a spike.

    OLMo-core gives it the loss and the gradient norm. This is another number than the SpikeScore of the paper "OLMo
    2", which has 7 standard deviations and 1,000 values. A spike is more than 6 standard deviations of a
    population above the mean of the 128 finite values before it.

    Args:
      series: float arrays `[steps]`, all of the same length; values that are not finite are no spikes.

    Examples:
      >>> import numpy as np
      >>> from zclip_jax.monitor import spike_score
      >>> loss = 2 + 0.1 * np.random.default_rng(0).standard_normal(200)
      >>> loss[[150, 180]] = 9
      >>> spike_score(loss).total
      0.01

    References:
      Ai2, OLMo-core, `StabilityMonitorCallback` in `src/olmo_core/train/callbacks/stability_monitor.py`,
      https://github.com/allenai/OLMo-core, 2026.
    """
    spikes = np.any([find_spikes(x) for x in series], axis=0)
    steps = spikes.size
    return SpikeScore(
        float(spikes.mean()) if steps >= WINDOW else None,
        float(spikes[-LAST:].mean()) if steps >= LAST else None,
    )


def find_spikes(x: np.ndarray) -> np.ndarray:
    """Which values are more than 6 standard deviations above the mean of the 128 before them; `[steps]`.

    The value itself is not among the 128, the deviation is that of a population, and nothing is a spike where there
    are no 128 values before or their deviation is below 1e-10. A value that is not finite is no spike and is left
    out of the 128. In OLMo-core an infinite one is a spike, and none of the 128 after it, or after NaN, can be one.
    """
    x = np.asarray(x, np.float64)
    kept = np.flatnonzero(np.isfinite(x))
    values, spikes = x[kept], np.zeros(x.shape, bool)
    if values.size > WINDOW:
        with np.errstate(over="ignore", invalid="ignore"):  # of 1e154 and more the square overflows
            mean, std = _moments(values[:-1])
            spikes[kept[WINDOW:]] = (std >= LEAST_STD) & (values[WINDOW:] > mean + SIGMAS * std)
    return spikes


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of each 128 values in a row, `[steps - 127]`.

    Each window is made of its halves, so that there is neither a running sum, in which a giant would drown what
    comes after it, nor a difference of large squares.
    """
    mean, squares, width = x, np.zeros_like(x), 1
    while width < WINDOW:
        step = mean[width:] - mean[:-width]
        squares = squares[width:] + squares[:-width] + step * step * (width / 2)
        mean = mean[:-width] + step / 2
        width *= 2
    return mean, np.sqrt(squares / WINDOW)
