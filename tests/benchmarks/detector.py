"""How `rules.level` tells spikes from noise, beside `zscore`: the tables of `docs/level.md`.

    python -m tests.benchmarks.detector                 # synthetic traces and shifts of level
    python -m tests.benchmarks.detector --write         # and puts them into the docs
    python -m tests.benchmarks.detector LOG[:COLUMN] …  # recorded runs, a row each

An outlier is a norm above 2 times its local median, centred, of up to 101 norms, that stands out against the norms
before it, too: above 1.3 times the median of the last 5 or of the last 50. A false alarm is a step that fires below
1.3 times the local median. Synthetic traces have 3,000 norms and 10 seeds, none of them used to choose the rule.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.benchmarks.choosing import until_calm
from zclip_jax import Rule, rules
from zclip_jax.replay import read, replay
from zclip_jax.replay._outliers import OUTLIER, look_back

RULES: dict[str, Rule] = {
    "`zscore()`": rules.zscore(),
    "`zscore(min_rel_std=0.12)`": rules.zscore(min_rel_std=0.12),
    "`level()`": rules.level(),
}
STEPS, SEEDS = 3000, range(200, 210)
SHIFT_AT, SHIFT_SEEDS = 400, range(300, 330)
TARGET = Path(__file__).parents[2] / "docs" / "level_tables.md"


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


def synthetic(seed: int) -> dict[str, np.ndarray]:
    """Traces with spikes, by what is hard about them."""
    rng, step = np.random.default_rng(seed), np.arange(STEPS)
    warm = 13 * np.exp(-np.maximum(step - 2, 0) / 4.5) + 1.9 * (1 + step / 60) ** -0.75 + 0.28
    cold = 9 * np.exp(-step / 4) + 6 * (1 + step / 8) ** -0.7 + 0.3
    early = noise(rng, 0.08)
    early[[3, 10, 20]] *= np.exp(rng.uniform(np.log(3), np.log(40), 3))
    return {
        "5 % noise": spikes(rng, noise(rng, 0.05, 0.0), 30, 30, STEPS),
        "language model, 8 % noise": spikes(rng, warm * noise(rng, 0.08), 30, 60, STEPS),
        "the same, 12 %, correlated 0.5": spikes(rng, warm * noise(rng, 0.12, 0.5), 30, 60, STEPS),
        "without learning-rate warm-up": spikes(rng, cold * noise(rng, 0.08), 15, 4, 300),
        "spikes at steps 3, 10 and 20": spikes(rng, early, 15, 30, STEPS),
        "slow rise from 1 to 6": spikes(rng, np.linspace(1, 6, STEPS) * noise(rng, 0.08), 15, 20, STEPS),
        "log-normal 0.3": rng.lognormal(0, 0.3, STEPS),
        "log-normal 0.6": rng.lognormal(0, 0.6, STEPS),
    }


def fired(rule: Rule, traces: np.ndarray) -> np.ndarray:
    """Which steps of which trace fire, `[traces, steps]`."""
    return np.asarray(
        jax.jit(jax.vmap(lambda norms: replay(rule, norms).outcomes.fired))(jnp.asarray(traces))
    )


def synthetic_table() -> list[str]:
    """For each trace, and each rule, the share of outliers caught, false alarms and steps that fire."""
    rows, by_seed = [], [synthetic(seed) for seed in SEEDS]
    for name in by_seed[0]:
        traces = np.stack([traces[name] for traces in by_seed])
        views = [look_back(norms) for norms in traces]
        row, number = [], 0
        for rule in RULES.values():
            steps = fired(rule, traces)
            scores = [view.score(its) for view, its in zip(views, steps, strict=True)]
            number, caught = (sum(score[key] for score in scores) for key in ("num_outliers", "num_caught"))
            alarms = [score["num_false_alarms"] / STEPS for score in scores]
            row.append(
                f"{caught / max(number, 1):.1%}, {np.mean(alarms):.2%} ({np.max(alarms):.2%}), {steps.mean():.1%}"
            )
        rows.append([name, f"{number:,}", *row])
    return table(["Trace", "outliers", *RULES], rows)


def shift_table() -> list[str]:
    """Steps from a shift until less than a tenth of the next 50 fire: median (largest) over the seeds."""
    sizes, noises = (1.5, 2, 5, 100, 0.1), (0.05, 0.1, 0.2, 0.3)
    rows = []
    for name, rule in RULES.items():
        for size in sizes:
            row = [name, f"x{size:g}"]
            for scale in noises:
                traces = np.stack(
                    [noise(np.random.default_rng(seed), scale, steps=1000) for seed in SHIFT_SEEDS]
                )
                traces[:, SHIFT_AT:] *= size
                after = fired(rule, traces)[:, SHIFT_AT:]
                out = [until_calm(steps) for steps in after]
                row.append(f"{np.median(out):.0f} ({max(out):.0f})")
            rows.append(row)
    return table(["Rule", "shift", *(f"noise {scale:.0%}" for scale in noises)], rows)


def recorded_table(logs: list[str]) -> list[str]:
    """The same for recorded runs, with counts; and how many norms are above twice their median for any reason."""
    rows = []
    for log in logs:
        path, _, column = log.partition(":")
        norms = read(path, column=column or None).norms
        norms = norms[np.isfinite(norms)]
        view = look_back(norms)
        row, number = [], 0
        for rule in RULES.values():
            steps = fired(rule, norms[None])[0]
            score = view.score(steps)
            number = score["num_outliers"]
            row.append(
                f"{score['num_caught']}, {score['num_false_alarms'] / norms.size:.2%}, {steps.mean():.2%}"
            )
        above = int(np.sum(view.ratio > OUTLIER))
        rows.append([f"`{Path(log).name}`", f"{norms.size:,}", f"{above:,}", f"{number:,}", *row])
    return table(["Log", "norms", "above 2x", "outliers", *RULES], rows)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] + ["--:"] * (len(head) - 1), *rows)]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "logs", nargs="*", metavar="LOG[:COLUMN]", help="recorded runs in place of synthetic ones"
    )
    parser.add_argument("--write", action="store_true", help=f"write docs/{TARGET.name}")
    options = parser.parse_args()
    if options.logs:
        print("\n".join(recorded_table(options.logs)))
        return
    text = "\n".join(
        [
            f"Synthetic traces, {len(SEEDS)} seeds: outliers caught, false alarms (worst seed), steps that fire:",
            "",
            *synthetic_table(),
            "",
            "Steps after a shift until less than a tenth of the next 50 fire, median (largest) of "
            f"{len(SHIFT_SEEDS)} seeds:",
            "",
            *shift_table(),
        ]
    )
    print(text)
    if options.write:
        TARGET.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
