"""Synthetic norms for `detector`: language-model runs, heavy tails, shifts of level."""

import numpy as np

STEPS, SHIFT_AT, CHANGE_AT = 3000, 400, 1500
# Of the logarithms: standard deviation and correlation, where they are normal; scale and degrees of freedom, where
# they have Student's distribution.
NORMAL_TAILS = [
    (0.3, 0.0),
    (0.5, 0.0),
    (0.7, 0.0),
    (1.0, 0.0),
    (1.5, 0.0),
    (0.3, 0.9),
    (0.7, 0.9),
    (1.5, 0.9),
]
STUDENT_TAILS = [(0.1, 3), (0.3, 3), (0.5, 4)]


def noise(rng: np.random.Generator, scale: float, correlation: float = 0.3, steps: int = STEPS) -> np.ndarray:
    """Log-normal noise around 1, each step correlated with the one before."""
    white = rng.standard_normal(steps)
    red = np.empty(steps)
    red[0] = white[0]
    for i in range(1, steps):
        red[i] = correlation * red[i - 1] + np.sqrt(1 - correlation**2) * white[i]
    return np.exp(scale * red)


def spikes(rng: np.random.Generator, norms: np.ndarray, number: int, start: int, stop: int) -> np.ndarray:
    """`norms` with so many of them between `start` and `stop` 2.2 to 40 times as large."""
    at = rng.choice(np.arange(start, stop), number, replace=False)
    factors = np.ones(norms.size)
    factors[at] = np.exp(rng.uniform(np.log(2.2), np.log(40), number))
    return norms * factors


def falling(learning_rate_warm_up: bool) -> np.ndarray:
    """The level of a language model from its first step on."""
    step = np.arange(STEPS)
    if learning_rate_warm_up:
        return 13 * np.exp(-np.maximum(step - 2, 0) / 4.5) + 1.9 * (1 + step / 60) ** -0.75 + 0.28
    return 9 * np.exp(-step / 4) + 6 * (1 + step / 8) ** -0.7 + 0.3


def with_spikes(seed: int) -> dict[str, np.ndarray]:
    """Traces with spikes, by what is hard about them."""
    rng = np.random.default_rng(seed)
    warm, cold = falling(True), falling(False)
    early = noise(rng, 0.08)
    early[[3, 10, 20]] *= np.exp(rng.uniform(np.log(3), np.log(40), 3))
    burst = noise(rng, 0.08)
    burst[1000:1010] *= np.exp(rng.uniform(np.log(2.2), np.log(40), 10))
    return {
        "5 % noise": spikes(rng, noise(rng, 0.05, 0.0), 30, 30, STEPS),
        "language model, 8 % noise": spikes(rng, warm * noise(rng, 0.08), 30, 60, STEPS),
        "the same, 12 %, correlated 0.5": spikes(rng, warm * noise(rng, 0.12, 0.5), 30, 60, STEPS),
        "without learning-rate warm-up": spikes(rng, cold * noise(rng, 0.08), 15, 4, 300),
        "spikes at steps 3, 10 and 20": spikes(rng, early, 15, 30, STEPS),
        "10 spikes in a row": spikes(rng, burst, 15, 1030, STEPS),
        "6 % of the steps are spikes": spikes(rng, noise(rng, 0.08), 180, 30, STEPS),
        "slow rise from 1 to 6": spikes(rng, np.linspace(1, 6, STEPS) * noise(rng, 0.08), 15, 20, STEPS),
    }


def beginnings(seed: int) -> dict[str, np.ndarray]:
    """Traces whose first 50 steps are looked at; none of them has a spike but that at step 0."""
    rng = np.random.default_rng(seed)
    first = noise(rng, 0.08)
    first[0] *= 30
    return {
        "steady, 8 % noise": noise(rng, 0.08),
        "falls, with learning-rate warm-up": falling(True) * noise(rng, 0.08),
        "falls, without": falling(False) * noise(rng, 0.08),
        "steady after a spike of 30x at step 0": first,
        "log-normal 0.3": noise(rng, 0.3, 0.0),
        "log-normal 0.7": noise(rng, 0.7, 0.0),
        "log-normal 1.5": noise(rng, 1.5, 0.0),
    }


def heavy_tails(seed: int) -> dict[str, np.ndarray]:
    """Traces on which a fixed multiple of the level is no outlier."""
    rng = np.random.default_rng(seed)
    return {
        f"log-normal {scale}" + (f", correlated {correlation}" if correlation else ""): noise(
            rng, scale, correlation
        )
        for scale, correlation in NORMAL_TAILS
    } | {
        f"Student's t({freedom}) x {scale}": np.exp(np.clip(scale * rng.standard_t(freedom, STEPS), -20, 20))
        for scale, freedom in STUDENT_TAILS
    }


def changed_tails(seed: int) -> dict[str, np.ndarray]:
    """Log-normal norms whose standard deviation changes at step 1,500, by the two."""
    rng, before = np.random.default_rng(seed), np.arange(STEPS) < CHANGE_AT
    return {
        f"log-normal {first} to {second}": noise(rng, 1.0, 0.0) ** np.where(before, first, second)
        for first, second in ((0.1, 0.5), (0.1, 1.0), (1.0, 0.1))
    }


def planted(seed: int, norms: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """The norms with 15 spikes so many times the norm that 1 % exceed, and where they are."""
    at = np.random.default_rng(seed).choice(np.arange(150, norms.size), 15, replace=False)
    norms = norms.copy()
    norms[at] = factor * np.quantile(norms, 0.99)
    return norms, at


def shifted(seed: int, factor: float, scale: float) -> np.ndarray:
    """Noise whose level changes at step 400."""
    return noise(np.random.default_rng(seed), scale, steps=1000) * np.where(
        np.arange(1000) < SHIFT_AT, 1, factor
    )


def risen(seed: int, factor: float, scale: float) -> np.ndarray:
    """Noise whose level rises so many times, to 1, over the first 20 steps."""
    ramp = np.minimum(1, (1 + (factor - 1) * np.arange(1000) / 20) / factor)
    return noise(np.random.default_rng(seed), scale, steps=1000) * ramp
