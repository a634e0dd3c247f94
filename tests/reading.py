"""What the tests of readers share: rows, a check of all fields, files written as they come."""

import json

import numpy as np
import pytest
import tensorboardX

from zclip_jax.replay.readers import read

ROWS = [
    {"step": 1, "loss": 3.5, "grad_norm": 0.5},
    {"step": 2, "loss": 3.0, "grad_norm": 0.25},
    {"step": 3, "loss": 2.5, "grad_norm": 0.75},
]
NO_STEPS = "no step found: rows are numbered from 0, and how often it was logged is unknown"


def check(recording, norms, steps, notes=(), loss=None, **fields):
    assert (recording.norms.dtype, recording.steps.dtype) == (np.float64, np.int64)
    np.testing.assert_array_equal(recording.norms, np.asarray(norms, float))
    np.testing.assert_array_equal(recording.steps, steps)
    assert recording.notes == tuple(notes)
    if loss is not None:
        np.testing.assert_array_equal(recording.loss, loss)
    for name, value in fields.items():
        assert getattr(recording, name) == value


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_events(folder, scalars, start=0, **options):
    with tensorboardX.SummaryWriter(str(folder), **options) as writer:
        for i, values in enumerate(scalars):
            for tag, value in values.items():
                writer.add_scalar(tag, value, start + i)


@pytest.fixture
def read_text(tmp_path):
    """Reads a file with this content, whose name says nothing about its format."""

    def read_content(content, **options):
        path = tmp_path / "recorded"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read(path, **options)

    return read_content


def same(recording, norms, steps=None, **fields):
    """Only what is given is compared."""
    np.testing.assert_array_equal(recording.norms, np.asarray(norms, float))
    if steps is not None:
        np.testing.assert_array_equal(recording.steps, steps)
    for name, value in fields.items():
        assert getattr(recording, name) == value


def told(recording, *words):
    """One note has all these words."""
    assert any(all(word in note for word in words) for note in recording.notes), recording.notes


@pytest.fixture
def reads(tmp_path):
    """Reads a file with this content; prints its number, its beginning and what was read."""

    def read_content(number, content, **options):
        path = tmp_path / "recorded"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            recording = read(path, **options)
        except ValueError as error:
            print(f"\n{number}. {content[:70]!r}: {str(error).partition(': ')[2]}")
            raise
        print(f"\n{number}. {content[:70]!r}: norms {recording.norms[:6]}, steps {recording.steps[:6]}")
        for note in recording.notes:
            print(f"    {note}")
        return recording

    return read_content
