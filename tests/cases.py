"""The tables that the tests run over: recorded-looking norms, and one row for each rule with its oracle."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zclip_jax import Rule, rules


def noisy(level, steps, noise=0.05, seed=0):
    """Norms around `level` (a number or an array of `steps`) with relative Gaussian noise."""
    return level * (1 + noise * np.random.default_rng(seed).standard_normal(steps))


def with_spikes(norms, at, factor):
    norms = norms.copy()
    norms[list(at)] *= factor
    return norms


TRACES = {
    "steady": noisy(1.0, 300),
    "spikes": with_spikes(noisy(0.3, 300, seed=1), [60, 61, 150, 220], 8.0),
    "decay": with_spikes(noisy(np.geomspace(5.0, 0.2, 300), 300, seed=2), [100, 200], 5.0),
    "shift": np.concatenate([noisy(1.0, 120, seed=3), noisy(4.0, 180, seed=4)]),
    "spike in warm-up": with_spikes(noisy(1.0, 300, seed=5), [10], 100.0),
    "heavy tail": np.random.default_rng(6).lognormal(0.0, 0.5, 300),
    "tiny": noisy(1e-6, 300, noise=0.2, seed=7),
}


def zscore_oracle(
    norms, alpha=0.97, z_thresh=2.5, eps=1e-6, warmup_steps=25, clip_factor=1.0,
    strategy="reciprocal", absorb="clipped", patience=25, robust_warmup=False, min_rel_std=0.0,
):  # fmt: skip
    seen, run, mean, var, allowed = [], 0, 0.0, 0.0, []
    for n in norms:
        if len(seen) < warmup_steps:
            seen.append(n)
            mean, var = np.mean(seen), np.var(seen)
            if robust_warmup and len(seen) == warmup_steps:
                mean = np.median(seen)
                var = (1.4826 * np.median(np.abs(seen - mean))) ** 2
            allowed.append(np.inf)
            continue
        std = max(np.sqrt(var), min_rel_std * mean)
        z = (n - mean) / (std + eps)
        fired = n > mean + z_thresh * std if strategy == "max" else z > z_thresh
        reciprocal = clip_factor * (mean + z_thresh**2 * std / (z or 1))
        limit = {"reciprocal": reciprocal, "max": mean + z_thresh * std, "mean": mean}[strategy]
        run = run + 1 if fired else 0
        as_is = not fired or (patience is not None and run > patience)
        if as_is or absorb != "none":
            u = n if as_is or absorb == "raw" else limit
            mean = alpha * mean + (1 - alpha) * u
            var = alpha * var + (1 - alpha) * (u - mean) ** 2
        allowed.append(limit if fired else np.inf)
    return np.array(allowed)


def fixed_oracle(norms, max_norm):
    return np.full(len(norms), max_norm)


def at_most_oracle(norms, rule, max_norm):
    del rule  # the row wraps `zscore()`
    return np.minimum(zscore_oracle(norms), max_norm)


class RuleCase(NamedTuple):
    """A rule as `make(**kwargs)`, and `oracle(norms, **kwargs)` giving the norm allowed at each step."""

    name: str
    make: Callable[..., Rule]
    oracle: Callable[..., np.ndarray]
    kwargs: dict[str, Any] = {}

    def __call__(self):
        return self.make(**self.kwargs)

    def allowed(self, norms):
        return self.oracle(norms, **self.kwargs)


ZSCORE_SETTINGS = [
    {},
    {"strategy": "max"},
    {"strategy": "mean"},
    {"absorb": "none"},
    {"absorb": "raw"},
    {"patience": None},
    {"patience": 3, "strategy": "mean", "absorb": "none"},
    {"robust_warmup": True},
    {"min_rel_std": 0.12},
    {"alpha": 0.9, "z_thresh": 2.0, "warmup_steps": 5, "clip_factor": 1.3, "eps": 1e-3},
]

RULES = [
    *(
        RuleCase(
            f"zscore-{','.join(map(str, kw.values())) or 'default'}",
            rules.zscore,
            zscore_oracle,
            kw,
        )
        for kw in ZSCORE_SETTINGS
    ),
    RuleCase("fixed", rules.fixed, fixed_oracle, {"max_norm": 1.0}),
    RuleCase("at_most", rules.at_most, at_most_oracle, {"rule": rules.zscore(), "max_norm": 0.9}),
]
