"""Kinds of misuse that a monitor meets, and what it must say of each."""

import itertools
import json
import math
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from zclip_jax.monitor import ALARMS, Alarm, JsonLines, Monitor, TensorBoard
from zclip_jax.monitor._bell import Bell

# Annotations are checked in tests, ahead of what the code itself says.
REFUSED = (ValueError, TypeCheckError)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Listed:
    """A backend as metrax has them."""

    def __init__(self, seconds=0.0):
        self.scalars, self.seconds = [], seconds

    def log_scalar(self, event, value, **kwargs):
        time.sleep(self.seconds)
        self.scalars.append((event, value, kwargs["step"]))

    def close(self):
        pass


def test_values_are_those_at_the_time_of_the_call():
    """A row is written one step later, when the caller's buffers hold other numbers."""
    scalar, groups, rows = np.zeros(()), np.zeros(3, np.float32), []
    given_ = {"scalar": scalar, "groups": groups}
    with Monitor(on_row=rows.append) as monitor:
        for step in range(1, 5):
            scalar[...], groups[:] = step, -step
            given_["late"] = step
            monitor.log(step, given_, more=groups)
    for step, row in enumerate(rows, 1):
        assert row["scalar"] == row["late"] == step
        assert row["groups"].tolist() == row["more"].tolist() == [-step] * 3


# Whatever a value is: the same number in each sink, or left out and counted; the others of its row are not lost.
VALUES = {
    "bool": (True, 1.0),
    "int": (3, 3.0),
    "beyond float32": (10**300, 1e300),
    "beyond float64": (10**400, math.inf),
    "numpy int": (np.uint8(200), 200.0),
    "numpy bool": (np.bool_(True), 1.0),
    "float16": (np.float16(0.5), 0.5),
    "longdouble": (np.longdouble(1.5), 1.5),
    "longdouble array": (np.array(1.5, np.longdouble), 1.5),
    "bfloat16": (jnp.bfloat16(1.5), 1.5),
    "float8": (jnp.asarray(2.0, jnp.float8_e4m3fn), 2.0),
    "int4": (jnp.asarray(3, jnp.int4), 3.0),
    "nan": (float("nan"), math.nan),
    "device inf": (jnp.float32(-math.inf), -math.inf),
    "zero-dimensional": (np.array(7), 7.0),
    "string": ("2.5", None),
    "none": (None, None),
    "list": ([1.0], None),
    "mapping": ({"x": 1.0}, None),
    "complex": (1j, None),
    "device complex": (jnp.complex64(1j), None),
    "date": (np.datetime64("2020-01-01"), None),
    "object": (np.array(None), None),
    "shape": (jax.eval_shape(lambda: jnp.zeros(())), None),
    "key": (jax.random.key(0), None),
}


def test_a_value_of_any_kind_costs_no_other(tmp_path):
    backend = Listed()
    with Monitor([JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path), backend]) as monitor:
        monitor.log(
            1, {"before": 1.0} | {name: value for name, (value, _) in VALUES.items()} | {"after": 2.0}
        )
    assert monitor.lost == {}
    left_out = {name for name, (_, number) in VALUES.items() if number is None}
    assert monitor.unread == dict.fromkeys(left_out, 1)
    (row,) = rows_of(tmp_path / "metrics.jsonl")
    assert (row["before"], row["after"]) == (1.0, 2.0)
    assert not left_out & (set(row) | {name for name, *_ in backend.scalars})
    for name, (_, number) in VALUES.items():
        if number is not None and name != "beyond float64":
            assert float(row[name]) == pytest.approx(number, nan_ok=True)


@pytest.mark.parametrize("name", [1, None, ("a",), b"a", 2.5])
def test_a_name_that_is_no_string_is_an_error_at_once(name):
    rows = []
    with Monitor(on_row=rows.append) as monitor:
        monitor.log(1, {"loss": 1.0})
        with pytest.raises(REFUSED, match="scalars"):
            monitor.log(2, {name: 1.0})
        monitor.log(2, {"loss": 2.0})
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("scalars", [None, 2.5, [("loss", 1.0)]])
def test_scalars_that_are_no_mapping(scalars):
    with Monitor() as monitor, pytest.raises(REFUSED, match="scalars"):
        monitor.log(1, scalars)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *itertools.product(["timeout", "cooldown"], [None, "3", -1, math.nan, True]),
        *itertools.product(["on_row", "on_alarm"], [3, "x"]),
        *itertools.product(["alarms"], [None, [1], ["clipping"], ALARMS[0], [ALARMS[0], ALARMS[0]]]),
        *itertools.product(["sinks"], [None, "a", [None], [Listed], {}, Listed()]),
    ],
)
def test_arguments_fail_when_the_monitor_is_made(argument, value):
    if value is ALARMS[0]:  # a named tuple is a sequence of other things
        value = list(value)
    with pytest.raises(REFUSED, match=argument):
        Monitor(**{argument: value})


NUMBER = st.sampled_from([0, 7, 7.0, 90, -1, 2.5, 1e400, -1e400, math.nan, None, True, "7", "x", [], {}])
FOREIGN = st.dictionaries(st.sampled_from(["update", "step", "attempt", "_step", "loss"]), NUMBER)
TAILS = [
    b"",
    b'{"step": 9',
    b"\0" * 99,
    b"[" * 20_000 + b"\n",
    b"\xff\xfe\n",
    b"[1]\nnull\n3\n",
    b'{"step": true}\n',
]


def whole(x):
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return int(x) if is_number and math.isfinite(x) and x == int(x) else None


