"""The tables that the tests run over: recorded-looking norms, and one row for each rule with its oracle."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from zclip_jax import Rule, rules


def noisy(level, steps, noise=0.05, seed=0):
    """Norms around `level` (a number or an array of `steps`) with relative Gaussian noise."""
    return level * (1 + noise * np.random.default_rng(seed).standard_normal(steps))


def with_spikes(norms, at, factor):
    norms = norms.copy()
    norms[list(at)] *= factor
    return norms


# For tests of which numbers meet, not of their last bits: generating the code is most of their time.
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
fast_jit = functools.partial(jax.jit, compiler_options=FAST)
# Makes a mesh current, under the name that JAX's version has.
in_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh  # pyrefly: ignore

TRACES = {
    "steady": noisy(1.0, 300),
    "spikes": with_spikes(noisy(0.3, 300, seed=1), [60, 61, 150, 220], 8.0),
    "decay": with_spikes(noisy(np.geomspace(5.0, 0.2, 300), 300, seed=2), [100, 200], 5.0),
    "shift": np.concatenate([noisy(1.0, 120, seed=3), noisy(4.0, 180, seed=4)]),
    "spike in warm-up": with_spikes(noisy(1.0, 300, seed=5), [10], 100.0),
    "heavy tail": np.random.default_rng(6).lognormal(0.0, 0.5, 300),
    "tiny": noisy(1e-6, 300, noise=0.2, seed=7),
}


# Losses that go with the norms, where a rule looks at them.
LOSSES = 2.0 + 0.1 * np.random.default_rng(9).standard_normal(400)
LOSSES[[70, 180]] = [3.0, 5.0]


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


def log_zscore_oracle(norms, rule):
    del rule  # the row wraps `zscore(patience=None)`
    alpha, z_max, mean, var, seen, allowed = 0.97, 2.5, 0.0, 0.0, [], []
    for x in np.log(norms):
        if len(seen) < 25:
            seen.append(x)
            mean, var = np.mean(seen), np.var(seen)
            allowed.append(np.inf)
            continue
        z = (x - mean) / (np.sqrt(var) + 1e-6)
        limit = mean + z_max**2 * np.sqrt(var) / z
        u = limit if z > z_max else x
        mean = alpha * mean + (1 - alpha) * u
        var = alpha * var + (1 - alpha) * (u - mean) ** 2
        allowed.append(np.exp(limit) if z > z_max else np.inf)
    return np.array(allowed)


def fixed_oracle(norms, max_norm):
    return np.full(len(norms), max_norm)


def at_most_oracle(norms, rule, max_norm):
    del rule  # the row wraps `zscore()`
    return np.minimum(zscore_oracle(norms), max_norm)


def bounded_oracle(norms, rule, low, high):
    del rule  # the row wraps `zscore()`
    return np.clip(zscore_oracle(norms), low, high)


def loss_aware_oracle(norms, rule, eta=1.0, form="exponential", rise=0.1, factor=0.5):
    del rule  # the row wraps `fixed(1.0)`
    losses = LOSSES[: len(norms)]
    relative = np.append(0.0, np.diff(losses) / losses[:-1])
    return np.exp(-eta * relative) if form == "exponential" else np.where(relative > rise, factor, 1.0)


def ema_oracle(norms, base=1.0, a=1.0, b=0.5, decay=0.99, low=0.1, high=10.0):
    mean, allowed = None, []
    for n in norms:
        threshold = np.inf if mean is None else a * mean + b * base
        allowed.append(np.clip(threshold, low * base, high * base))
        mean = n if mean is None else decay * mean + (1 - decay) * n
    return np.array(allowed)


def percentile_oracle(norms, p=10.0, window=1000):
    return np.array([np.percentile(norms[max(0, i + 1 - window) : i + 1], p) for i in range(len(norms))])


def window_oracle(norms, window=100, z_thresh=2.5, warmup_steps=25, strategy="reciprocal", min_rel_std=0.0):
    allowed = []
    for i, n in enumerate(norms):
        past = norms[max(0, i - window) : i]
        if i < warmup_steps:
            allowed.append(np.inf)
            continue
        mean, std = np.mean(past), max(np.std(past), min_rel_std * np.mean(past))
        z = (n - mean) / (std + 1e-6)
        limit = {"reciprocal": mean + z_thresh**2 * std / z, "max": mean + z_thresh * std, "mean": mean}
        fired = n > limit["max"] if strategy == "max" else z > z_thresh
        allowed.append(limit[strategy] if fired else np.inf)
    return np.array(allowed)


def sigma_skip_oracle(norms, num_std=6.0, window=128, warmup_steps=64):
    allowed = []
    for i, n in enumerate(norms):
        past = norms[max(0, i - window) : i]
        limit = np.mean(past) + num_std * np.std(past, ddof=1) if i >= warmup_steps else np.inf
        allowed.append(limit if n > limit else np.inf)
    return np.array(allowed)


def adagc_oracle(norms, lam=1.05, decay=0.98, warmup_steps=100, warmup_max_norm=1.0):
    gamma, allowed = np.inf, []
    for i, n in enumerate(norms):
        if i < warmup_steps:
            threshold = warmup_max_norm if n > warmup_max_norm else np.inf
            gamma = min(gamma, n, threshold)
        else:
            threshold = lam * gamma
            gamma = decay * gamma + (1 - decay) * min(n, threshold)
        allowed.append(threshold)
    return np.array(allowed)


def gradient_stabilizer_oracle(norms, decay1=0.6, decay2=0.999):
    m, v, allowed = 0.0, 0.0, []
    for t, n in enumerate(norms, start=1):
        m = decay1 * m + (1 - decay1) * n
        v = decay2 * v + (1 - decay2) * n**2
        allowed.append(m / (1 - decay1**t) / np.sqrt(v / (1 - decay2**t)))
    return np.array(allowed)


def level_oracle(norms, multiple=1.65, alpha=0.95, patience=25, num_std=2.9):
    mean, rise, count, off, allowed = 0.0, 0.0, 0, 0, []
    for n in norms:
        if count == 0:
            mean, count = n, 1
            allowed.append(np.inf)
            continue
        width = max(multiple, np.exp(num_std * np.sqrt(2 * np.pi) * rise))
        excess = (width - 1) * (1 + 1 / count) * mean
        fired = n > mean + excess
        allowed.append(mean + excess**2 / (n - mean) if fired else np.inf)
        weight = max(0.01, 1 / (count + 4)) / (1 + max(off, 0))
        rise += weight * (min(max(np.log(n / mean), 0), np.log(width)) - rise)
        off += 1 if fired else -1 if n < mean / 2 else -np.sign(off)
        decay = min(alpha, count / (count + 3))
        mean = decay * mean + (1 - decay) * min(n, allowed[-1], 2 * mean)
        count += 1
        if abs(off) > patience:
            mean, count, off = n, 1, 0
    return np.array(allowed)


class RuleCase(NamedTuple):
    """A rule as `make(**kwargs)`, and `oracle(norms, **kwargs)` giving the norm allowed at each step.

    `raises` says that smaller norms are scaled up to it.
    """

    name: str
    make: Callable[..., Rule]
    oracle: Callable[..., np.ndarray]
    kwargs: dict[str, Any] = {}
    raises: bool = False

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
        RuleCase(f"zscore-{','.join(map(str, kw.values())) or 'default'}", rules.zscore, zscore_oracle, kw)
        for kw in ZSCORE_SETTINGS
    ),
    RuleCase("in_log_space", rules.in_log_space, log_zscore_oracle, {"rule": rules.zscore(patience=None)}),
    RuleCase("fixed", rules.fixed, fixed_oracle, {"max_norm": 1.0}),
    RuleCase("at_most", rules.at_most, at_most_oracle, {"rule": rules.zscore(), "max_norm": 0.9}),
    RuleCase("bounded", rules.bounded, bounded_oracle, {"rule": rules.zscore(), "low": 0.5, "high": 3.0}),
    RuleCase("loss_aware", rules.loss_aware, loss_aware_oracle, {"rule": rules.fixed(1.0), "eta": 2.0}),
    RuleCase(
        "loss_aware-step", rules.loss_aware, loss_aware_oracle, {"rule": rules.fixed(1.0), "form": "step"}
    ),
    RuleCase("ema", rules.ema, ema_oracle, {"b": 0.2}),
    RuleCase("level", rules.level, level_oracle),
    RuleCase("level-1.3,0.9,3", rules.level, level_oracle, {"multiple": 1.3, "alpha": 0.9, "patience": 3}),
    RuleCase("level-0", rules.level, level_oracle, {"num_std": 0.0}),
    RuleCase("percentile", rules.percentile, percentile_oracle, {"p": 10.0, "window": 50}),
    RuleCase("window_zscore", rules.window_zscore, window_oracle, {"window": 40}),
    RuleCase(
        "window_zscore-max", rules.window_zscore, window_oracle, {"strategy": "max", "min_rel_std": 0.1}
    ),
    RuleCase("sigma_skip", rules.sigma_skip, sigma_skip_oracle, {"window": 32, "warmup_steps": 16}),
    RuleCase("adagc", rules.adagc, adagc_oracle, {"warmup_steps": 30}),
    RuleCase("gradient_stabilizer", rules.gradient_stabilizer, gradient_stabilizer_oracle, {}, raises=True),
]

# Ways in which optax nests a transformation `clip` of the updates {"a": …, "b": …}.
WRAPPERS = {
    "alone": lambda clip: clip,
    "chain": lambda clip: optax.chain(clip, optax.adamw(1e-3)),
    "chain in chain": lambda clip: optax.chain(optax.chain(optax.identity(), clip), optax.sgd(1.0)),
    "named_chain": lambda clip: optax.named_chain(("clip", clip), ("adam", optax.adam(1e-3))),
    "MultiSteps": lambda clip: optax.MultiSteps(optax.chain(clip, optax.sgd(1.0)), 1),
    "inject_hyperparams": lambda clip: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(clip, optax.adamw(learning_rate))
    )(learning_rate=1e-3),
    "partition": lambda clip: optax.partition(
        {"all": optax.chain(clip, optax.sgd(1.0))}, {"a": "all", "b": "all"}
    ),
    "multi_transform": lambda clip: optax.multi_transform(
        {"all": clip, "unused": optax.set_to_zero()}, {"a": "all", "b": "all"}
    ),
    "masked": lambda clip: optax.masked(clip, {"a": True, "b": True}),
    "apply_if_finite": lambda clip: optax.apply_if_finite(optax.chain(clip, optax.sgd(1.0)), 3),
    "with_extra_args_support": optax.with_extra_args_support,
    "conditionally_transform": lambda clip: optax.conditionally_transform(clip, lambda step, **_: True),
}
