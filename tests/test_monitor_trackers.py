"""W&B, whose offline files are read back, and trackio, of which a stand-in keeps what it is told."""

import json
import struct
import sys
import types

import jax.numpy as jnp
import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from tests.test_monitor import read_rows
from zclip_jax.monitor import JsonLines, Monitor, Trackio, Wandb


def offline_records(folder):
    """What is in the files of offline runs below a folder, the oldest first: a log of LevelDB's kind."""
    wandb.teardown()  # ends the process that writes them, which may be behind
    for path in sorted(folder.rglob("*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            _, size, kind = struct.unpack_from("<IHB", data, at) if left >= 7 else (0, 0, 0)
            if not kind:  # the rest of a block is filled up
                at += left
                continue
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # a whole record, or the last part of one
                yield Record.FromString(whole)
                whole = b""


def history(folder):
    """The rows of offline runs, with W&B's own step as `_step`."""
    rows = []
    for record in offline_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in items.items()})
    return rows


@pytest.fixture
def offline(tmp_path, monkeypatch):
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    return lambda: Wandb(project="llama", id="one", resume="allow", mode="offline", dir=str(tmp_path))


def log_steps(monitor, *steps):
    for step in steps:
        monitor.log(step, {"loss": jnp.float32(step / 4), "nan": float("nan"), "yes": jnp.asarray(True)})


def test_every_row_is_in_the_run_after_rewinds_and_a_resume(tmp_path, offline):
    log = tmp_path / "metrics.jsonl"
    for start in (0, 3):
        with Monitor([offline(), JsonLines(log)], timeout=60) as monitor:
            monitor.rewind(start)
            log_steps(monitor, *range(start + 1, start + 6))
            monitor.rewind(start + 2)
            log_steps(monitor, *range(start + 3, start + 5))
        assert monitor.lost == {}
    rows, logged = history(tmp_path), read_rows(log)
    assert [row["_step"] for row in rows] == [row["update"] for row in logged] == list(range(1, 15))
    for name in ("update", "step", "attempt"):
        assert [row[f"train/{name}"] for row in rows] == [row[name] for row in logged]
    assert [row["loss"] for row in rows] == [row["loss"] for row in logged]
    assert {(str(row["nan"]), row["yes"]) for row in rows} == {("nan", True)}
    metrics = [record.metric for record in offline_records(tmp_path) if record.HasField("metric")]
    assert [metric.step_metric for metric in metrics if metric.glob_name == "*"] == ["train/step"] * 2


def test_a_run_that_holds_more_than_the_log_loses_nothing(tmp_path, offline):
    with Monitor([offline()], timeout=60) as monitor:
        log_steps(monitor, 1)
        monitor.flush()
        monitor.sinks[0].run.log({"image": 1}, step=7, commit=True)
        log_steps(monitor, 2, 3)
    assert [(row["_step"], row.get("train/step")) for row in history(tmp_path)] == [
        (1, 1),
        (7, 1),  # W&B fills the step in
        (8, 2),
        (9, 3),
    ]


def test_our_sink_is_a_backend_of_metrax(tmp_path, offline):
    sink = offline()
    for step in (1, 2):
        sink.log_scalar("loss", step / 4, step=step)
        sink.log_scalar("norm", 2.0, step=step)
    sink.close()
    assert [(row["_step"], row["loss"], row["norm"]) for row in history(tmp_path)] == [
        (1, 0.25, 2),
        (2, 0.5, 2),
    ]


class StandIn(types.ModuleType):
    """Of a package whose `init` starts runs: of wandb's on a server, or of trackio's."""

    def __init__(self, name, summary=None, error=None):
        super().__init__(name)
        self.summary, self.error, self.told, self.step = summary or {}, error, [], len(summary or {})

    def init(self, **settings):
        self.told.append(settings)
        if self.error is not None:
            raise self.error
        return self

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, row, **at):
        self.told.append((row, at))

    def finish(self):
        self.told.append("finished")


def test_a_run_resumed_online_goes_on_with_its_numbers(monkeypatch):
    wandb = StandIn("wandb", {"train/update": 20, "train/step": 15, "train/attempt": 2})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Monitor([Wandb(id="one", resume="must")]) as monitor:
        monitor.rewind(10)
        assert monitor.log(11, {"loss": 1.0}) == 21
    place = {"train/update": 21, "train/step": 11, "train/attempt": 3}
    assert wandb.told == [
        {"id": "one", "resume": "must"},
        (place | {"loss": 1.0}, {"step": 21, "commit": True}),
        "finished",
    ]


@pytest.mark.parametrize(("kind", "module"), [(Wandb, "wandb"), (Trackio, "trackio")])
def test_a_run_that_cannot_be_started_is_tried_once(monkeypatch, caplog, kind, module):
    stand_in = StandIn(module, error=ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, module, stand_in)
    with Monitor([kind(project="llama")]) as monitor:
        for step in (1, 2, 3):
            monitor.log(step, {"loss": 1.0})
    assert monitor.lost == {kind.__name__: 3}
    assert stand_in.told == [{"project": "llama"}]
    assert sum("ConnectionError: no network" in message for message in caplog.messages) == 1


def test_trackio_has_the_update_as_its_step(monkeypatch):
    trackio = StandIn("trackio")
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with Monitor([Trackio(project="llama", name="one")]) as monitor:
        monitor.log(1, {"loss": 1.0})
        monitor.rewind(0)
        monitor.log(1, {"loss": 2.0})
    assert trackio.told == [
        {"project": "llama", "name": "one"},
        ({"train/update": 1, "train/step": 1, "train/attempt": 0, "loss": 1.0}, {"step": 1}),
        ({"train/update": 2, "train/step": 1, "train/attempt": 1, "loss": 2.0}, {"step": 2}),
        "finished",
    ]


@pytest.mark.parametrize(("kind", "module"), [(Wandb, "wandb"), (Trackio, "trackio")])
def test_a_missing_package_is_named_at_once(monkeypatch, kind, module):
    monkeypatch.setitem(sys.modules, module, None)
    named = rf"{kind.__name__} needs {module}: pip install 'zclip-jax\[{module}\]'"
    with pytest.raises(ImportError, match=named):
        kind()
