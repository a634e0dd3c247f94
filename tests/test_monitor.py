"""`Monitor`: what rows hold, and where they are after kills, resumes and rewinds."""

import json
import math
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zclip_jax import metrics, zclip
from zclip_jax.monitor import JsonLines, Monitor, TensorBoard
from zclip_jax.replay import read

OWN = ("update", "step", "attempt")


def read_rows(path):
    """The rows of a `metrics.jsonl`, all attempts, without lines that a killed process left unfinished."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def last_attempts(rows):
    """Those that no later attempt went back behind."""
    kept, attempt = [], 0
    for row in rows:
        if row["attempt"] > attempt:
            attempt = row["attempt"]
            kept = [before for before in kept if before["step"] < row["step"]]
        kept.append(row)
    return kept


def read_board(folder):
    """Scalars by tag, as TensorBoard shows them: pairs of a step and a float32."""
    if not folder.exists():
        return {}
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    board.Reload()
    return {
        tag: [(x.step, np.float32(x.value)) for x in board.Scalars(tag)] for tag in board.Tags()["scalars"]
    }


def as_board(rows):
    """What TensorBoard should show of rows."""
    board = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                board.setdefault(name, []).append((row["step"], np.float32(value)))
    return board


def same(x, y):
    assert set(x) == set(y)
    for name in x:
        np.testing.assert_array_equal(np.asarray(x[name]), np.asarray(y[name]), err_msg=name)


# Where rows are


class Oracle:
    """The numbers that place rows, as their definitions say: one list of all updates ever made."""

    def __init__(self):
        self.rows, self.updates, self.attempt, self.next_attempt = [], 0, 0, False

    def log(self, step, back_to):
        """One more update, to the training step that follows `back_to`."""
        assert step == back_to + 1
        self.updates += 1
        if self.next_attempt:
            self.attempt, self.next_attempt = self.attempt + 1, False
        norm = float(np.float32(1 + 0.37 * self.updates % 1))
        row = {"update": self.updates, "step": step, "attempt": self.attempt, "grad_norm": norm}
        self.rows.append(row)
        return row


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("log"), st.integers(1, 9)),
        st.tuples(st.just("flush"), st.none()),
        st.tuples(st.just("rewind"), st.integers(0, 9)),
        st.tuples(st.just("resume"), st.integers(0, 9)),
        st.tuples(st.just("kill"), st.tuples(st.integers(0, 9), st.booleans(), st.booleans())),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=60, deadline=None, phases=(Phase.generate, Phase.reuse))
@given(OPERATIONS)
def test_any_order_of_kills_resumes_and_rewinds(tmp_path_factory, operations):
    folder = tmp_path_factory.mktemp("run")
    path, board = folder / "metrics.jsonl", folder / "tensorboard"

    def start():
        return Monitor([JsonLines(path), TensorBoard(board)], alarms=())

    oracle, monitor, step = Oracle(), start(), 0
    for what, how in operations:
        if what == "log":
            for _ in range(how):
                step += 1
                row = oracle.log(step, step - 1)
                assert monitor.log(step, {"grad_norm": jnp.float32(row["grad_norm"])}) == row["update"]
        elif what == "flush":
            monitor.flush()
            assert read_rows(path) == oracle.rows
            same(read_board(board), as_board(last_attempts(oracle.rows)))
        elif what == "rewind":
            step = max(step - how, 0)
            monitor.rewind(step)
            oracle.next_attempt = bool(oracle.rows)
        else:
            back, told, torn = (how, True, False) if what == "resume" else how
            pending = monitor._pending
            if what == "kill" and pending is not None:
                monitor._pending = None  # is not written
                oracle.rows.pop()
                oracle.updates -= 1
                if all(row["attempt"] != oracle.attempt for row in oracle.rows):
                    oracle.attempt = max([row["attempt"] for row in oracle.rows], default=0)
            monitor.close()
            if torn and path.exists() and path.stat().st_size:
                tear(path, b'{"update": 99, "step": 9')
                tear(max(board.iterdir()), b"\x18\0\0\0\0\0\0\0half of it")
            monitor = start()
            # A checkpoint is never ahead of the rows that are in the log.
            reached = oracle.rows[-1]["step"] if oracle.rows else 0
            step = max(reached - back, 0)
            oracle.next_attempt = bool(oracle.rows)
            if told or back:
                monitor.rewind(step)
    monitor.close()
    assert monitor.lost == {}
    assert read_rows(path) == oracle.rows
    updates = [row["update"] for row in oracle.rows]
    assert updates == sorted(set(updates))
    kept = last_attempts(oracle.rows)
    same(read_board(board), as_board(kept))
    if len({row["step"] for row in oracle.rows}) > 1:  # a step that never changes is no step to the reader
        for log in (path, board):
            recording = read(log, column="grad_norm")
            assert recording.norms.tolist() == [row["grad_norm"] for row in kept]
            assert recording.steps.tolist() == [row["step"] for row in kept]


def tear(path, end):
    with path.open("ab") as file:
        file.write(end)


def places(rows):
    return [tuple(row[name] for name in OWN) for row in rows]


def placed(*steps, log=None):
    """Places of rows logged in turn; a negative number is a rewind to that step."""
    rows = []
    with Monitor([JsonLines(log)] if log else [], on_row=rows.append) as monitor:
        for step in steps:
            if step < 0:
                monitor.rewind(-step)
            else:
                monitor.log(step, {})
    return places(rows)


def test_places():
    assert placed(1, 2, 3) == [(1, 1, 0), (2, 2, 0), (3, 3, 0)]
    assert placed(501, 502) == [(501, 501, 0), (502, 502, 0)]
    assert placed(1, 2, 3, -1, 2, 3) == [(1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 2, 1), (5, 3, 1)]
    # Rows some steps apart: updates count what was between.
    assert placed(10, 20, -10, 20, 30) == [(10, 10, 0), (20, 20, 0), (30, 20, 1), (40, 30, 1)]
    # A step that goes back is a rewind that nobody told of.
    assert placed(1, 2, 3, 2, 3) == placed(1, 2, 3, -1, 2, 3)
    # Told twice is one; told before the first row is none.
    assert placed(-7, 8, 9, -8, -8, 9) == [(8, 8, 0), (9, 9, 0), (10, 9, 1)]
    # The same step again is the same row.
    assert placed(1, 2, 2) == [(1, 1, 0), (2, 2, 0)]


def test_places_go_on_with_the_log(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert placed(1, 2, 3, 4, log=log)[-1] == (4, 4, 0)
    assert placed(-2, 3, 4, log=log) == [(5, 3, 1), (6, 4, 1)]
    assert placed(5, 6, log=log) == [(7, 5, 2), (8, 6, 2)]  # from the last row on
    assert placed(-9, 10, log=log) == [(12, 10, 3)]  # the rows of three steps were lost
    assert placed(log=log) == []
    assert placed(-3, 10, log=log) == [(19, 10, 4)]
    assert placed(2, log=log) == [(20, 2, 5)]


def test_places_after_a_log_of_another_writer(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"config": {"lr": 0.1}}\n{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"st')
    assert placed(-1, 2, log=log) == [(3, 2, 1)]
    assert [row.get("step") for row in read_rows(log)] == [None, 1, 2, 2]


# What rows hold


def logged(values, **more):
    rows = []
    with Monitor(on_row=rows.append) as monitor:
        monitor.log(1, values, **more)
    (row,) = rows
    return {name: x for name, x in row.items() if name not in OWN}, monitor


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (jnp.bfloat16(1.5), 1.5),
        (jnp.float16(jnp.inf), math.inf),
        (jnp.float32(0.1), float(np.float32(0.1))),
        (jnp.float8_e4m3fn(0.5), 0.5),
        (jnp.int32(-3), -3),
        (jnp.int4(-3), -3),
        (jnp.uint8(200), 200),
        (jnp.asarray(True), True),
        (np.float64(0.1), 0.1),
        (np.int64(2**60), 2**60),
        (np.bool_(False), False),
        (np.asarray(3.5), 3.5),
        (2.5, 2.5),
        (7, 7),
        (True, True),
    ],
)
def test_scalars_become_python_numbers(value, number):
    row, monitor = logged({"x": value})
    assert row == {"x": number}
    assert type(row["x"]) is type(number)
    assert monitor.unread == {}


def test_arrays_go_to_the_callback_alone(tmp_path):
    log, rows = tmp_path / "metrics.jsonl", []
    with Monitor([JsonLines(log), TensorBoard(tmp_path / "board")], on_row=rows.append) as monitor:
        monitor.log(1, {"norms": jnp.arange(3.0), "loss": jnp.float32(2)}, one=np.zeros(1))
    assert rows[0]["norms"].tolist() == [0, 1, 2]
    assert rows[0]["one"].tolist() == [0]
    assert read_rows(log) == [{"update": 1, "step": 1, "attempt": 0, "loss": 2.0}]
    assert set(read_board(tmp_path / "board")) == {"update", "attempt", "loss"}


def test_what_is_no_number_is_left_out_and_told(caplog):
    values = {
        "loss": jnp.float32(2),
        "text": "a",
        "none": None,
        "complex": 1j * jnp.ones(()),
        "nested": {"a": 1.0},
        "key": jax.random.key(0),
    }
    row, monitor = logged(values)
    assert row == {"loss": 2.0}
    assert monitor.unread == dict.fromkeys(["text", "none", "complex", "nested", "key"], 1)
    for name in monitor.unread:
        assert f"'{name}' of step 1 is left out: " in caplog.text


def test_a_buffer_given_to_the_next_step_is_told(caplog):
    step = jax.jit(lambda state: (state + 1, state * 2), donate_argnums=0)
    rows, state = [], jnp.float32(1)
    with Monitor(on_row=rows.append) as monitor:
        for i in range(1, 4):
            state, loss = step(state)
            monitor.log(i, {"state": state, "loss": loss})
    assert [row["loss"] for row in rows] == [2, 4, 6]
    assert monitor.unread == {"state": 2}  # nothing took the last one
    assert [message for message in caplog.messages if "'state' of step 1" in message and "donated" in message]
    assert len(caplog.messages) == 1


def test_each_row_comes_one_step_behind():
    rows = []
    with Monitor(on_row=rows.append) as monitor:
        for step in range(1, 4):
            monitor.log(step, {"loss": jnp.float32(step)})
            assert [row["step"] for row in rows] == list(range(1, step))
        monitor.flush()
        assert len(rows) == 3
    assert len(rows) == 3


class Failed:
    """What a step returned that failed, on a device that runs behind."""

    def __array__(self, *_, **__):
        raise FloatingPointError("invalid value (nan) encountered")


def test_what_a_step_raises_is_raised():
    monitor = Monitor()
    monitor.log(1, {"loss": Failed()})
    with pytest.raises(FloatingPointError):
        monitor.log(2, {"loss": jnp.float32(1)})
    monitor.close()


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
def test_what_the_last_step_raises_hides_no_other_error(error):
    def train(monitor):
        with monitor:
            monitor.log(1, {"loss": Failed()})
            if error is not None:
                raise error

    with pytest.raises(FloatingPointError if error is None else ZeroDivisionError):
        train(Monitor())


@pytest.mark.parametrize("name", OWN)
def test_names_of_the_row_are_taken(name):
    with pytest.raises(ValueError, match=f"scalars must not have '{name}'"):
        Monitor().log(1, {name: 1.0})


BAD = """
import jax.numpy as jnp, pathlib
from zclip_jax.monitor import Monitor
calls = [lambda x=x: Monitor().log(x, {}) for x in (1.0, "1", None, True, jnp.int32(1))]
calls += [lambda x=x: Monitor().rewind(x) for x in (1.0, jnp.int32(1))]
calls += [lambda x=x: Monitor(x) for x in (3, [print], [pathlib.Path("metrics.jsonl")])]
for call in calls:
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_bad_arguments():
    """In a process of its own, without the checks of signatures."""
    told = subprocess.run([sys.executable, "-c", BAD], capture_output=True, text=True, check=True).stdout
    lines = told.splitlines()
    assert [line.partition(", got ")[0] for line in lines] == [
        *["step must be an int on the host"] * 7,
        "sinks must be a list of sinks",
        *["each of sinks must have log_scalar and close"] * 2,
    ]
    assert [line.partition(", got ")[2] for line in lines[:4]] == ["1.0", "'1'", "None", "True"]


