"""Rules over the runs of a log: each run starts from the rule's first state, so that no statistics mix."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from zclip_jax._numerics import as_float
from zclip_jax._rule import Rule
from zclip_jax.replay._replay import Replay, replay
from zclip_jax.replay.readers import Recording

SHORTEST = 256  # steps that a compiled program runs over at least

_COMPILED = jax.jit(replay, static_argnums=0)


def replay_runs(rule: Rule, runs: Sequence[Recording]) -> list[Replay]:
    """What `rule` decides on each of the runs."""
    return decide_runs(lambda norms, value: _COMPILED(rule, norms, value=value), runs)


def decide_runs(decide: Callable[[Any, Any], Replay], runs: Sequence[Recording]) -> list[Replay]:
    """`decide(norms, losses)` of each of the runs, as NumPy arrays; its arrays have the steps along the last axis."""
    replays = []
    for run in runs:
        value = losses(run)
        decided = jax.device_get(decide(padded(run.norms), None if value is None else padded(value)))
        kept = jax.tree.map(lambda x, steps=run.norms.size: x[..., :steps], decided.outcomes)
        replays.append(Replay(kept, decided.state))
    return replays


def padded(x: np.ndarray) -> np.ndarray:
    """`x` `[steps]` with NaN up to a power of two: no rule's state changes there, and fewer programs are compiled."""
    with np.errstate(over="ignore"):
        floats = np.asarray(as_float(x))
    length = max(SHORTEST, 1 << max(floats.size - 1, 0).bit_length())
    return np.pad(floats, (0, length - floats.size), constant_values=np.nan)


def joined(replays: Sequence[Replay]) -> Replay:
    """The outcomes of all runs one after the other, and the state after the last."""
    outcomes = jax.tree.map(lambda *x: np.concatenate(x, axis=-1), *(one.outcomes for one in replays))
    return Replay(outcomes, replays[-1].state)


def losses(run: Recording) -> np.ndarray | None:
    """The losses, if each finite norm has one: a rule would take a missing one for a spike."""
    if run.loss is None or np.isnan(run.loss[np.isfinite(run.norms)]).any():
        return None
    return run.loss


def name_runs(numbers: Sequence[int], num_runs: int) -> str:
    """Names some of the runs by their numbers, which count from 1: `"runs 1, 3 to 5"`."""
    if len(numbers) == num_runs:
        return "every run"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    texts = [" to ".join(map(str, span)) for span in spans]
    return f"{'run' if len(numbers) == 1 else 'runs'} {', '.join(texts)}"


def gather(sentences: Sequence[Sequence[str]]) -> list[str]:
    """Sentences on each run as one list: each sentence once, behind the runs that it holds for."""
    if len(sentences) == 1:
        return list(sentences[0])
    runs_of: dict[str, list[int]] = {}
    for number, told in enumerate(sentences, 1):
        for sentence in told:
            runs_of.setdefault(sentence, []).append(number)
    return [f"{name_runs(numbers, len(sentences))}: {sentence}" for sentence, numbers in runs_of.items()]
