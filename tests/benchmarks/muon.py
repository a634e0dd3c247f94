"""Where to clip when Muon trains the matrices and AdamW the rest: the tables of `docs/muon.md`.

    python -m tests.benchmarks.muon            # prints them
    python -m tests.benchmarks.muon --write    # and puts them into the docs

Gradients are synthetic: a fixed direction with noise three times as large. Every number compares a chain with one
that does not clip, on the same gradients, so that 1 is "the update is as large as without clipping".
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import muon

from zclip_jax import zclip

TARGET = Path(__file__).parents[2] / "docs" / "muon_table.md"
Grads = dict[str, jax.Array]

WIDTH, RMS = 32, 1.5e-3  # of the ordinary tensors: one matrix and one vector for either optimizer
LABELS = {"matrix": "muon", "other": "muon", "scale": "adam", "loud": "adam"}
SHAPES = {"matrix": (WIDTH, WIDTH), "other": (WIDTH, WIDTH), "scale": (WIDTH,), "loud": (4,)}
STEPS, SPIKE, AFTER = 80, 60, 20
SEEDS = 5

Clip = Callable[[], optax.GradientTransformation]
RECOMMENDED = '`zclip(max_grad_norm=None, granularity="leaf")`'
BEFORE: dict[str, Clip] = {
    "nothing": optax.identity,
    "`optax.clip_by_global_norm(1.0)`": partial(optax.clip_by_global_norm, 1.0),
    "`zclip()`": zclip,
    "`zclip(max_grad_norm=None)`": partial(zclip, max_grad_norm=None),
    '`zclip(granularity="leaf")`': partial(zclip, granularity="leaf"),
    RECOMMENDED: partial(zclip, max_grad_norm=None, granularity="leaf"),
}
PER_GROUP: dict[str, Clip] = {
    "`zclip()` in each group": zclip,
    "`zclip(max_grad_norm=None)` in each group": partial(zclip, max_grad_norm=None),
}


def ahead(clip: Clip) -> optax.GradientTransformation:
    """One clip for all tensors, then Muon for some and AdamW for the others."""
    return optax.chain(clip(), optax.partition({"muon": muon(0.02), "adam": optax.adamw(3e-4)}, LABELS))


def in_each_group(clip: Clip) -> optax.GradientTransformation:
    """A clip ahead of Muon and one ahead of AdamW."""
    muon_and_adam = {"muon": muon(0.02), "adam": optax.adamw(3e-4)}
    return optax.partition({name: optax.chain(clip(), tx) for name, tx in muon_and_adam.items()}, LABELS)


def chains() -> dict[str, optax.GradientTransformation]:
    """Every way of clipping the gradients, by its name."""
    each = {name: in_each_group(clip) for name, clip in PER_GROUP.items()}
    return {name: ahead(clip) for name, clip in BEFORE.items()} | each


def gradients(loud: float = 0.0, spiked: tuple[str, ...] = (), factor: float = 100.0) -> Grads:
    """`[seeds, steps, ...]`. The tensor `loud` has that value in every step; `spiked` are noise at step `SPIKE`."""
    grads = {}
    for name, shape in SHAPES.items():
        rng = np.random.default_rng(len(grads))
        direction = rng.standard_normal((SEEDS, 1, *shape))
        values = RMS * (direction + 3 * rng.standard_normal((SEEDS, STEPS, *shape))) / np.sqrt(10)
        if name in spiked:
            values[:, SPIKE] = factor * RMS * rng.standard_normal((SEEDS, *shape))
        grads[name] = np.full_like(values, loud) if name == "loud" else values
    return {name: x.astype(np.float32) for name, x in grads.items()}


LOUD = (5e1, 5e3, 5e5, 5e7)
EVERYWHERE, MATRIX = ("matrix", "other", "scale"), ("matrix",)
FAULTS = {
    "no fault": {},
    "spike in all": {"spiked": EVERYWHERE},
    "spike in a matrix": {"spiked": MATRIX},
    "spike in a matrix, loud tensor": {"spiked": MATRIX, "loud": LOUD[-1]},
}
CASES = [{"loud": loud} for loud in (0.0, *LOUD)] + list(FAULTS.values())


def updates_of(tx: optax.GradientTransformation, cases: list[dict]) -> dict[str, np.ndarray]:
    """The updates `[cases, seeds, steps, ...]` of parameters that stay at zero, where weight decay is nothing."""
    grads = jax.tree.map(lambda *x: np.stack(x), *[gradients(**case) for case in cases])
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def run(grads):
        def step(state, grads):
            updates, state = tx.update(grads, state, params)
            return state, updates

        return jax.lax.scan(step, tx.init(params), grads)[1]

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(jax.vmap(run)))(grads))


def norms(x: np.ndarray) -> np.ndarray:
    """Of each seed's tensor."""
    return np.linalg.norm(x.reshape(len(x), -1), axis=1)


