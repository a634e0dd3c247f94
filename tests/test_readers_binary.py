"""Readers of Parquet and TensorBoard, on small made-up files."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorboardX
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.util import tensor_util

from tests.reading import check, read_text, write_events
from zclip_jax.replay.readers import read

NAN, INF = math.nan, math.inf
__all__ = ["read_text"]  # a fixture


def test_parquet(tmp_path):
    path = tmp_path / "recorded"
    table = {
        "step": [1, 2, 3, 4],
        "text": list("abcd"),
        "grad_norm": [0.5, None, NAN, 0.25],
        "loss": [3.5, 3, 2, 1.0],
    }
    pa.parquet.write_table(pa.table(table), path)
    notes = ["1 row has no norm and is left out", "1 step is missing in 1 gap, the first after step 1"]
    notes.append("1 norm is not finite, first at step 3")
    check(read(path), [0.5, NAN, 0.25], [1, 3, 4], notes, [3.5, 2, 1], format="Parquet", column="grad_norm")
    check(read(path, column="loss"), [3.5, 3, 2, 1], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="no number under 'text': found step, text, grad_norm, loss"):
        read(path, column="text")


def test_tensorboard(tmp_path, capfd):
    rows = [{"train/loss": 3.5, "train/grad_norm": i + 0.5, "lr": 0.1} for i in range(2500)]
    write_events(tmp_path / "logs" / "version_0", rows)
    norms = np.arange(2500) + 0.5
    fields = {"format": "TensorBoard", "column": "train/grad_norm"}
    check(read(tmp_path), norms, range(2500), loss=[3.5] * 2500, **fields)
    (file,) = (tmp_path / "logs" / "version_0").iterdir()
    check(read(file.rename(tmp_path / "recorded")), norms, range(2500), loss=[3.5] * 2500, **fields)
    check(read(tmp_path, column="lr"), [float(np.float32(0.1))] * 2500, range(2500))
    assert capfd.readouterr() == ("", "")


def test_tensorboard_resumed_nested_and_cut(tmp_path):
    rows = [{"loss": i + 3.0, "grad_norm": i + 0.5} for i in range(4)]
    write_events(tmp_path, rows, filename_suffix=".first")
    write_events(tmp_path, rows[::-1], start=2, filename_suffix=".second")
    first, second = sorted(tmp_path.iterdir())
    second.write_bytes(second.read_bytes()[:-3])
    size = len(second.read_bytes())
    recording = read(tmp_path)
    # The last attempt of a step counts, with its own loss; the one cut off has no norm.
    check(recording, [0.5, 1.5, 3.5, 2.5, 1.5], [0, 1, 2, 3, 4], recording.notes)
    np.testing.assert_array_equal(recording.loss, [3, 4, 6, 5, 4])
    cut, *others = recording.notes
    assert cut.startswith(f"{second.name} is cut off or damaged after ")
    assert cut.endswith(f" of {size:,} bytes")
    assert others == [
        "1 row has no norm and is left out",
        "the run was resumed 1 time, first from step 3 to 2: the last attempt counts, 2 earlier rows are left out",
    ]


def test_tensorboard_of_several_runs(tmp_path):
    write_events(tmp_path / "a-clip", [{"grad_norm": 0.5, "loss": 3.5}])
    write_events(tmp_path / "b" / "c", [{"grad_norm": 0.25, "loss": 3.0}])
    notes = ["2 norm columns: a-clip - grad_norm (read), b/c - grad_norm; choose with --column"]
    check(read(tmp_path), [0.5], [0], [*notes, "1 row has no norm and is left out"], [3.5])
    check(read(tmp_path, column="b/c - grad_norm"), [0.25], [0], ["1 row has no norm and is left out"], [3.0])


def test_tensorboard_scalars_that_are_tensors(tmp_path):
    write_events(tmp_path, [])
    (file,) = tmp_path.iterdir()
    writer = tensorboardX.record_writer.RecordWriter(str(file))
    for step, norm in enumerate([0.5, NAN]):
        event = event_pb2.Event(step=step, wall_time=1.0)
        tensors = {"grad_norm": np.float32(norm), "loss": np.float64(3.5), "norm/text": np.asarray(b"7")}
        tensors["grad_norm/histogram"] = np.ones((2, 3), np.float32)
        for tag, value in tensors.items():
            event.summary.value.append(
                summary_pb2.Summary.Value(tag=tag, tensor=tensor_util.make_tensor_proto(value))
            )
        writer.write(event.SerializeToString())
    writer.close()
    events = file.read_bytes()
    version = event_pb2.Event(file_version="brain.Event:2").SerializeToString()
    file.unlink()
    writer = tensorboardX.record_writer.RecordWriter(str(file))
    writer.write(version)
    writer.close()
    file.write_bytes(file.read_bytes() + events)
    check(read(file), [0.5, NAN], [0, 1], ["1 norm is not finite, first at step 1"], [3.5, 3.5])