def test_only_the_first_process_logs(tmp_path, monkeypatch):
    def run(all_processes):
        rows, log = [], tmp_path / f"{all_processes}.jsonl"
        with Monitor([JsonLines(log)], on_row=rows.append, all_processes=all_processes) as monitor:
            assert [monitor.log(step, {"loss": 1.0}) for step in (1, 2)] == [1, 2]
            monitor.rewind(1)
            assert monitor.log(2, {"loss": 1.0}) == 3
            monitor.flush()
        return len(rows), len(read_rows(log))

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert run(all_processes=False) == (0, 0)
    assert run(all_processes=True) == (3, 3)
    assert list(tmp_path.iterdir()) == [tmp_path / "True.jsonl"]


def test_both_logs_hold_what_metrics_says_after_a_kill_a_resume_and_a_rewind(tmp_path):
    path, board = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    tx = optax.chain(zclip(warmup_steps=3), optax.sgd(0.1))
    norms = np.random.default_rng(0).lognormal(size=12).astype(np.float32)
    norms[[5, 8]] = np.nan, 40.0

    @jax.jit
    def train_step(state, norm):
        _, state = tx.update(jnp.stack([norm]), state)
        return state, metrics(state) | {"loss": norm**2}

    def train(monitor, states, steps):
        for step in steps:
            state, scalars = train_step(states[step - 1], norms[step - 1])
            states[step] = state
            seen[step] = {name: x.item() for name, x in scalars.items()}
            monitor.log(step, scalars)

    states, seen = {0: tx.init(jnp.zeros(1))}, {}
    killed = Monitor([JsonLines(path), TensorBoard(board)])
    train(killed, states, range(1, 8))
    killed._pending = None  # killed before it was written
    killed.close()
    with Monitor([JsonLines(path), TensorBoard(board)]) as monitor:
        monitor.rewind(4)
        train(monitor, states, range(5, 11))
        monitor.rewind(7)
        train(monitor, states, range(8, 13))
    kept = last_attempts(read_rows(path))
    assert [row["step"] for row in kept] == list(range(1, 13))
    assert [row["attempt"] for row in kept] == [0] * 4 + [1] * 3 + [2] * 5
    same(read_board(board), as_board(kept))
    for row in kept:
        numbers = {name: float(x) for name, x in row.items() if name not in OWN}
        same(numbers, {name: float(x) for name, x in seen[row["step"]].items()})
    for log in (path, board):
        np.testing.assert_array_equal(read(log).norms, norms)


TWO = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
address, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
from zclip_jax.monitor import JsonLines, Monitor, TensorBoard
rows = []
monitor = Monitor([JsonLines(folder + "/metrics.jsonl"), TensorBoard(folder + "/board")], on_row=rows.append)
jax.distributed.initialize(address, 2, rank)
mesh = Mesh(jax.devices(), "data")
split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
x = jax.make_array_from_callback((2,), split, lambda i: jnp.ones(1) * (rank + 1))
step = jax.jit(lambda x, i: (jnp.sum(x) * i, x), out_shardings=(whole, split))
with monitor:
    for i in range(1, 4):
        total, part = step(x, i)
        monitor.log(i, {"total": total, "part": part})
print(json.dumps([[row["total"] for row in rows], monitor.unread, monitor.lost]))
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {name: x for name, x in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, address, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (totals, unread, lost), others = (json.loads(text.splitlines()[-1]) for text in told)
    assert (totals, unread, lost) == ([3.0, 6.0, 9.0], {"part": 3}, {})
    assert others == [[], {}, {}]
    assert [row["total"] for row in read_rows(tmp_path / "metrics.jsonl")] == totals
    assert len(list((tmp_path / "board").iterdir())) == 1
