"""Following a run: what is read of a file that grows, is truncated, replaced or not there; and what is shown."""

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.looked_at import add, lines, record, row, spiky_rows
from zclip_jax import cli
from zclip_jax.monitor import _logs
from zclip_jax.monitor._follow import Watcher
from zclip_jax.monitor._logs import OtherLog, RunLog, open_log, read_run
from zclip_jax.monitor._tail import ReplacedError, Tail
from zclip_jax.monitor._view import bins, draw, peaks, sparkline

NAN = math.nan


def steps_of(run):
    return run.columns["step"].astype(int).tolist()


def look(watcher):
    while watcher.look():
        pass
    return watcher


# What is read


@given(st.lists(st.binary(max_size=40).map(lambda x: x.replace(b"\r", b"")), max_size=12), st.data())
def test_a_tail_gives_each_whole_line_once(tmp_path_factory, chunks, data):
    path = tmp_path_factory.mktemp("tail") / "log"
    path.touch()
    tail, found, written = Tail(path), [], b""
    for chunk in chunks:
        with path.open("ab") as file:
            file.write(chunk)
        written += chunk
        while got := tail.read(data.draw(st.integers(1, 64))):
            found += got
    assert found == written.split(b"\n")[:-1]


def test_a_tail_knows_its_file_again(tmp_path):
    path = tmp_path / "log"

    def read_after(change):
        path.write_bytes(b"one\ntwo\n")
        tail = Tail(path)
        assert tail.read(100) == [b"one", b"two"]
        change()
        return tail.read(100)

    def replace(text):
        other = tmp_path / "other"
        other.write_bytes(text)
        other.replace(path)

    assert read_after(lambda: None) == []
    for change in (
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(b"one\n"),
        lambda: path.write_bytes(b"ONE\ntwo\nthree\n"),
        lambda: path.write_bytes(b"one\nTWO\nthree\n"),
        lambda: replace(b"one\ntwo\nthree\n"),
    ):
        with pytest.raises(ReplacedError):
            read_after(change)
    with pytest.raises(FileNotFoundError):
        read_after(path.unlink)


attempts = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=5)


@settings(deadline=None)
@given(attempts, st.integers(200, 5000))
def test_of_each_step_the_last_attempt_counts(tmp_path_factory, attempts, chunk):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    rows, update, top = [], 0, 0
    for attempt, (start, number) in enumerate(attempts):
        start = min(start, top + 1)
        for step in range(start, start + number):
            update += 1
            rows.append(row(step, norm=float(update), attempt=attempt, update=update))
        top = start + number - 1
    kept = {}
    for one in rows:
        kept = {step: update for step, update in kept.items() if step < one["step"]}
        kept[one["step"]] = one["update"]
    text, log = lines(rows), RunLog(path, path)
    for start in range(0, len(text), chunk):  # as it grows, lines cut anywhere
        with path.open("a") as file:
            file.write(text[start : start + chunk])
        log.update()
    columns = log.run().columns
    assert dict(zip(columns["step"], columns["update"], strict=True)) == kept
    np.testing.assert_array_equal(columns["grad_norm"], columns["update"])


