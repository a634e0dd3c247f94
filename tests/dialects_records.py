"""The dialects of records: what trainers write as JSON, CSV, Parquet and TensorBoard events."""

import csv
import io
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet
import tensorboardX
from tensorboard.compat.proto import event_pb2, summary_pb2

from tests.dialects import Row


class Shape(NamedTuple):
    """The record of a row: numbers as spelled, which each format makes its own of.

    Args:
      record: name to value, dictionaries within it included.
      steps: as in `Dialect`.
      loss: whether it has the loss under a usual name.
      nested: it is no row of a table.
      refused: what an error may say in place of a recording.
    """

    record: Callable[[Row], dict[str, Any]]
    steps: bool | None = True
    loss: bool = True
    nested: bool = False
    refused: str = ""


class Number(str):
    """A number as it is spelled."""

    __slots__ = ()


def flat(step: str, norm: str, loss: str, **others: Any) -> Callable[[Row], dict[str, Any]]:
    return lambda r: {step: r.step, loss: Number(r.loss), norm: Number(r.norm), **others}


SHAPES = {
    "plain": Shape(flat("step", "grad_norm", "loss")),
    "norm alone": Shape(lambda r: {"grad_norm": Number(r.norm), "step": r.step}, loss=False),
    "Hugging Face": Shape(
        lambda r: {
            "epoch": Number(r.epoch),
            "grad_norm": Number(r.norm),
            "learning_rate": 1.2e-05,
            "loss": Number(r.loss),
            "step": r.step,
        }
    ),
    "epochs alone": Shape(
        lambda r: {"loss": Number(r.loss), "grad_norm": Number(r.norm), "epoch": Number(r.epoch)}, steps=False
    ),
    "W&B history": Shape(
        flat(
            "_step", "train/grad_norm", "train/loss", _runtime=61.5, _timestamp=1.77e9, **{"train/epoch": 0.5}
        )
    ),
    "W&B export": Shape(
        lambda r: {
            "Step": r.step,
            "fast-owl-3 - train/grad_norm": Number(r.norm),
            "fast-owl-3 - train/grad_norm__MIN": 0.001,
            "fast-owl-3 - train/grad_norm__MAX": 91.5,
        },
        loss=False,
    ),
    "W&B export, global step": Shape(
        lambda r: {
            "train/global_step": r.step,
            "a - train/grad_norm__MIN": 0.001,
            "a - train/grad_norm__MAX": 91.5,
            "a - train/grad_norm": Number(r.norm),
            "a - _step": r.step,
        },
        loss=False,
    ),
    "Lightning": Shape(
        lambda r: {
            "epoch": 0,
            "grad_norm_epoch": "",
            "grad_norm_step": Number(r.norm),
            "step": r.step,
            "train_loss_step": Number(r.loss),
        },
        loss=False,
    ),
    "ms-swift, file": Shape(
        lambda r: {
            "loss": Number(r.loss),
            "grad_norm": Number(r.norm),
            "memory(GiB)": 9.1,
            "epoch": 0.5,
            "global_step/max_steps": f"{r.step}/{r.total}",
            "percentage": "2.28%",
        }
    ),
    "LLaMA-Factory": Shape(
        lambda r: {
            "current_steps": r.step,
            "total_steps": r.total,
            "loss": Number(r.loss),
            "grad_norm": Number(r.norm),
        },
        steps=None,
    ),
    "Levanter": Shape(
        flat(
            "global_step",
            "grad/norm/total",
            "train/loss",
            **{"params/norm/total": 812.5, "grad/norm/wte": 0.01},
        )
    ),
    "EasyLM, file": Shape(flat("step", "gradient_norm", "loss", param_norm=812.5)),
    "MaxText, file": Shape(
        lambda r: {
            "step": r.step,
            "learning/loss": Number(r.loss),
            "learning/grad_norm": 0.0625,
            "learning/raw_grad_norm": Number(r.norm),
            "learning/param_norm": 812.5,
        }
    ),
    "limit first": Shape(
        flat("iteration", "grad_norm", "lm loss", max_grad_norm=1.0, grad_norm_clipped=0.25)
    ),
    "index ahead": Shape(
        lambda r: {"": r.step // 2, "step": r.step, "grad_norm": Number(r.norm)}, loss=False
    ),
    "long form": Shape(
        lambda r: {"step": r.step, "tag": "grad_norm", "value": Number(r.norm)},
        loss=False,
        refused="no gradient norm",
    ),
    "a key deeper": Shape(
        lambda r: {"step": r.step, "train": {"grad_norm": Number(r.norm), "loss": Number(r.loss)}},
        nested=True,
    ),
    "all deeper": Shape(
        lambda r: {
            "time": 1.5,
            "train": {"step": r.step, "grad_norm": Number(r.norm), "loss": Number(r.loss)},
        },
        nested=True,
        loss=False,
    ),
    "verl, file": Shape(
        lambda r: {
            "step": r.step,
            "data": {"actor/pg_loss": Number(r.loss), "actor/grad_norm": Number(r.norm)},
        },
        loss=False,
        nested=True,
    ),
    "keys all the way": Shape(
        lambda r: {
            "step": r.step,
            "loss": Number(r.loss),
            "optim": {"grad": {"norm": Number(r.norm), "max": 9.5}},
        },
        nested=True,
        loss=False,
        refused="no gradient norm",
    ),
    "message beside": Shape(
        lambda r: {
            "level": "info",
            "message": f"step {r.step} grad_norm {r.norm}",
            "extra": {"step": r.step, "grad_norm": Number(r.norm)},
        },
        steps=None,
        loss=False,
        nested=True,
    ),
    "Docker": Shape(
        lambda r: {
            "log": f"step {r.step} | loss {r.loss} | grad norm {r.norm}\n",
            "stream": "stdout",
            "time": "2026-05-01T10:00:01Z",
        },
        loss=False,
        nested=True,
        refused="no gradient norm",
    ),
}


def number(spelled: str, as_string: bool = False) -> Any:
    if as_string:
        return str(spelled)
    value = float(spelled)
    return int(spelled) if spelled.isdigit() else value


def plain(record: Any, as_string: bool = False) -> Any:
    """The record with numbers in place of their spellings."""
    if isinstance(record, dict):
        return {name: plain(value, as_string) for name, value in record.items()}
    return number(record, as_string) if isinstance(record, Number) else record


def json_lines(records: Iterable[dict[str, Any]], as_string: bool = False) -> bytes:
    return "".join(json.dumps(plain(record, as_string)) + "\n" for record in records).encode()


def json_list(records: Iterable[dict[str, Any]], indent: int | None = None) -> bytes:
    return json.dumps([plain(record) for record in records], indent=indent).encode()


def trainer_state(records: Iterable[dict[str, Any]], indent: int | None = 2) -> bytes:
    history = [plain(record) for record in records]
    return json.dumps({"epoch": 1.0, "log_history": history, "max_steps": 400000}, indent=indent).encode()


def header_of(records: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record))


