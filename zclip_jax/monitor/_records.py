"""Records of spikes as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zclip_jax._spikes import SpikeRecord
from zclip_jax.monitor._rows import RowReport
from zclip_jax.monitor._run import make_records
from zclip_jax.monitor._tail import Objects

MOST = 20  # steps that an error names


def find_records(path: Path, step: int) -> list[SpikeRecord]:
    """The records of a step in the folder of a run, or in a file of records; those of all attempts.

    Raises:
      OSError: there is no such folder or file.
      ValueError: there is no record of that step.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no run {path}")
    file = path / "spikes.jsonl" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"there are no records of spikes: {file} does not exist")
    records = make_records(Objects(file).update())
    found = [record for record in records if record["step"] == step]
    if not found:
        steps = sorted({record["step"] for record in records})
        nearest = sorted(sorted(steps, key=lambda other: abs(other - step))[:MOST])
        which = "the nearest are of" if len(steps) > MOST else "there are those of"
        known = f"{which} {', '.join(map(str, nearest))}" if steps else "there is none of any step"
        raise ValueError(f"no record of step {step} in {file}: {known}")
    return found


def describe_record(record: Mapping[str, Any]) -> str:
    """Everything that a record says, on several lines; also what a loop has added to it.

    Args:
      record: of a spike. Of the keys that a loop may add it prints `decision` (metrics of the clip), `data_index`,
        `row_ids`, `update`, `attempt`, `rows` (the first of a `row_report`), `rows_params_step` (the step that left
        the parameters which the rows were measured with) and `text` (of the worst row).

    Examples:
      >>> import jax.numpy as jnp
      >>> from zclip_jax import spikes, watch
      >>> from zclip_jax.monitor import describe_record
      >>> tx, params = watch("grads"), {"a": jnp.ones(2)}
      >>> state = tx.init(params)
      >>> for size in [1.0, 1.0, 40.0]:
      ...     _, state = tx.update({"a": jnp.ones(2) * size}, state)
      >>> print(describe_record(spikes(state, params)[-1] | {"update": 7}))
      step 3: norm 56.6, 40x its level, allowed 1.45 · a: 100 % of it, 40x its own level
      when       update 7, attempt 0
    """
    lines = [str(SpikeRecord(record))]
    if decision := record.get("decision"):
        lines.append(f"decision   {describe_decision(decision)}")
    if (ids := record.get("row_ids")) is not None:
        shown = ", ".join(map(str, ids))
        lines.append(f"data       batch {record.get('data_index')}, {len(ids)} rows: {shown}")
    if "update" in record:
        lines.append(f"when       update {record['update']}, attempt {record.get('attempt', 0)}")
    if rows := record.get("rows"):
        after = record.get("rows_params_step")
        since = "" if after is None else f", with the parameters after step {after}"
        lines += [
            f"worst rows of the batch{since}",
            *(f"  {line}" for line in str(RowReport(rows)).splitlines()),
        ]
    if text := record.get("text"):
        lines.append(f"  the first reads {text!r}")
    return "\n".join(lines)


def describe_decision(decision: Mapping[str, Any]) -> str:
    """What clipping did to the step."""
    what = [name for name in ("fired", "bound", "capped") if decision.get(name)]
    scale = float(decision.get("clip_scale", 1.0))
    done = f"scaled by {scale:.3g}" if scale != 1 else "left as it was"
    norm = float(decision.get("grad_norm", "nan"))
    return f"norm {norm:.4g} {done}" + (f": {', '.join(what)}" if what else "")


def describe_rows(record: SpikeRecord) -> str:
    """In a few words, which rows were in the batch, the worst first."""
    if rows := record.get("rows"):
        parts = [f"{row['row_id']} ({100 * float(row['share']):.0f} %)" for row in rows[:3]]
        return f"rows {', '.join(parts)}"
    ids = record.get("row_ids") or []
    return f"rows {', '.join(map(str, ids[:4]))}{', …' if len(ids) > 4 else ''}" if ids else ""
