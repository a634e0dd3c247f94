"""From runs to results: groups of lanes, trunks that they branch off, and one record for each run."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.experiments.arms import parse_arm
from examples.experiments.config import Run, Settings
from examples.experiments.lanes import PRIOR, SIZES, Program, corpus_of, lane_of, model_of, train
from examples.llama.data import Corpus
from examples.llama.model import PRESETS
from zclip_jax.monitor import spike_score

# What a trunk does not depend on.
FREE = ("fault", "period", "rows", "positions", "steps", "evals")
BINS = 100  # of the curves that are kept for plots
Record = dict[str, Any]
Branch = tuple[Any, Any, np.ndarray]  # parameters, optimizer state, norms


def corpus_for(settings: Settings, cache: Path) -> Corpus:
    context = settings.context or PRESETS[settings.preset].context
    return corpus_of(settings.data, settings.vocab_size, context, str(cache))


def work(runs: Sequence[Run], cache: Path, max_lanes: int) -> Iterator[list[tuple[Run, Record]]]:
    """Trains the runs, at most `max_lanes` of one program side by side; yields each batch of them with records."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        arm, s = parse_arm(run.arm), run.settings
        sizes = tuple(getattr(s, name) for name in SIZES)
        key = (sizes, s.preset, s.norm_dtype, s.qk_norm, s.tie_embeddings, s.data, s.vocab_size, s.batch)
        skipped = arm.family if arm.skip else None
        groups.setdefault((key, s.optimizer, skipped, arm.nonfinite, s.trunk, s.steps, s.evals), []).append(
            run
        )
    trunks: dict[str, Branch] = {}
    for group in groups.values():
        width = math.ceil(len(group) / math.ceil(len(group) / max_lanes))
        for first in range(0, len(group), width):
            yield _work(group[first : first + width], group, width, cache, trunks)


def _work(
    runs: list[Run], group: list[Run], width: int, cache: Path, trunks: dict[str, Branch]
) -> list[tuple[Run, Record]]:
    start = time.perf_counter()
    settings, arm = runs[0].settings, parse_arm(runs[0].arm)
    corpus = corpus_for(settings, cache)
    families = tuple(sorted({parse_arm(run.arm).family for run in group}))
    program = Program(
        model=model_of(settings, corpus.vocab_size),
        batch=settings.batch,
        optimizer=settings.optimizer,
        families=families,
        skip=arm.skip,
        nonfinite=arm.nonfinite,
    )
    padded = runs + [runs[-1]] * (width - len(runs))  # so that no other program is compiled
    branch = _branches(padded, program, corpus, trunks) if settings.trunk else None
    lanes = [lane_of(run, program) for run in padded]
    _, series = train(
        program, lanes, corpus, settings.trunk, settings.steps, evals=settings.evals, trunk=branch
    )
    seconds = (time.perf_counter() - start) / len(runs)
    told = {"seconds": round(seconds, 2), "corpus": corpus.name, "jax": jax.__version__}
    results = []
    for i, run in enumerate(runs):
        mine = {name: x[i] for name, x in series.items()}
        curves = {name: curve(mine[name]) for name in ("loss", "grad_norm")} if run.curve else {}
        record = summary(mine, corpus.unigram_entropy) | told
        results.append((run, record | ({"curves": curves} if curves else {})))
    return results


def _branches(
    runs: Sequence[Run], program: Program, corpus: Corpus, trunks: dict[str, Branch]
) -> tuple[Any, np.ndarray]:
    """Parameters and optimizer states that the runs branch off, and the norms before, [lanes, ...]."""
    default = {name: getattr(Settings(), name) for name in FREE}
    wanted = [
        dataclasses.replace(run, arm="fixed:1", settings=dataclasses.replace(run.settings, **default))
        for run in runs
    ]
    missing = list({run.key: run for run in wanted if run.key not in trunks}.values())
    if missing:
        program = dataclasses.replace(program, families=("fixed",), skip=False, nonfinite="zero")
        lanes = [lane_of(run, program) for run in missing]
        (params, state), series = train(program, lanes, corpus, 0, runs[0].settings.trunk, evals=1)
        params, inner = jax.tree.map(np.asarray, (params, state[1]))
        for i, run in enumerate(missing):
            mine = jax.tree.map(lambda x, i=i: x[i], (params, inner))
            trunks[run.key] = (*mine, series["grad_norm"][i, -PRIOR:])
    found = [trunks[run.key] for run in wanted]
    params, inner, norms = jax.tree.map(lambda *x: np.stack(x), *found)
    return (params, inner), norms


def summary(series: Mapping[str, np.ndarray], no_context: float) -> Record:
    """One run's record. A run has failed if its held-out loss is no number, or above that of letter counts."""
    held_out, norms = series["held_out"], series["grad_norm"]
    last = float(held_out[-1])
    failed = None if last < no_context else "unlearnt" if math.isfinite(last) else "NaN"
    finite = norms[np.isfinite(norms)]
    low, median, high = np.percentile(finite, [5, 50, 95]) if len(finite) else [math.nan] * 3
    scaled = (series["clip_scale"] < 1) | series["nonfinite"]
    return {
        "loss": _digits(last),
        "failed": failed,
        "held_out": [[int(n), _digits(x)] for n, x in zip(series["held_out_steps"], held_out, strict=True)],
        "fired": _digits(np.mean(series["fired"])),
        "scaled": _digits(np.mean(scaled)),
        "nonfinite": int(np.sum(series["nonfinite"])),
        "first_norm": _digits(norms[0]),
        "norm_5_50_95": [_digits(x) for x in (low, median, high)],
        "spikes_loss": _score(series["loss"]),
        "spikes_norm": _score(norms),
        "train_loss": _digits(np.mean(series["loss"][-max(1, len(norms) // 10) :])),
    }


def curve(series: np.ndarray) -> list[float | None]:
    """The highest value of each of at most 100 parts."""
    return [_digits(np.max(part)) for part in np.array_split(series, min(BINS, len(series)))]


def _score(series: np.ndarray) -> float | None:
    """SpikeScore as OLMo-core counts it, of one series alone; None where there are fewer than 128 values."""
    score = spike_score(series).total
    return None if score is None else _digits(score)


def _digits(x: Any) -> float | None:
    """Five significant digits; None for what JSON has no number for."""
    return float(f"{float(x):.5g}") if math.isfinite(x) else None
