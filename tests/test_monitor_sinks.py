"""Sinks: files and their faults, and sinks that fail or hang."""

import io
import json
import math
import shutil
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from tests.test_monitor import as_board, last_attempts, places, read_board, read_rows, same
from zclip_jax.monitor import JsonLines, Monitor, TensorBoard, _events, _json_lines, _worker


def log_steps(monitor, *steps):
    for step in steps:
        monitor.log(step, {"loss": jnp.float32(step / 4)})


class Listing:
    """A sink as metrax has them."""

    def __init__(self):
        self.calls, self.closed = [], 0

    def log_scalar(self, event, value, **kwargs):
        self.calls.append((event, value, kwargs))

    def close(self):
        self.closed += 1


# JSON lines


def test_rows_are_objects_on_lines(tmp_path):
    path = tmp_path / "runs" / "1" / "metrics.jsonl"
    values = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "n": 3, "yes": True, "x": 0.1}
    with Monitor([JsonLines(path, config={"lr": 0.1})]) as monitor:
        monitor.log(1, values)
    assert path.read_text() == (
        '{"config": {"lr": 0.1}}\n{"update": 1, "step": 1, "attempt": 0, "nan": "nan", "inf": "inf", '
        '"minus": "-inf", "n": 3, "yes": true, "x": 0.1}\n'
    )


def test_a_file_is_appended_to(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in ((1, 2), (3, 4)):
        with Monitor([JsonLines(path, config={"lr": steps[0]})]) as monitor:
            log_steps(monitor, *steps)
    config, *rows = read_rows(path)
    assert config == {"config": {"lr": 1}}
    assert places(rows) == [(1, 1, 0), (2, 2, 0), (3, 3, 1), (4, 4, 1)]


def test_nothing_is_made_before_the_first_row(tmp_path):
    with Monitor([JsonLines(tmp_path / "a" / "metrics.jsonl"), TensorBoard(tmp_path / "b")]) as monitor:
        monitor.rewind(3)
        monitor.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_is_no_json_is_refused_at_once(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        JsonLines(tmp_path / "metrics.jsonl", config={"dtype": jnp.float32})
    with Monitor([JsonLines(tmp_path / "metrics.jsonl", config={"cap": math.inf})]) as monitor:
        log_steps(monitor, 1)
    assert read_rows(tmp_path / "metrics.jsonl")[0] == {"config": {"cap": "inf"}}


WHOLE = '{"update": 5, "step": 5, "attempt": 0, "loss": 1.5}'


@pytest.mark.parametrize(
    ("end", "lines", "place"),
    [
        ("", 1, None),
        (WHOLE + "\n", 2, (6, 6, 1)),
        (WHOLE, 2, (6, 6, 1)),
        (WHOLE + "\n" + WHOLE[:-9], 3, (6, 6, 1)),
        (WHOLE + "\n\0\0\0\0", 3, (6, 6, 1)),
        (WHOLE + "\n{}\n7\n", 4, (6, 6, 1)),
        (WHOLE[:20], 2, None),
        (WHOLE + "\n" + '{"x": "' + 300_000 * "x", 3, (6, 6, 1)),
        ('{"config": {"step": 9}}\n', 2, None),
        ('{"config": {"steps": 9}}\n' + 2000 * (WHOLE + "\n"), 2002, (6, 6, 1)),
    ],
)
def test_the_end_of_an_earlier_process(tmp_path, end, lines, place):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(end.encode())
    with Monitor([JsonLines(path)]) as monitor:
        log_steps(monitor, 6)
    whole = path.read_text(errors="replace").splitlines()
    assert len(whole) == lines
    last = json.loads(whole[-1])
    assert places([last]) == [place or (6, 6, 0)]
    assert last["loss"] == 1.5
    assert monitor.lost == {}


@given(st.binary(max_size=60), st.integers(1, 40))
def test_the_last_row_in_any_bytes(tmp_path_factory, before, tail):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    expected = None
    for line in before.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        expected = row if isinstance(row, dict) and "step" in row else expected
    path.write_bytes(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_json_lines, "TAIL", tail)
        assert JsonLines(path).last_row() == expected
        path.write_bytes(WHOLE.encode() + b"\n" + before)
        assert JsonLines(path).last_row() == (expected or json.loads(WHOLE))


@pytest.mark.parametrize(
    ("name", "alarms"), [("metrics.jsonl", "alarms.jsonl"), ("run1.jsonl", "run1.alarms.jsonl")]
)
def test_findings_are_lines_beside(tmp_path, name, alarms):
    with Monitor([JsonLines(tmp_path / name)]) as monitor:
        for step in range(1, 12):
            monitor.log(step, {"zclip/grad_norm": math.nan})
    place = {"update": 10, "step": 10, "attempt": 0}
    assert read_rows(tmp_path / alarms) == [
        place | {"alarm": "nonfinite", "message": "no finite norm for 10 steps"}
    ]


# TensorBoard


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.booleans()),
        max_size=5,
    ),
    st.integers(-(2**40), 2**62),
)
def test_events_are_read_back(values, step):
    event = event_pb2.Event.FromString(_events.scalars(step, values))
    assert event.step == step
    read = {value.tag: value.simple_value for value in event.summary.value}
    with np.errstate(over="ignore"):
        same(read, {name: float(np.float32(x)) for name, x in values.items()})
    start = event_pb2.Event.FromString(_events.start(step))
    assert (start.step, start.session_log.status) == (step, event_pb2.SessionLog.START)