@settings(max_examples=60)
@given(st.lists(FOREIGN, max_size=4), st.sampled_from(TAILS))
def test_a_log_of_any_content_is_gone_on_with(tmp_path_factory, foreign, tail):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    before = "".join(json.dumps(row) + "\n" for row in foreign).encode() + tail
    path.write_bytes(before)
    with Monitor([JsonLines(path)]) as monitor:
        updates = [monitor.log(step, {"loss": 1.0}) for step in (3, 4)]
    assert monitor.lost == {}
    last = next((row for row in reversed(foreign) if whole(row.get("step")) is not None), None)
    attempt, offset = 0, 0
    if last is not None:
        step = whole(last["step"])
        update = whole(last.get("update"))
        attempt = (whole(last.get("attempt")) or 0) + 1
        offset = (step if update is None else update) - min(step, 2)
    assert updates == [3 + offset, 4 + offset]
    written = path.read_bytes()
    assert written.startswith(before)
    rows = [json.loads(line) for line in written[len(before) :].splitlines() if line.strip()]
    assert [(row["update"], row["step"], row["attempt"]) for row in rows] == [
        (updates[0], 3, attempt),
        (updates[1], 4, attempt),
    ]


def test_closed_is_closed(tmp_path, caplog):
    """Nothing waits for a thread that has ended."""
    start = time.monotonic()
    with Monitor([JsonLines(tmp_path / "metrics.jsonl")], on_row=lambda row: monitor.close()) as monitor:
        monitor.log(1, {"loss": 1.0})
        monitor.close()
        monitor.flush()
        monitor.close()
    assert time.monotonic() - start < monitor.timeout / 2
    assert monitor.lost == {}
    assert not caplog.records
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1]


def test_rows_that_an_interrupt_leaves_behind_are_counted():
    slow = Listed(seconds=0.05)
    monitor = Monitor([Listed(), slow], alarms=(), timeout=60)
    for step in range(1, 21):
        monitor.log(step, {"loss": 1.0})
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        monitor.close()
    timer.join()
    written = len({step for *_, step in slow.scalars})
    assert monitor.lost.get("Listed 1", 0) == 0
    assert 20 - written - 1 <= monitor.lost["Listed 2"] <= 20  # one was being written
    monitor.close()


@settings(max_examples=20)
@given(st.data())
def test_what_an_alarm_does_not_read_is_nothing_to_it(data):
    """Rows whose other names come and go, in any order, ring at the rows that have all an alarm reads."""
    bell = Bell([alarm for alarm in ALARMS if alarm.name in ("clipping", "nonfinite", "spikes")], cooldown=0)
    clip, norm, fire = ([] for _ in range(3))
    for update in range(1, 131):
        values = {"zclip/capped": 1.0, "zclip/bound": 0.0, "zclip/fired": 1.0, "zclip/grad_norm": math.nan}
        for name in data.draw(st.sets(st.sampled_from(sorted(values)), max_size=1), label="missing"):
            del values[name]
        if update % 7 == 0:
            values = dict(reversed(values.items())) | {"loss": 1.0}
        found = {x["alarm"] for x in bell.add({"update": update, "step": update, "attempt": 0} | values)}
        clip += [True] if {"zclip/capped", "zclip/bound"} <= set(values) else []
        norm += [True] if "zclip/grad_norm" in values else []
        fire += [True] if "zclip/fired" in values else []
        assert ("clipping" in found) == (len(clip) >= 100 and {"zclip/capped", "zclip/bound"} <= set(values))
        assert ("nonfinite" in found) == (len(norm) >= 10 and "zclip/grad_norm" in values)
        assert ("spikes" in found) == (len(fire) >= 10 and "zclip/fired" in values)


def test_groups_of_none_ring_nothing():
    bell = Bell(ALARMS, cooldown=0)
    empty = np.zeros(0)
    values = {f"zclip/{name}": empty for name in ("capped", "bound", "fired", "alarm")}
    for update in range(1, 105):
        assert bell.add({"update": update, "step": update, "attempt": 0, "ratio_rise": empty} | values) == []


@pytest.mark.parametrize("event", ["step", "/update", "attempt"])
def test_scalars_leave_the_numbers_of_the_row(tmp_path, event):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.log_scalar("loss", jnp.float32(1.0), step=np.int64(2))
    for name, value, step in [
        (event, 4.0, 2),
        ("x", None, 3),
        ("x", "a", 3),
        ("x", np.ones(3), 3),
        ("x", 1.0, 2.5),
    ]:
        with pytest.raises(ValueError, match=r"event|value|step"):
            log.log_scalar(name, value, step=step)
    log.log_scalar("/loss", np.array([2.0]), step=3)
    log.close()
    assert [tuple(row.values()) for row in rows_of(log.path)] == [(2, 2, 0, 1.0), (3, 3, 0, 2.0)]


def test_an_alarm_of_ones_own_reads_what_it_names():
    seen = []
    own = Alarm("up", ("lr",), 3, lambda rows: rows["lr"] > 1, lambda rows: str(rows["lr"].tolist()))
    with Monitor(alarms=[own], cooldown=0, on_alarm=seen.append) as monitor:
        for step in range(1, 6):
            monitor.log(step, {"lr": step / 2} if step % 2 else {"loss": 1.0})
    assert [(x["step"], x["message"]) for x in seen] == [(3, "[0.5, 1.5]"), (5, "[0.5, 1.5, 2.5]")]


def test_a_tracer_is_told(caplog):
    rows = []
    with Monitor(on_row=rows.append) as monitor:
        jax.jit(lambda x: [x, monitor.log(1, {"x": x, "y": 2.0})][0])(1.0)
        monitor.log(2, {"x": 1.0})
    assert [(row["step"], row.get("x")) for row in rows] == [(1, None), (2, 1.0)]
    assert monitor.unread == {"x": 1}
    assert "outside of the function that is jitted" in caplog.text
