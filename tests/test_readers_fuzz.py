"""Readers on damaged files: each gives a whole `Recording` or one clear ValueError, and never anything else."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorboardX
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zclip_jax.replay.readers import read

ROWS = [{"step": i, "loss": 3.5 - i / 8, "grad_norm": "nan" if i == 4 else 0.5 + i} for i in range(8)]


def parquet(tmp_path):
    path = tmp_path / "norms.parquet"
    table = {name: [float(row[name]) for row in ROWS] for name in ROWS[0]}
    pa.parquet.write_table(pa.table(table), path)
    return path.read_bytes()


def events(tmp_path):
    with tensorboardX.SummaryWriter(str(tmp_path / "events")) as writer:
        for row in ROWS:
            writer.add_scalar("grad_norm", float(row["grad_norm"]), row["step"])
    (path,) = (tmp_path / "events").iterdir()
    return path.read_bytes()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FORMATS = {
    "trainer state": json.dumps({"log_history": ROWS, "max_steps": 8}, indent=2).encode(),
    "list": json.dumps(ROWS).encode(),
    "lines": json.dumps({"config": {"alpha": 0.9}}).encode() + b"\n" + LINES,
    "gzip": gzip.compress(LINES, mtime=0),
    "csv": "\n".join(["step,loss,grad_norm", *(",".join(map(str, row.values())) for row in ROWS)]).encode(),
    "tsv": b'"grad_norm"\t"Step"\n' + b"".join(b'"%d.5"\t"%d"\n' % (i, i) for i in range(8)),
    "bar": b"".join(
        b"\r%d%%|# | %d/9 [00:01<00:02, loss=3, grad_norm=%d.5]" % (i, i // 2, i) for i in range(8)
    ),
    "ranks": b"".join(
        b"\x1b[1m[rank%d]: step %d | loss 3.5 | norm 0.%d (+nanz)\r\n" % (i % 2, i, i) for i in range(8)
    ),
    "parquet": parquet,
    "events": events,
}


def outcome(path, **options):
    """The recording, checked; None for a ValueError that is clear."""
    error = None
    try:
        recording = read(path, **options)
    except ValueError as raised:
        error = raised
    if error is not None:
        start, _, told = str(error).partition(": ")
        assert (type(error), start) == (ValueError, str(path))
        assert 0 < len(told) < 700
        assert told.count("\n") <= 1
        return None
    size = recording.norms.size
    assert size > 0
    assert recording.norms.dtype == np.float64
    assert recording.steps.dtype == np.int64
    assert recording.norms.shape == recording.steps.shape == (size,)
    assert recording.loss is None or (recording.loss.shape, recording.loss.dtype) == ((size,), np.float64)
    assert recording.cadence >= 1
    assert all(isinstance(note, str) and "\n" not in note for note in recording.notes)
    return recording


@st.composite
def damages(draw):
    """Where in a file, from 0 to 1, to cut it off or to flip, insert or delete bytes."""
    where = st.floats(0, 1, exclude_max=True)
    edits = st.tuples(
        st.sampled_from(["flip", "insert", "delete", "cut"]), where, st.binary(min_size=1, max_size=4)
    )
    return draw(st.lists(edits, min_size=1, max_size=5))


def damaged(content, edits):
    content = bytearray(content)
    for kind, where, new in edits:
        at = int(where * len(content))
        if kind == "flip" and content:
            content[at] ^= new[0]
        elif kind == "insert":
            content[at:at] = new
        elif kind == "delete":
            del content[at : at + len(new)]
        elif kind == "cut":
            del content[at:]
    return bytes(content)


@pytest.fixture(scope="module", params=FORMATS)
def whole(request, tmp_path_factory):
    content = FORMATS[request.param]
    return content(tmp_path_factory.mktemp("whole")) if callable(content) else content


shared_folder = settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_whole_files_are_read(whole, tmp_path):
    path = tmp_path / "recorded"
    path.write_bytes(whole)
    assert outcome(path).norms.size >= 4


@shared_folder
@given(edits=damages())
def test_damaged_files(whole, tmp_path, edits):
    path = tmp_path / "recorded"
    path.write_bytes(damaged(whole, edits))
    outcome(path)
    outcome(path, column="loss")


@pytest.mark.parametrize("alphabet", ["s:=\r\n\t ,;\"'{}[]()|0.1-e\x1b\x00", None])
@shared_folder
@given(data=st.data())
def test_any_text(tmp_path, alphabet, data):
    words = [
        "step ",
        "grad_norm",
        "norm 0.5",
        "param ",
        "loss: 3",
        "nan",
        "inf",
        "\n",
        "[rank1]",
        " 1/9 [00",
        ",",
    ]
    words += [
        '{"step": 1, "grad_norm": 0.5}\n',
        '{"log_history": [',
        '{"config": {',
        "1e999",
        "9" * 20,
        "9" * 400,
    ]
    pieces = st.one_of(
        st.sampled_from(words), st.text(alphabet, max_size=5) if alphabet else st.text(max_size=5)
    )
    path = tmp_path / "recorded"
    path.write_text("".join(data.draw(st.lists(pieces, max_size=20))), encoding="utf-8", errors="replace")
    outcome(path)


@shared_folder
@given(
    head=st.sampled_from([b"", b"PAR1", b"\x1f\x8b\x08", b"\xff\xfe", b"\x00" * 20]),
    content=st.binary(max_size=200),
)
def test_any_bytes(tmp_path, head, content):
    path = tmp_path / "recorded"
    path.write_bytes(head + content)
    outcome(path)


@pytest.mark.parametrize("name", ["lines", "csv", "tsv", "bar", "ranks"])
def test_a_norm_cut_in_two_is_never_read(name, tmp_path):
    path = tmp_path / "recorded"
    written = {f"{i}.5" for i in range(8)} | {"nan"} if name != "ranks" else {f"0.{i}" for i in range(8)}
    num_read = 0
    for end in range(len(FORMATS[name])):
        path.write_bytes(FORMATS[name][:end])
        recording = outcome(path)
        if recording is not None:
            num_read += 1
            assert {str(norm) for norm in recording.norms.tolist()} <= written
    assert num_read > 60
