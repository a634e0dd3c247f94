"""Runs on disk to look at: a metrics.jsonl as `JsonLines` writes it, with records and alarms beside it."""

import json
import math

import numpy as np


def row(step, norm=0.5, *, attempt=0, update=None, trigger=2.0, cap=None, **more):
    """One row; steps above the trigger fire, and those above the cap are capped."""
    fired, capped = norm > trigger, cap is not None and norm > cap
    allowed = min(norm, trigger if fired else math.inf, cap if capped else math.inf)
    finite = math.isfinite(norm)
    values = {
        "grad_norm": norm,
        "trigger": trigger,
        "clip_scale": allowed / norm if finite else 0.0,
        "fired": fired and finite,
        "bound": fired and finite,
        "capped": capped and finite,
        "nonfinite": not finite,
    }
    place = {"update": step if update is None else update, "step": step, "attempt": attempt}
    return place | {"loss": 3.0} | {f"zclip/{name}": plain(x) for name, x in values.items()} | more


def plain(x):
    return x if isinstance(x, bool) or math.isfinite(x) else str(x)


def record(step, group="layers/7/attn/wq", *, update=None, **more):
    return {
        "watch": "grads",
        "kind": "spike",
        "step": step,
        "norm": 12.3,
        "level": 0.4,
        "times_level": 31.0,
        "allowed": 0.41,
        "share": {"group": "lm_head", "share": 0.9, "norm": 11.0},
        "rise": {"group": group, "norm": 5.0, "times_level": 58.0, "z_score": 9.0},
        "num_groups": 147,
        "num_nonfinite": 0,
        "nonfinite": [],
        "update": step if update is None else update,
        "attempt": 0,
        "data_index": step - 1,
        "row_ids": [70, 71, 72],
        "rows": [{"row_id": 71, "position": 1, "loss": 9.5, "norm": 30.0, "share": 0.97}],
        "rows_params_step": step + 1,
        "text": "zzz zzz",
        "decision": {"fired": True, "bound": True, "capped": False, "clip_scale": 0.033, "grad_norm": 12.3},
    } | more


def lines(rows):
    return "".join(json.dumps(one) + "\n" for one in rows)


def add(path, rows):
    with path.open("a") as file:
        file.write(lines(rows))


def spiky_rows(steps=300, spikes=(150,), seed=0):
    norms = np.exp(0.1 * np.random.default_rng(seed).standard_normal(steps))
    norms[np.asarray(spikes, int) - 1] = 12.3
    return [row(step, float(norm)) for step, norm in enumerate(norms, 1)]