def size(updates: np.ndarray, unclipped: np.ndarray) -> np.ndarray:
    """The last update `[seeds, steps, ...]` of a tensor over that without clipping, of each seed."""
    return norms(updates[:, -1]) / norms(unclipped[:, -1])


def deviation(updates: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """How far the updates' sum from the spike on is from that without clip and spike, relative to that."""
    after = slice(SPIKE, SPIKE + AFTER)
    return norms((updates - clean)[:, after].sum(1)) / norms(clean[:, after].sum(1))


def shrunk_after_muon(width: int, learning_rate: float = 1.0, matrices: int = 1) -> float:
    """By how much a clip of norm 1 after Muon divides the update of square matrices."""
    rng = np.random.default_rng(0)
    grads = [jnp.asarray(rng.standard_normal((width, width)), jnp.float32) for _ in range(matrices)]
    tx = muon(learning_rate)
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    clipped, _ = optax.clip_by_global_norm(1.0).update(updates, optax.EmptyState())
    before, after = (np.linalg.norm(np.asarray(tree)) for tree in (updates, clipped))
    return float(before / after)


WIDTHS = (128, 512, 1024)


def row(name: str, cells) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def tables() -> str:
    """The three tables, as Markdown."""
    head = [f"AdamW, loud {loud:.0e}".replace("e+0", "e") for loud in LOUD] + ["Muon, loud 5e7"]
    loud_rows = [row("Clip before the optimizer", head), "|---|" + "--:|" * len(head)]
    head = [f"{fault}: {optimizer}" for fault in FAULTS for optimizer in ("Muon", "AdamW")]
    spike_rows = [row("Clip before the optimizer", head), "|---|" + "--:|" * len(head)]
    unclipped = updates_of(chains()["nothing"], CASES)
    quiet, last = 0, len(LOUD)  # cases without a spike: no loud tensor, and the loudest
    for name, tx in chains().items():
        updates = updates_of(tx, CASES)
        where = [("scale", i) for i in range(1, last + 1)] + [("matrix", last)]
        cells = [f"{size(updates[tensor][i], unclipped[tensor][i]).mean():.4f}" for tensor, i in where]
        loud_rows.append(row(name, cells))
        cells = []
        for i, faults in enumerate(FAULTS.values(), last + 1):
            for tensor in ("matrix", "scale"):
                clean = unclipped[tensor][last if "loud" in faults else quiet]
                moved = deviation(updates[tensor][i], clean)
                cells.append(f"{moved.mean():.2f} ± {moved.std(ddof=1):.2f}")
        spike_rows.append(row(name, cells))
    after_rows = ["| Width of a square matrix | " + " | ".join(map(str, WIDTHS)) + " |", "|---|--:|--:|--:|"]
    for label, learning_rate, matrices in (
        ("before the learning rate, one matrix", 1.0, 1),
        ("before the learning rate, 4 matrices", 1.0, 4),
        ("after a learning rate of 0.02, one matrix", 0.02, 1),
    ):
        factors = [shrunk_after_muon(width, learning_rate, matrices) for width in WIDTHS]
        after_rows.append(row(label, [f"{factor:.1f}" for factor in factors]))
    note = (
        f"jax {jax.__version__}, optax {optax.__version__}; {STEPS} steps, ordinary gradients of RMS {RMS}, "
        f"matrices {WIDTH} wide; spike of 100 times at step {SPIKE}, sums over {AFTER} steps, {SEEDS} seeds."
    )
    sections = {
        "Size of an ordinary tensor's update beside one loud tensor, against no clipping:": loud_rows,
        "Deviation of the summed updates after a spike, mean and standard deviation over seeds:": spike_rows,
        "A clip of norm 1 *after* Muon divides the update by:": after_rows,
    }
    lines = [line for title, rows in sections.items() for line in (title, "", *rows, "")]
    return "\n".join([*lines, note, ""])


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
