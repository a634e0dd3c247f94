"""The tables of `detector` on synthetic traces, and what they share with those on recorded runs."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.benchmarks.choosing import until_calm
from tests.benchmarks.detector_traces import (
    CHANGE_AT,
    SHIFT_AT,
    beginnings,
    changed_tails,
    heavy_tails,
    planted,
    risen,
    shifted,
    with_spikes,
)
from zclip_jax import Rule, rules
from zclip_jax.replay import replay
from zclip_jax.replay._outliers import Hindsight, look_back

RULES: dict[str, Rule] = {
    "`zscore()`": rules.zscore(),
    "`zscore(min_rel_std=0.12)`": rules.zscore(min_rel_std=0.12),
    "`level(num_std=0)`": rules.level(num_std=0.0),
    "`level()`": rules.level(),
}
SEEDS, SHIFT_SEEDS = range(500, 510), range(600, 630)
YOUNG_STEPS = 50


class Seen(NamedTuple):
    """Norms `[steps]` with what hindsight says of them."""

    norms: np.ndarray
    hindsight: Hindsight
    own_tail: np.ndarray


def see(norms: np.ndarray) -> Seen:
    """Looks back on norms."""
    hindsight = look_back(norms)
    return Seen(norms, hindsight, hindsight.of_own_tail().outlier)


def fired(rule: Rule, traces: np.ndarray) -> np.ndarray:
    """Which steps of which trace fire, `[traces, steps]`."""
    return np.asarray(
        jax.jit(jax.vmap(lambda norms: replay(rule, norms).outcomes.fired))(jnp.asarray(traces))
    )


def by_trace(make: Callable[[int], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The traces that `make` gives for each seed, `[seeds, steps]` each."""
    by_seed = [make(seed) for seed in SEEDS]
    return {name: np.stack([traces[name] for traces in by_seed]) for name in by_seed[0]}


def share(steps: np.ndarray, among: np.ndarray) -> str:
    """The share of `among` that is in `steps`."""
    return f"{(steps & among).sum() / among.sum():.0%}" if among.any() else "none"


def each_rule(cell: Callable[[Rule], str]) -> list[str]:
    """The cells of a row."""
    return [cell(rule) for rule in RULES.values()]


def spikes_table() -> list[str]:
    """For each trace, and each rule, the share of outliers caught, false alarms and steps that fire."""
    rows = []
    for name, traces in by_trace(with_spikes).items():
        views = [look_back(norms) for norms in traces]
        outlier = np.stack([view.outlier for view in views])

        def cell(rule, traces=traces, views=views, outlier=outlier):
            steps = fired(rule, traces)
            alarms = [view.score(its)["num_false_alarms"] for view, its in zip(views, steps, strict=True)]
            caught, alarms = (steps & outlier).sum() / outlier.sum(), np.asarray(alarms) / steps.shape[1]
            return f"{caught:.1%}, {alarms.mean():.2%} ({alarms.max():.2%}), {steps.mean():.1%}"

        rows.append([name, f"{outlier.sum():,}", *each_rule(cell)])
    return table(["Trace", "outliers", *RULES], rows)


def heavy_table() -> list[str]:
    """Steps that fire after the first 100, and outliers of the own tail caught."""
    rows = []
    for name, traces in by_trace(heavy_tails).items():
        tail = np.stack([see(norms).own_tail for norms in traces])

        def cell(rule, traces=traces, tail=tail):
            steps = fired(rule, traces)
            return f"{steps[:, 100:].mean():.1%}, {share(steps, tail)}"

        rows.append([name, f"{tail.sum():,}", *each_rule(cell)])
    return table(["Trace", "outliers of the own tail", *RULES], rows)


def plant(traces: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """`planted` on the trace of each seed."""
    made = [planted(seed, norms, factor) for seed, norms in zip(SEEDS, traces, strict=True)]
    return np.stack([norms for norms, _ in made]), np.stack([at for _, at in made])


def planted_table(factors: tuple[float, ...] = (1.5, 3, 5, 10)) -> list[str]:
    """Spikes planted on heavy tails that are caught, by how large they are."""
    rows = []
    for name, traces in by_trace(heavy_tails).items():
        made = [plant(traces, factor) for factor in factors]

        def cell(rule, made=made):
            caught = [np.take_along_axis(fired(rule, norms), at, 1).mean() for norms, at in made]
            return ", ".join(f"{rate:.0%}" for rate in caught)

        rows.append([name, *each_rule(cell)])
    return table(["Trace", *RULES], rows)


def changed_tail_table() -> list[str]:
    """Steps that fire in the first four hundred after the tail changes."""

    def cell(rule, traces):
        after = fired(rule, traces)[:, CHANGE_AT : CHANGE_AT + 400].reshape(len(SEEDS), 4, 100)
        return ", ".join(f"{rate:.1%}" for rate in after.mean((0, 2)))

    traces = by_trace(changed_tails)
    rows = [[name, *each_rule(functools.partial(cell, traces=its))] for name, its in traces.items()]
    return table(["Trace", *RULES], rows)


def beginnings_table() -> list[str]:
    """How many of the first 50 steps fire: mean (most) over the seeds."""

    def cell(rule, traces):
        count = fired(rule, traces)[:, :YOUNG_STEPS].sum(1)
        return f"{count.mean():.1f} ({count.max()})"

    traces = by_trace(beginnings)
    rows = [[name, *each_rule(functools.partial(cell, traces=its))] for name, its in traces.items()]
    return table(["Trace", *RULES], rows)


def shift_table() -> list[str]:
    """Steps from a shift until less than a tenth of the next 50 fire: median (largest) over the seeds."""
    sizes, noises = (1.5, 2, 5, 100, 0.1), (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
    rows = []
    for name, rule in RULES.items():
        for size in sizes:
            row = [name, f"x{size:g}"]
            for scale in noises:
                after = fired(rule, np.stack([shifted(seed, size, scale) for seed in SHIFT_SEEDS]))
                out = [until_calm(steps) for steps in after[:, SHIFT_AT:]]
                row.append(f"{np.median(out):.0f} ({max(out):.0f})")
            rows.append(row)
    return table(["Rule", "shift", *(f"noise {scale:.0%}" for scale in noises)], rows)


def probe_table(probes: tuple[int, ...] = (30, 50, 100)) -> list[str]:
    """After a shift, the share of seeds on which a spike of 2.5 times the new level is caught."""

    def cell(rule, traces, start, level):
        caught = []
        for probe in probes:
            probed = traces.copy()
            probed[:, start + probe] = 2.5 * level
            caught.append(f"{fired(rule, probed)[:, start + probe].mean():.0%}")
        return ", ".join(caught)

    rows = []
    for scale in (0.1, 0.2):
        for size in (1.5, 2, 5, 100, 0.1):
            traces = np.stack([shifted(seed, size, scale) for seed in SHIFT_SEEDS])
            its = functools.partial(cell, traces=traces, start=SHIFT_AT, level=size)
            rows.append([f"x{size:g}, noise {scale:.0%}", *each_rule(its)])
        for size in (5, 20):
            traces = np.stack([risen(seed, size, scale) for seed in SHIFT_SEEDS])
            its = functools.partial(cell, traces=traces, start=20, level=1)
            rows.append([f"x{size} over the first 20 steps, noise {scale:.0%}", *each_rule(its)])
    return table(["Shift", *RULES], rows)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] + ["--:"] * (len(head) - 1), *rows)]
