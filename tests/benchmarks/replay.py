"""How fast `replay` and `sweep` are, beside a loop in Python over the same norms.

    python -m tests.benchmarks.replay

The best of three, without compilation where nothing else is said. The loop is the published rule, step by step,
keeping of each step what `replay` keeps; ratios are of decisions a second.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zclip_jax import rules
from zclip_jax.replay import replay, sweep

NUM_NORMS, NUM_SWEPT = 1_000_000, 100_000
GRID = {"z_thresh": np.linspace(1.5, 5.0, 8).tolist(), "alpha": np.linspace(0.9, 0.99, 8).tolist()}


def loop(
    norms: list[float], alpha: float = 0.97, z_thresh: float = 2.5, eps: float = 1e-6, warmup: int = 25
) -> Any:
    """The published rule in plain Python, a step at a time."""
    first = norms[:warmup]
    mean = sum(first) / warmup
    var = sum((norm - mean) ** 2 for norm in first) / warmup
    outcomes = [(norm, math.inf, 0.0, 1.0, 0.0, 0.0, False) for norm in first]
    for norm in norms[warmup:]:
        std = math.sqrt(var)
        z = (norm - mean) / (std + eps)
        fired = z > z_thresh
        allowed = mean + z_thresh * std * z_thresh / z if fired else math.inf
        scale = allowed / norm if fired else 1.0
        outcomes.append((norm, allowed, z, scale, mean, std, fired))
        absorbed = allowed if fired else norm
        mean = alpha * mean + (1 - alpha) * absorbed
        var = alpha * var + (1 - alpha) * (absorbed - mean) ** 2
    return outcomes


def best_of_three(call: Callable[[], Any]) -> float:
    """Seconds of the fastest call; the first, which compiles, is not timed."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Prints the three times and two ratios."""
    norms = np.random.default_rng(0).lognormal(0.0, 0.3, NUM_NORMS).astype(np.float32)
    rule = rules.zscore()
    compiled = jax.jit(lambda norms: replay(rule, norms).outcomes)
    one = best_of_three(lambda: compiled(norms))
    with_compilation = best_of_three(lambda: sweep(rules.zscore, norms[:NUM_SWEPT], **GRID)[1].outcomes)
    swept = jax.jit(lambda norms: sweep(rules.zscore, norms, **GRID)[1].outcomes)
    many = best_of_three(lambda: swept(norms[:NUM_SWEPT]))
    as_list = norms.tolist()
    python = best_of_three(lambda: len(loop(as_list)))
    assert sum(outcome[-1] for outcome in loop(as_list)) == int(replay(rule, norms).summary["num_fired"])
    num_settings = math.prod(map(len, GRID.values()))
    ratio = num_settings * NUM_SWEPT / many / (NUM_NORMS / python)
    print(f"replay, {NUM_NORMS:,} steps: {1e3 * one:.0f} ms")
    print(f"sweep, {num_settings} settings of {NUM_SWEPT:,} steps: {1e3 * many:.0f} ms")
    print(f"the same with its compilation: {1e3 * with_compilation:.0f} ms")
    print(f"loop in Python, {NUM_NORMS:,} steps: {1e3 * python:.0f} ms")
    print(f"decisions a second, over the loop's: replay {python / one:.1f}x, sweep {ratio:.1f}x")


if __name__ == "__main__":
    main()
