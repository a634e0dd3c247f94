"""metrax's interface both ways: its backends are sinks, and our sinks are its backends and JAX's listeners."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.test_monitor import read_board, read_rows
from tests.test_monitor_sinks import Listing, log_steps
from zclip_jax.monitor import JsonLines, Monitor, TensorBoard


def test_a_backend_of_metrax_is_a_sink():
    backend = Listing()
    with Monitor([backend]) as monitor:
        log_steps(monitor, 1, 2)
        monitor.rewind(1)
        monitor.log(2, {"yes": jnp.asarray(True)})
    assert backend.closed == 1
    assert [(event, value) for event, value, _ in backend.calls if event.startswith(("loss", "yes"))] == [
        ("loss", 0.25),
        ("loss", 0.5),
        ("yes", 1),
    ]
    steps = [kwargs["step"] for _, _, kwargs in backend.calls]
    assert steps == sorted(steps)  # they drop what goes back
    places = [(kwargs["step"], event, value) for event, value, kwargs in backend.calls if "train/" in event]
    assert [(step, value) for step, event, value in places if event == "train/step"] == [
        (1, 1),
        (2, 2),
        (3, 2),
    ]
    assert {type(value) for _, value, _ in backend.calls} == {int, float}


def test_our_sinks_are_backends_of_metrax(tmp_path):
    for start in (1, 3):
        sinks = [JsonLines(tmp_path / "metrics.jsonl"), TensorBoard(tmp_path / "board")]
        for sink in sinks:
            for step in (start, start + 1):
                sink.log_scalar("loss", np.float32(step / 4), step=step)
                sink.log_scalar("/train/norm", jnp.float32(step), step=str(step))
            sink.log_scalar("eval/loss", 2.0, step=1)  # counted by itself
            sink.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row.get("loss"), row.get("train/norm")) for row in rows] == [
        (1, 0.25, 1.0),
        (2, 0.5, 2.0),
        (1, None, None),
        (3, 0.75, 3.0),
        (4, 1.0, 4.0),
        (1, None, None),
    ]
    assert [row["attempt"] for row in rows] == [0, 0, 0, 1, 1, 1]
    board = read_board(tmp_path / "board")
    assert board["loss"] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert board["eval/loss"] == [(1, 2.0), (1, 2.0)]


def test_our_sinks_listen_to_jax(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    jax.monitoring.register_scalar_listener(sink.log_scalar)
    try:
        for step in (1, 2):
            jax.monitoring.record_scalar("/train/loss", step / 4, step=step)
            jax.monitoring.record_scalar("/train/norm", float(step))
    finally:
        jax.monitoring.unregister_scalar_listener(sink.log_scalar)
    sink.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"update": step, "step": step, "attempt": 0, "train/loss": step / 4, "train/norm": step}
        for step in (1, 2)
    ]