def table(
    records: list[dict[str, Any]], delimiter: str = ",", quoted: bool = False, header_again: int = 0
) -> str:
    """A CSV, its header written once more ahead of row `header_again`, if that is not 0."""
    file = io.StringIO()
    writer = csv.writer(
        file, delimiter=delimiter, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL, lineterminator="\n"
    )
    names = header_of(records)
    for i, record in enumerate(records):
        if i == 0 or i == header_again:
            writer.writerow(names)
        writer.writerow([record.get(name, "") for name in names])
    return file.getvalue()


def parquet(records: list[dict[str, Any]], kind: Any = None) -> bytes:
    rows = [plain(record) for record in records]
    names = [name for name in header_of(rows) if name]
    columns: dict[str, Any] = {}
    for name in names:
        values = [None if row.get(name, "") == "" else row[name] for row in rows]
        mixed = {type(value) for value in values if value is not None} == {int, float}
        values = [float(value) if mixed and value is not None else value for value in values]
        columns[name] = pa.array(values, kind if kind is not None and "norm" in name else None)
    file = io.BytesIO()
    pa.parquet.write_table(pa.table(columns), file, row_group_size=3)
    return file.getvalue()


def events(path: str, rows: Iterable[Row], norm: str, loss: str, purged_from: int | None = None) -> None:
    """An event file; with a first event that says from which step on earlier ones are void."""
    writer = tensorboardX.record_writer.RecordWriter(path)
    writer.write(event_pb2.Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
    if purged_from is not None:
        start = event_pb2.Event(wall_time=1.0, step=purged_from)
        start.session_log.status = start.session_log.START
        writer.write(start.SerializeToString())
    for row in rows:
        for tag, value in ((loss, float(row.loss)), (norm, row.value), ("lr", 0.1)):
            event = event_pb2.Event(wall_time=1.0, step=row.step)
            event.summary.value.append(summary_pb2.Summary.Value(tag=tag, simple_value=value))
            writer.write(event.SerializeToString())
    writer.close()
