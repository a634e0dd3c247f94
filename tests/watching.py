"""What `watch` says of a series of norms, in NumPy."""

import numpy as np

KINDS = ("grads", "updates")


def history_oracle(norms):
    """Of each norm the level of those before, the norm as a multiple of it and its z-score; 0 where there is none."""
    mean, var, count, out = 0.0, 0.25, 0, []
    for n in norms:
        usable, level, times, z = np.isfinite(n) and n > 0, np.exp(mean) if count else 0.0, 0.0, 0.0
        if usable and count:
            d, std = np.log(n) - mean, max(np.sqrt(var), 0.2)
            times, z, near = np.exp(d), d / std, np.clip(d, -2.5 * std, 2.5 * std)
            mean += max(0.05, 3 / (count + 3)) * near
            var += max(0.02, 1 / (count + 4)) * (near**2 - var)
        elif usable:
            mean = np.log(n)
        count += usable
        out.append((level, times, z))
    return np.array(out).T


def furthest(histories, step):
    """The series furthest above its history, among those that have one; its multiple and z-score."""
    z = [history[2][step] if history[1][step] > 0 else -np.inf for history in histories]
    best = int(np.argmax(z))
    return best, *(histories[best][i][step] for i in (1, 2))


def watch_oracle(norms, weights, level_oracle):
    """The metrics of all steps by name, and what the last state remembers, of `watch` with `rules.level()`."""
    with np.errstate(all="ignore"):
        squares = np.square(norms)  # which may be infinite in float32
        wholes = np.sqrt(np.sum(squares, axis=1))
        norms = np.float64(np.sqrt(squares))
    absorbed = np.isfinite(wholes) & (wholes > 0)
    allowed = np.full(len(norms), np.inf)
    allowed[absorbed] = level_oracle(np.float64(wholes[absorbed]))
    histories, whole_history = [history_oracle(x) for x in norms.T], history_oracle(wholes)
    rows, moments, bad = [], {"last": None, "spike": None, "largest": None, "nonfinite": None}, norms[0] < 0
    for i, (whole, row) in enumerate(zip(np.float64(wholes), norms, strict=True)):
        finite = np.where(np.isfinite(row), row, 0.0)
        rise_group, rise, rise_z = furthest(histories, i)
        logged = {
            "norm": whole,
            "level": whole_history[0][i],
            "allowed": allowed[i],
            "fired": bool(np.isfinite(allowed[i])),
            "nonfinite": not np.isfinite(whole),
            "num_nonfinite_groups": int(np.sum(~np.isfinite(row))),
            "share_group": int(np.argmax(finite)),
            "share": np.max(finite) ** 2 / (np.sum(finite**2) or 1.0),
            "share_norm": np.max(finite),
            "rise_group": rise_group,
            "rise": rise,
            "rise_norm": row[rise_group] if rise > 0 else 0.0,
            "rise_z": rise_z,
        }
        rows.append(logged | {"norms": row, "nonfinite_groups": ~np.isfinite(row)})
        moment = logged | {"step": i + 1}
        moments["last"] = moment
        if logged["fired"]:
            moments["spike"] = moment
            old = moments["largest"]
            if old is None or whole / moment["level"] > old["norm"] / old["level"]:
                moments["largest"] = moment
        if logged["nonfinite"]:
            moments["nonfinite"], bad = moment, ~np.isfinite(row)
    if weights is not None:
        _add_ratios(rows, norms, np.float64(wholes), np.float64(weights))
    fired, nonfinite = ([row[name] for row in rows] for name in ("fired", "nonfinite"))
    metrics = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    metrics["num_steps"] = np.arange(1, len(rows) + 1)
    metrics["num_fired"], metrics["num_nonfinite"] = np.cumsum(fired), np.cumsum(nonfinite)
    nothing = dict.fromkeys(moments["last"], 0) | {"allowed": np.inf}
    state = {name: np.array([(x or nothing)[name] for x in moments.values()]) for name in nothing}
    return metrics, state | {"nonfinite_groups": bad}


def _add_ratios(rows, norms, wholes, weights):
    ratios = np.where(weights > 0, norms / np.where(weights > 0, weights, 1.0), 0.0)
    whole = wholes / np.sqrt(np.sum(weights**2))
    histories, whole_history = [history_oracle(x) for x in ratios.T], history_oracle(whole)
    for i, row in enumerate(rows):
        group, rise, _ = furthest(histories, i)
        row |= {"ratio": whole[i], "ratio_rise": whole_history[1][i]}
        row |= {"ratio_group": group, "ratio_group_rise": rise}
