"""Recorded runs that tests make, what is reported on them, and hindsight in loops."""

import math

import numpy as np

from zclip_jax.replay._report import make_report
from zclip_jax.replay._specs import parse_spec
from zclip_jax.replay.readers import Recording

NAN, INF = math.nan, math.inf


def noise(steps, seed=0, spread=0.1):
    return np.exp(spread * np.random.default_rng(seed).standard_normal(steps))


def spiky(steps, *rows, norm=8.0, seed=0):
    norms = noise(steps, seed)
    norms[list(rows)] = norm
    return norms


def falling(steps):
    return noise(steps) * (0.5 + 8 * np.exp(-np.arange(steps) / 10))


def recorded(norms, **fields):
    norms = np.asarray(norms, float)
    recording = Recording(norms, np.arange(norms.size), None, "JSON lines", "grad_norm", name="log.jsonl")
    return recording._replace(**fields)


def reported(text, recording):
    return report_on(recording, text)["rules"][0]


def report_on(recording, *texts):
    return make_report(recording, [parse_spec(text) for text in texts])[0]


def flags(text, recording):
    return report_on(recording, text)["flags"]


def about(word, sentences):
    return [sentence for sentence in sentences if word in sentence]


# Hindsight


def usable_by_hand(x):
    """A finite norm above zero, whose square is finite in float32, too."""
    with np.errstate(over="ignore"):
        return x > 0 and bool(np.isfinite(np.square(np.float32(x))))


def median_by_hand(norms):
    kept = [x for x in norms if usable_by_hand(x)]
    around = [np.median(kept[max(0, i - 50) : i + 51]) for i in range(len(kept))] or [NAN]
    found, last = [], 0
    for x in norms:
        found.append(around[last] if usable_by_hand(x) else around[max(last - 1, 0)])
        last += usable_by_hand(x)
    return np.asarray(found)


def outliers_by_hand(norms):
    median, found, before = median_by_hand(norms), [], []
    for i, x in enumerate(norms):
        usable = usable_by_hand(x)
        found.append(
            bool(usable and before)
            and x > 2 * median[i]
            and (x > 1.3 * np.median(before[-5:]) or x > 1.3 * np.median(before[-50:]))
        )
        before += [x] if usable else []
    return np.asarray(found)
