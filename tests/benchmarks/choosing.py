"""What each rule does on synthetic traces: the table of `docs/choosing.md`.

    python -m tests.benchmarks.choosing            # prints it
    python -m tests.benchmarks.choosing --write    # and puts it into the docs

Every rule without a cap, on traces of 1,000 norms, 10 seeds each; the level changes at step 400.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from zclip_jax import Rule, rules
from zclip_jax.replay import replay

STEPS, CHANGE, SEEDS = 1000, 400, 10
TARGET = Path(__file__).parents[2] / "docs" / "choosing_table.md"

RULES: dict[str, Rule] = {
    "`zscore()`": rules.zscore(),
    "`zscore(patience=None)`, as published": rules.zscore(patience=None),
    '`zscore(strategy="max")`': rules.zscore(strategy="max"),
    '`zscore(strategy="mean")`': rules.zscore(strategy="mean"),
    "`zscore(min_rel_std=0.12)`": rules.zscore(min_rel_std=0.12),
    "`zscore(robust_warmup=True)`": rules.zscore(robust_warmup=True),
    "`in_log_space(zscore())`": rules.in_log_space(rules.zscore()),
    "`window_zscore()`": rules.window_zscore(),
    "`level()`": rules.level(),
    "`ema()`": rules.ema(),
    "`percentile(10)`": rules.percentile(10.0),
    "`percentile(95)`": rules.percentile(95.0),
    "`sigma_skip()`": rules.sigma_skip(),
    "`adagc()`": rules.adagc(),
    "`gradient_stabilizer()`": rules.gradient_stabilizer(),
    "`fixed(2.0)`": rules.fixed(2.0),
}


def gaussian(rng: np.random.Generator) -> np.ndarray:
    return 1 + 0.05 * rng.standard_normal(STEPS)


def shifted(factor: float) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: gaussian(rng) * np.where(np.arange(STEPS) < CHANGE, 1.0, factor)


def at(steps: slice | int, factor: float) -> Callable[[np.random.Generator], np.ndarray]:
    def trace(rng):
        norms = gaussian(rng)
        norms[steps] *= factor
        return norms

    return trace


TRACES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "steady": gaussian,
    "log-normal 0.3": lambda rng: rng.lognormal(0.0, 0.3, STEPS),
    "log-normal 0.6": lambda rng: rng.lognormal(0.0, 0.6, STEPS),
    "decay 10 to 1": lambda rng: gaussian(rng) * np.geomspace(10.0, 1.0, STEPS),
    "ramp 1 to 10": lambda rng: gaussian(rng) * np.linspace(1.0, 10.0, STEPS),
    "x1.2": shifted(1.2),
    "x2": shifted(2.0),
    "x10": shifted(10.0),
    "x100": shifted(100.0),
    "burst x5, 20 steps": at(slice(CHANGE, CHANGE + 20), 5.0),
    "x100 in warm-up": at(10, 100.0),
    "constant": lambda rng: np.ones(STEPS),
    "zeros": lambda rng: np.zeros(STEPS),
}
SHIFTS = ("x1.2", "x2", "x10", "x100")
SPIKE = at(CHANGE, 50.0)


def run(rule: Rule, trace: Callable[[np.random.Generator], np.ndarray]):
    """Whether each step fired and the norm it was allowed, `[seeds, steps]`."""
    norms = jnp.asarray(np.stack([trace(np.random.default_rng(seed)) for seed in range(SEEDS)]), jnp.float32)

    outcome = jax.jit(jax.vmap(lambda norms: replay(rule, norms).outcomes))(norms)
    return np.asarray(outcome.fired), np.asarray(outcome.clip_scale * outcome.grad_norm)


def longest_run(fired: np.ndarray) -> int:
    """Of consecutive fired steps, over all seeds."""
    longest = current = 0
    for step in np.append(fired, np.zeros((len(fired), 1), bool), axis=1).ravel():
        current = current + 1 if step else 0
        longest = max(longest, current)
    return longest


def until_calm(fired: np.ndarray) -> float:
    """The first step from which less than a tenth of the next 50 fire; infinite if there is none."""
    rates = np.convolve(fired, np.ones(50) / 50, mode="valid")
    calm = np.flatnonzero(rates < 0.1)
    return float(calm[0]) if calm.size else np.inf


def recovery(fired: np.ndarray) -> str:
    """Steps after the change until less than a tenth of the next 50 fire: the median over seeds."""
    median = float(np.median([until_calm(row) for row in fired[:, CHANGE:]]))
    return f"{median:.0f}" if np.isfinite(median) else "never"


def tables() -> str:
    rates = [
        "| Rule | " + " | ".join(TRACES) + " |",
        "|---|" + "--:|" * len(TRACES),
    ]
    shifts = [
        "| Rule | " + " | ".join(f"steps to recover from {name}" for name in SHIFTS)
        + " | longest run, steady and log-normal | longest run, x100 | norm allowed of a spike of 50 |",
        "|---|" + "--:|" * (len(SHIFTS) + 3),
    ]  # fmt: skip
    for name, rule in RULES.items():
        fired = {trace: run(rule, make)[0] for trace, make in TRACES.items()}
        rates.append(f"| {name} | " + " | ".join(f"{100 * f.mean():.1f}" for f in fired.values()) + " |")
        calm = max(longest_run(fired[trace]) for trace in ("steady", "log-normal 0.3", "log-normal 0.6"))
        allowed = run(rule, SPIKE)[1][:, CHANGE]
        cells = [recovery(fired[trace]) for trace in SHIFTS]
        cells += [str(calm), str(longest_run(fired["x100"])), f"{allowed.mean():.2f} ± {allowed.std():.2f}"]
        shifts.append(f"| {name} | " + " | ".join(cells) + " |")
    note = f"jax {jax.__version__}; {SEEDS} seeds, {STEPS} steps, change at step {CHANGE}."
    lines = ["Steps that fire, in percent:", "", *rates, ""]
    lines += ["After a change of level, and on a single spike:", "", *shifts, "", note, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name} into the docs")
    args = parser.parse_args()
    text = tables()
    print(text)
    if args.write:
        TARGET.write_text(text)


if __name__ == "__main__":
    main()
