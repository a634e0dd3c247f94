"""Skip ranges against sets of integers, and the log."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zclip_jax.recovery import RecoveryLog, SkipRanges

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple), max_size=6)


def members(pairs):
    return {i for start, stop in pairs for i in range(start, stop)}


@given(PAIRS, PAIRS)
def test_ranges_are_sets_of_indices(left, right):
    a, b = SkipRanges(left), SkipRanges(right)
    assert members(a.ranges) == members(left)
    assert members((a | b).ranges) == members(left) | members(right)
    assert members((a - b).ranges) == members(left) - members(right)
    assert len(a) == len(members(left))
    assert bool(a) == bool(members(left))
    assert (a == b) == (members(left) == members(right))
    assert hash(a) == hash(SkipRanges(reversed(left)))
    for i in range(32):
        assert (i in a) == (i in members(left))
        assert a.after(i) == min(set(range(i, 64)) - members(left))


@given(PAIRS)
def test_ranges_are_sorted_disjoint_and_apart(pairs):
    ranges = SkipRanges(pairs).ranges
    assert all(start < stop for start, stop in ranges)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges))


@settings(max_examples=20, deadline=None)
@given(PAIRS)
def test_ranges_come_back_from_json_and_from_a_file(tmp_path_factory, pairs):
    skips, path = SkipRanges(pairs), tmp_path_factory.mktemp("skips") / "skip.json"
    assert SkipRanges.from_json(json.loads(json.dumps(skips.to_json()))) == skips
    assert SkipRanges.load(path) == SkipRanges()
    SkipRanges([(1, 5)]).save(path)
    skips.save(path)
    assert SkipRanges.load(path) == skips
    assert [x.name for x in path.parent.iterdir()] == ["skip.json"]


@pytest.mark.parametrize("value", [(-1, 2), (5, 3), (0.5, 2), (1,), (1, 2, 3), ("0", 2), 7, None])
def test_what_is_no_range_is_named(value):
    with pytest.raises(ValueError, match="a skip range must be two integers 0 <= start <= stop, got "):
        SkipRanges([value])


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"skip": 5}', '{"skip": [[3, 1]]}', '{"skip'])
def test_a_file_that_holds_no_ranges_is_an_error_with_its_name(tmp_path, text):
    path = tmp_path / "skip.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"skip\.json must hold skip ranges"):
        SkipRanges.load(path)


def test_a_log_is_appended_to_and_survives_a_torn_line(tmp_path):
    log = RecoveryLog(tmp_path / "recovery.jsonl")
    assert log.read() == []
    log.append({"a": 1, "losses": [1.0, math.nan, -math.inf]})
    whole = log.path.read_bytes()
    log.append({"b": {"c": (math.inf,)}})
    for cut in range(len(whole) + 1, log.path.stat().st_size):
        log.path.write_bytes((whole + b'{"b": {"c": ["inf"]}}\n')[:cut])
        assert log.read()[:1] == [{"a": 1, "losses": [1.0, "nan", "-inf"]}]
        log.append({"d": 3})
        assert log.read()[-1] == {"d": 3}
        assert log.path.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in log.path.read_text().splitlines()[:1])