@given(st.binary(max_size=500))
def test_checksums_are_tensorboards(data):
    assert int.from_bytes(_events._masked_crc(data), "little") == masked_crc32c(data)


def test_files_sort_by_age_whatever_the_clock(tmp_path, monkeypatch):
    for clock in (2e9, 2e9, 1e9, 2.5e9):
        monkeypatch.setattr(_events.time, "time", lambda clock=clock: clock)
        _events.EventFile(tmp_path).close()
    numbers = sorted(path.name.split(".")[3] for path in tmp_path.iterdir())
    assert numbers == ["2000000000", "2000000001", "2000000002", "2500000000"]


def test_a_folder_in_a_bucket_is_refused():
    with pytest.raises(ValueError, match="folder must be on a local disk, got 'gs://bucket/run'"):
        TensorBoard("gs://bucket/run")


def test_a_resumed_run_without_another_log(tmp_path):
    """The event files alone tell that there was a run."""
    for steps in ((1, 2, 3), (2, 3, 4)):
        with Monitor([TensorBoard(tmp_path)]) as monitor:
            log_steps(monitor, *steps)
    assert read_board(tmp_path)["loss"] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_steps_of_one_file_that_were_rewound(tmp_path):
    with Monitor([TensorBoard(tmp_path)]) as monitor:
        log_steps(monitor, 1, 2, 3, 4)
        monitor.rewind(1)
        log_steps(monitor, 2)
    assert read_board(tmp_path)["loss"] == [(1, 0.25), (2, 0.5)]
    assert read_board(tmp_path)["update"] == [(1, 1.0), (2, 5.0)]


# Faults

FULL_DISK = """
import resource, sys, pathlib
from zclip_jax.monitor import JsonLines, Monitor, TensorBoard
folder = pathlib.Path(sys.argv[1])
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
with Monitor([JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "tensorboard")]) as monitor:
    for step in range(1, 200):
        monitor.log(step, {f"loss/{i}": step / 4 for i in range(step % 7 + 1)})
    monitor.rewind(150)
    monitor.log(151, {"loss/0": 1.0})
    monitor.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for step in range(152, 160):
        monitor.log(step, {"loss/0": step / 4})
print(monitor.lost["JsonLines"], monitor.lost["TensorBoard"])
"""