def test_columns_are_those_of_the_clip(tmp_path):
    rows = [row(1, 0.5, trigger=math.inf), row(2, 5.0), row(3, 1.5, cap=1.0), row(4, NAN), row(5, 0.5)]
    rows[1] |= {"val_loss": 2.5, "watch/updates/ratio_rise": 3.5, "watch/grads/norm": 99.0}
    rows[0] |= {"watch/updates/ratio_rise": 0.0}
    (tmp_path / "metrics.jsonl").write_text(lines([{"config": {"clip": "zclip"}}, *rows]) + '{"step": 6, "lo')
    run = read_run(tmp_path)
    expected = {
        "step": [1, 2, 3, 4, 5],
        "grad_norm": [0.5, 5.0, 1.5, NAN, 0.5],
        "trigger": [math.inf, 2, 2, 2, 2],
        "fired": [0, 1, 0, 0, 0],
        "capped": [0, 0, 1, 0, 0],
        "nonfinite": [0, 0, 0, 1, 0],
        "val_loss": [NAN, 2.5, NAN, NAN, NAN],
        "ratio_rise": [0.0, 3.5, NAN, NAN, NAN],
        "skipped": [NAN] * 5,
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(run.columns[name], values, err_msg=name)
    np.testing.assert_allclose(run.allowed, [1, 2, 1, 1, 1])
    assert (run.name, run.rule, run.alarms) == (tmp_path.name, "", None)


def test_rows_without_a_norm_are_no_rows_with_a_bad_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bare = [{"update": step, "step": step, "attempt": 0, "loss": 2.0} for step in range(2, 30)]
    first = {"step": 0.0, "loss": 2.5}
    add(path, [first, {"step": 1, "zclip/grad_norm": 0.5}, *bare, {"step": 30, "zclip/grad_norm": "nan"}])
    run = read_run(path)
    assert steps_of(run) == list(range(31))
    assert run.columns["loss"][0] == 2.5
    assert np.flatnonzero(run.columns["nonfinite"] > 0).tolist() == [30]
    assert run.find_alarms() == []
    text = draw(run, 80)
    assert text.plain.count("!") == 1


def test_what_is_logged_later_of_a_row_adds_to_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    more = {"update": 2, "step": 2, "attempt": 0, "val_loss": 1.5}
    add(path, [row(1), row(2, 0.7), more, row(3), {"step": 3, "update": 4, "attempt": 1, "loss": 9.0}])
    columns = read_run(path).columns
    np.testing.assert_array_equal(columns["grad_norm"], [0.5, 0.7, NAN])
    np.testing.assert_array_equal(columns["val_loss"], [NAN, 1.5, NAN])


def test_a_run_that_is_only_watched(tmp_path):
    watched = {"norm": 5.0, "trigger": 2.0, "fired": True, "nonfinite": False, "allowed": 2.0}
    path = tmp_path / "metrics.jsonl"
    add(path, [{"step": 1} | {f"watch/grads/{name}": x for name, x in watched.items()}])
    run = read_run(path)
    assert (run.columns["grad_norm"], run.columns["fired"], run.allowed) == ([5.0], [1.0], [2.0])
    assert np.isnan(run.columns["capped"]).all()


def test_another_log_is_replayed(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {i} | loss 2.5 | norm {8.0 if i == 90 else 0.5}\n" for i in range(1, 101)))
    run = read_run(path)
    assert (run.rule, steps_of(run)[-1], run.columns["loss"][0]) == ("zclip", 100, 2.5)
    assert np.flatnonzero(run.columns["fired"]).tolist() == [89]
    assert run.allowed[89] <= 1.0


def test_records_of_an_attempt_taken_back_are_left_out(tmp_path):
    add(tmp_path / "metrics.jsonl", [row(1), row(2), row(3), row(2, attempt=1, update=4)])
    add(tmp_path / "spikes.jsonl", [record(1), record(2), record(3), record(2, "new", update=4), {"a": 1}])
    run = read_run(tmp_path)
    assert [one["update"] for one in run.records] == [1, 2, 3, 4]
    assert [one["update"] for one in run.current_records()] == [1, 4]


# What becomes of a file


def test_a_run_that_does_not_exist_yet(tmp_path):
    watcher = look(Watcher(tmp_path / "run"))
    assert watcher.message == f"waiting for {tmp_path / 'run'}"
    (tmp_path / "run").mkdir()
    assert look(watcher).message.startswith("waiting: ")
    path = tmp_path / "run" / "metrics.jsonl"
    add(path, [{"config": {}}])
    assert look(watcher).message.endswith("no rows yet")
    add(path, [row(1)])
    assert (look(watcher).message, steps_of(watcher.run)) == ("", [1])


def test_a_run_that_grows_is_truncated_replaced_and_gone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    add(path, [row(1), row(2)])
    watcher = look(Watcher(tmp_path))
    assert steps_of(watcher.run) == [1, 2]
    with path.open("a") as file:
        file.write(json.dumps(row(3))[:40])
    assert steps_of(look(watcher).run) == [1, 2]
    with path.open("a") as file:
        file.write(json.dumps(row(3))[40:] + "\n")
    assert steps_of(look(watcher).run) == [1, 2, 3]
    path.write_text(lines([row(1, 0.7)]))
    assert look(watcher).run.columns["grad_norm"].tolist() == [0.7]
    other = tmp_path / "other"
    other.write_text(lines([row(5), row(6), row(7)]))
    other.replace(path)
    assert steps_of(look(watcher).run) == [5, 6, 7]
    path.write_text("step 1 | loss 2.5 | norm 0.5\nstep 2 | loss 2.5 | norm 0.5\n")  # another kind of log
    assert (look(watcher).run.rule, steps_of(watcher.run)) == ("zclip", [1, 2])
    path.unlink()
    assert look(watcher).message.startswith("waiting")
    assert steps_of(watcher.run) == [1, 2]  # what was seen stays
    add(path, [row(9)])
    assert (look(watcher).message, steps_of(watcher.run)) == ("", [9])


def test_another_log_is_read_again_when_it_changes_and_not_too_often(tmp_path, monkeypatch):
    path, reads, clock = tmp_path / "train.log", [], [1000.0]

    def read_other(path):
        reads.append(path)
        clock[0] += 2.0
        return read(path)

    read = _logs._read_other
    monkeypatch.setattr(_logs, "_read_other", read_other)
    monkeypatch.setattr(_logs.time, "monotonic", lambda: clock[0])
    path.write_text("step 1 | norm 0.5\nstep 2 | norm 0.5\n")
    log = open_log(path)
    assert isinstance(log, OtherLog)
    log.update(0.5)
    clock[0] += 100.0
    log.update(0.5)
    assert len(reads) == 1  # nothing new
    add_text = path.read_text() + "step 3 | norm 0.5\n"
    path.write_text(add_text)
    log.update(0.5)
    assert len(reads) == 2
    path.write_text(add_text + "step 4 | norm 0.5\n")
    clock[0] += 19.0  # reading took 2 seconds, so that it waits for 20
    log.update(0.5)
    assert (len(reads), steps_of(log.run())) == (2, [1, 2, 3])
    clock[0] += 2.0
    log.update(0.5)
    assert (len(reads), steps_of(log.run())) == (3, [1, 2, 3, 4])


def test_a_long_log_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(_logs, "CHUNK", 1000)
    add(tmp_path / "metrics.jsonl", [row(step) for step in range(1, 101)])
    log = open_log(tmp_path)
    assert log.update(0.0)
    assert 0 < len(steps_of(log.run())) < 100
    while log.update(0.0):
        pass
    assert steps_of(log.run()) == list(range(1, 101))


# Alarms


def test_alarms_are_those_that_were_raised_or_those_that_hold(tmp_path):
    rows = [row(step, 1.5, cap=1.0) for step in range(1, 201)]
    add(tmp_path / "metrics.jsonl", rows)
    (found,) = read_run(tmp_path).find_alarms()
    assert found.startswith("step 100, and at 100 more: 100 of the last 100 steps were clipped")
    raised = {"update": 150, "step": 150, "attempt": 0, "alarm": "own", "message": "look here"}
    add(tmp_path / "alarms.jsonl", [raised])
    assert read_run(tmp_path).find_alarms() == ["step 150: look here"]


# What is shown


def test_a_sparkline():
    assert sparkline(np.asarray([0.0, 1.0, NAN, 4.0, 8.0]), "01234567") == "01 47"
    assert sparkline(np.asarray([2.0, 2.0]), "01234567") == "00"
    assert sparkline(np.asarray([NAN]), "01234567") == " "


@given(st.integers(1, 300), st.integers(1, 100))
def test_the_peaks_of_parts(size, width):
    x = np.random.default_rng(size).standard_normal(size)
    x[:: 1 + size // 3] = NAN
    edges = bins(size, width)
    assert len(edges) == min(size, width)
    parts = np.split(x, edges[1:])
    expected = [max((v for v in part if np.isfinite(v)), default=NAN) for part in parts]
    np.testing.assert_array_equal(peaks(x, edges), expected)


@pytest.fixture
def spiky(tmp_path):
    add(tmp_path / "metrics.jsonl", spiky_rows(1500, (150, 1490)))
    add(tmp_path / "spikes.jsonl", [record(150, "old"), record(1490, "new")])
    return read_run(tmp_path)


def test_what_is_drawn(spiky):
    shown = draw(spiky, 100).plain
    title, *body = shown.splitlines()
    assert title.endswith(", step 1,500")
    assert [line for line in body if line.startswith("steps")] == ["steps 1 to 1,500", "steps 501 to 1,500"]
    for name, number in (("loss", "3"), ("norm", f"{spiky.columns['grad_norm'][-1]:.4g}"), ("allowed", "2")):
        charts = [line for line in body if line.startswith(name)]
        assert len(charts) == 2
        assert all(line.endswith(f" {number}") for line in charts)
    rates = [line for line in body if "fired" in line]
    assert [line[:12] for line in rates] == ["last 100:   ", "last 1,000: ", "all 1,500:  "]
    assert [re.search("fired ([0-9.]+)%", line)[1] for line in rates] == ["1.0", "0.1", "0.1"]
    after = shown[shown.index("last spikes") :]
    assert after.index("step 1490: norm 12.3, 31x its level") < after.index("step 150")
    assert "new: 58x its own level · rows 71 (97 %)" in " ".join(after.split())


@pytest.mark.parametrize("width", [1, 20, 40, 60, 200])
@pytest.mark.parametrize("height", [1, 5, 12, 24, 80])
def test_it_fits_any_terminal(spiky, width, height):
    shown = draw(spiky, width, height).plain.splitlines()
    assert len(shown) <= height
    assert max(map(len, shown)) <= width
    if height >= 12 and width >= 40:
        assert any(line.startswith("norm") for line in shown)
        assert any("fired" in line for line in shown)


def test_colors_mark_what_happened(tmp_path):
    rows = [row(1), row(2, 1.5, cap=1.0), row(3, 5.0), row(4, NAN), row(5, math.inf)]
    add(tmp_path / "metrics.jsonl", rows)
    text = draw(read_run(tmp_path), 80)
    start = text.plain.index("norm ") + 9
    marks = {span.start - start: span.style for span in text.spans if start <= span.start < start + 5}
    assert marks == {1: "yellow", 2: "bold red", 3: "bold magenta", 4: "bold magenta"}
    assert text.plain[start + 3 : start + 5] == "!!"


def test_without_records_the_steps_that_fired_are_told(tmp_path):
    add(tmp_path / "metrics.jsonl", [row(1), row(2, 5.0), row(3, NAN)])
    shown = draw(read_run(tmp_path), 80, ascii_only=True).plain
    assert shown.isascii()
    assert "steps without a finite norm: 1, the last of them 3\nstep 2: norm 5, allowed 2" in shown


# The command


def test_without_a_terminal_it_is_shown_once(tmp_path, capsys):
    add(tmp_path / "metrics.jsonl", [row(1), row(2, 5.0)])
    assert cli.main(["follow", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "step 2: norm 5, allowed 2" in out
    assert err == ""
    assert cli.main(["follow", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("zclip-jax: [Errno 2] No such file")


def test_a_missing_rich_names_the_extra(tmp_path, capsys, monkeypatch):
    add(tmp_path / "metrics.jsonl", [row(1)])
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["follow", str(tmp_path)]) == 2
    assert "pip install 'zclip-jax[monitor]'" in capsys.readouterr().err


class Terminal:
    """A command in a pseudo-terminal of some size."""

    def __init__(self, *arguments, lines=24, columns=100):
        self.end, inner = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "LINES": str(lines), "COLUMNS": str(columns)}
        environment["PYTHONIOENCODING"] = "utf-8"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zclip_jax.cli", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
        )
        os.close(inner)
        self.seen = ""

    def wait_for(self, *words, seconds=60):
        """Reads until a screen drawn from now on has all of these words."""
        self.seen, until = "", time.monotonic() + seconds
        while time.monotonic() < until:
            if select.select([self.end], [], [], 0.1)[0]:
                try:
                    data = os.read(self.end, 1 << 16)
                except OSError:  # nobody has the other end any more
                    data = b""
                if not data and self.process.poll() is not None:
                    break
                self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode("utf-8", "replace"))
            if all(word in self.seen for word in words):
                return
        pytest.fail(f"no {words} in {self.seen[-3000:]!r}")

    def end_with(self, number):
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            os.close(self.end)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_in_a_terminal(tmp_path, end):
    run, path = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    terminal = Terminal("follow", str(run), columns=60)
    try:
        terminal.wait_for(f"waiting for {run}"[:60])
        run.mkdir()
        add(path, spiky_rows(200))
        add(run / "spikes.jsonl", [record(150)])
        terminal.wait_for("run, step 200", "all 200:", "layers/7/attn/wq")
        add(path, [row(201, 5.0)])
        terminal.wait_for("run, step 201")
        path.write_text(lines([row(1), row(2)]))
        terminal.wait_for("run, step 2 ", "all 2:")
        other = tmp_path / "other"
        other.write_text(lines([row(step) for step in range(1, 8)]))
        other.replace(path)
        terminal.wait_for("run, step 7")
    finally:
        status = terminal.end_with(end)
    assert status == 0