def test_a_full_disk(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    rows = read_rows(tmp_path / "metrics.jsonl")
    kept = [row for row in rows if "attempt" in row]
    lost, lost_by_board = map(int, ran.stdout.split())
    assert lost == 208 - len(kept) > 100
    assert [row["step"] for row in kept[-8:]] == list(range(152, 160))
    board = read_board(tmp_path / "tensorboard")
    assert 100 < lost_by_board < 200
    steps = [step for step, _ in board["loss/0"]]
    assert len(steps) == 208 - lost_by_board
    assert steps[-8:] == list(range(152, 160))
    assert all(value == step / 4 for step, value in board["loss/0"])
    assert ran.stderr.count("JsonLines lost the row of update ") == 1
    assert ran.stderr.count("File too large") == 2
    assert f"JsonLines lost {lost} rows" in ran.stderr


KILLED = """
import os, signal, sys, pathlib
from zclip_jax.monitor import JsonLines, Monitor, TensorBoard
folder = pathlib.Path(sys.argv[1])
monitor = Monitor([JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "tensorboard")])
for step in range(1, 100):
    monitor.log(step, {"loss": step / 4})
    if step == 50:
        monitor.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert killed.returncode == -9
    path, board = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    there = read_rows(path)
    assert places(there) == [(step, step, 0) for step in range(1, len(there) + 1)]
    assert len(there) >= 50
    with Monitor([JsonLines(path), TensorBoard(board)]) as monitor:
        monitor.rewind(50)
        log_steps(monitor, *range(51, 60))
    rows = read_rows(path)
    assert places(rows)[-1] == (len(there) + 9, 59, 1)
    same(read_board(board), as_board(last_attempts(rows)))


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    below, rows = tmp_path / "file", []
    sinks = [JsonLines(below / "metrics.jsonl"), TensorBoard(below / "board")]
    with Monitor(sinks, on_row=rows.append) as monitor:
        log_steps(monitor, 1, 2, 3)
    assert len(rows) == 3
    assert monitor.lost == {"JsonLines": 3, "TensorBoard": 3}
    told = [message for message in caplog.messages if "training goes on" in message]
    assert len(told) == 2
    assert all("NotADirectoryError" in message or "FileExistsError" in message for message in told)


def test_writes_that_fail_now_and_then(tmp_path, monkeypatch):
    calls = []

    class Full(io.FileIO):
        def write(self, data):
            calls.append(data)
            if len(calls) % 3 == 0:
                super().write(data[:7])
                raise OSError(28, "No space left on device")
            return super().write(data[:11] if len(calls) % 2 else data)

    monkeypatch.setattr(_json_lines.Path, "open", lambda path, mode, **_: Full(path, mode.replace("b", "")))
    path = tmp_path / "metrics.jsonl"
    with Monitor([JsonLines(path)]) as monitor:
        log_steps(monitor, *range(1, 31))
    monkeypatch.undo()
    rows = read_rows(path)
    assert len(rows) == 30 - monitor.lost["JsonLines"] > 5
    assert all(row["loss"] == row["step"] / 4 for row in rows)


def test_files_that_somebody_deletes_are_made_anew(tmp_path):
    run = tmp_path / "run"
    with Monitor([JsonLines(run / "metrics.jsonl"), TensorBoard(run / "board")]) as monitor:
        log_steps(monitor, 1, 2)
        monitor.flush()
        shutil.rmtree(run)
        log_steps(monitor, 3, 4)
    assert places(read_rows(run / "metrics.jsonl")) == [(3, 3, 0), (4, 4, 0)]
    assert read_board(run / "board")["loss"] == [(3, 0.75), (4, 1.0)]


class Failing(Listing):
    def log_scalar(self, event, value, **kwargs):
        super().log_scalar(event, value, **kwargs)
        raise RuntimeError("no network")

    def close(self):
        super().close()
        raise RuntimeError("no network at all")


def test_a_sink_that_raises(tmp_path, caplog):
    sinks = [Failing(), JsonLines(tmp_path / "metrics.jsonl"), Failing()]
    with Monitor(sinks) as monitor:
        log_steps(monitor, 1, 2, 3)
    assert monitor.lost == {"Failing 1": 3, "Failing 2": 3}
    assert [len(sink.calls) for sink in sinks[::2]] == [12, 12]  # each scalar is tried
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert caplog.messages.count("Failing 1 lost 3 rows") == 1
    assert sum("RuntimeError: no network; training goes on" in text for text in caplog.messages) == 2


class Exiting(Listing):
    def log_scalar(self, event, value, **kwargs):
        raise SystemExit(3)


def test_a_sink_that_exits():
    with Monitor([Exiting()]) as monitor:
        log_steps(monitor, 1, 2, 3)
    assert monitor.lost == {"Exiting": 3}


class Hanging(Listing):
    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def log_scalar(self, event, value, **kwargs):
        self.go_on.wait()
        super().log_scalar(event, value, **kwargs)


def test_a_sink_that_hangs(tmp_path, caplog):
    hanging, path = Hanging(), tmp_path / "metrics.jsonl"
    with Monitor([hanging, JsonLines(path)], timeout=1) as monitor:
        for step in range(1, 101):
            log_steps(monitor, step)
            if step % 10 == 0:
                monitor.flush()  # waits the first time only
                assert len(read_rows(path)) == step
    assert monitor.lost == {"Hanging": 100}
    assert caplog.messages == [
        "Hanging does not answer, and is waited for no more; training goes on, Monitor.lost counts",
        "Hanging lost 100 rows",
    ]
    hanging.go_on.set()


def test_a_sink_that_hangs_for_a_while():
    hanging = Hanging()
    with Monitor([hanging], timeout=0.1) as monitor:
        log_steps(monitor, 1, 2)
        monitor.flush()
        assert monitor.lost == {}
        hanging.go_on.set()
        monitor.timeout = 60
        log_steps(monitor, 3)
    assert monitor.lost == {}
    assert [value for event, value, _ in hanging.calls if event == "loss"] == [0.25, 0.5, 0.75]
    assert hanging.closed == 1


def test_a_sink_that_is_too_slow_loses_rows(monkeypatch, caplog):
    monkeypatch.setattr(_worker, "LIMIT", 5)
    hanging = Hanging()
    with Monitor([hanging], timeout=60) as monitor:
        log_steps(monitor, *range(1, 21))
        monitor.log(21, {})
        lost = monitor.lost["Hanging"]
        assert lost in (14, 15)  # one may have left the queue
        hanging.go_on.set()
    assert monitor.lost["Hanging"] in (lost, lost + 1)
    updates = {kwargs["step"] for _, _, kwargs in hanging.calls}
    assert len(updates) == 21 - monitor.lost["Hanging"]
    assert "Hanging is 5 rows behind and loses rows" in caplog.text


def test_a_callback_that_raises(tmp_path, caplog):
    def full(row):
        raise OSError(28, "No space left on device")

    with Monitor([JsonLines(tmp_path / "metrics.jsonl")], on_row=full) as monitor:
        log_steps(monitor, 1, 2, 3)
    assert monitor.lost == {"on_row": 3}
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3
    assert sum("on_row failed at update 1" in message for message in caplog.messages) == 1


def test_closed_by_an_error_in_training(tmp_path):
    def train(monitor):
        with monitor:
            log_steps(monitor, 1, 2)
            return 1 / 0

    monitor = Monitor([JsonLines(tmp_path / "metrics.jsonl")])
    with pytest.raises(ZeroDivisionError):
        train(monitor)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2
    monitor.close()
    with pytest.raises(ValueError, match="the monitor is closed, and step 3 can't be logged"):
        monitor.log(3, {})


FORGOTTEN = """
import sys
from zclip_jax.monitor import JsonLines, Monitor
Monitor([JsonLines(sys.argv[1])]).log(1, {"loss": 2.5})
"""


def test_a_monitor_that_nobody_closes(tmp_path):
    subprocess.run([sys.executable, "-c", FORGOTTEN, str(tmp_path / "metrics.jsonl")], check=True)
    assert [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2.5]
