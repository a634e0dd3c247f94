"""SkippingIterator: every kind of pipeline gives, after any rewinds and skips, what the uninterrupted one gives."""

import itertools
import json

import grain
import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from zclip_jax.recovery import SkippingIterator, SkipRanges

pytestmark = pytest.mark.slow

LENGTH = 24  # batches looked at


def ints(size=200):
    return grain.MapDataset.range(size)


def strings(n):
    return grain.MapDataset.source([np.arange(3 + i % 5) + 10 * i for i in range(n)])


def add_noise(x, rng):
    return x + rng.integers(1000)


def to_iter(dataset, threads=0):
    return dataset.to_iter_dataset(
        grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * bool(threads))
    )


def concat_then_split():
    rows = strings(60).map(lambda x: {"x": x}).to_iter_dataset(grain.ReadOptions(0, 0))
    return grain.experimental.ConcatThenSplitIterDataset(rows, length_struct={"x": 6})


def first_fit():
    rows = to_iter(strings(90).map(lambda x: {"x": x}))
    return grain.experimental.FirstFitPackIterDataset(
        rows, length_struct={"x": 8}, num_packing_bins=3, shuffle_bins=False
    )


def mix():
    parts = [to_iter(ints().map(lambda x: x)), to_iter(ints().map(lambda x: 1000 + x))]
    return grain.IterDataset.mix(parts, weights=[0.7, 0.3])


# How each is found, and what makes it.
PIPELINES = {
    "map chain": ("index", lambda: ints().seed(3).shuffle().map(lambda x: 7 * x)),
    "example's": (
        "index",
        lambda: to_iter(ints(50).seed(3).shuffle().repeat().batch(4).slice(slice(1, None, 2)), 2),
    ),
    "map-level random": ("index", lambda: ints().seed(3).random_map(add_noise)),
    "map-level window shuffle": (
        "index",
        lambda: grain.experimental.WindowShuffleMapDataset(ints(), window_size=5, seed=1),
    ),
    "map-level mix": (
        "index",
        lambda: grain.MapDataset.mix([ints(), ints().map(lambda x: -x)], weights=[0.6, 0.4]),
    ),
    "iterator batch": ("index", lambda: to_iter(ints().shuffle(seed=1)).map(lambda x: x + 1).batch(3)),
    "iterator random": ("index", lambda: to_iter(ints()).seed(3).random_map(add_noise)),
    "iterator index": ("index", lambda: to_iter(ints()).map_with_index(lambda i, x: (i, x)).batch(2)),
    "limit": ("index", lambda: grain.experimental.LimitIterDataset(to_iter(ints()), 18)),
    "thread prefetch": (
        "index",
        lambda: grain.experimental.ThreadPrefetchIterDataset(to_iter(ints()), prefetch_buffer_size=3),
    ),
    "map-level filter": ("drain", lambda: ints().filter(lambda x: x % 3 != 1)),
    "map-level filter, batched": ("drain", lambda: to_iter(ints().filter(lambda x: x % 3 != 1)).batch(2)),
    "map-level flat map": ("drain", lambda: ints()),
    "iterator filter": ("drain", lambda: to_iter(ints()).filter(lambda x: x % 3 != 1)),
    "mix": ("drain", mix),
    "concat then split": ("drain", concat_then_split),
    "first-fit packing": ("drain", first_fit),
    "window shuffle": (
        "drain",
        lambda: grain.experimental.WindowShuffleIterDataset(to_iter(ints()), window_size=5, seed=1),
    ),
    "repeat": ("drain", lambda: grain.experimental.RepeatIterDataset(to_iter(ints(7)))),
    "list": ("drain", lambda: [f"batch {i}" for i in range(30)]),
    "generator": ("drain", lambda: lambda: (i * i for i in range(30))),
}


class FlatMap(grain.experimental.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, x):
        return [x] * (x % 3)


PIPELINES["map-level flat map"] = (
    "drain",
    lambda: grain.experimental.FlatMapMapDataset(ints(), FlatMap()),
)


def first(source, count=LENGTH):
    source = source() if callable(source) and not hasattr(source, "__iter__") else source
    return list(itertools.islice(source, count))


def assert_batches(got, want):
    """`got` are pairs of index and batch, `want` all batches of the uninterrupted pipeline."""
    for place, batch in got:
        np.testing.assert_equal(batch, want[place])


def take(batches, count):
    return list(itertools.islice(batches, count))


@pytest.mark.parametrize("kind", PIPELINES)
def test_every_kind_of_pipeline_after_a_rewind_with_a_skip(kind):
    how, make = PIPELINES[kind]
    want = first(make())
    batches = SkippingIterator(make())
    assert batches.how == how
    assert_batches(take(batches, 10), want)
    state = batches.get_state()
    seen = take(batches, 4)
    assert [place for place, _ in seen] == [10, 11, 12, 13]
    assert_batches(seen, want)
    batches.seek(6, skips=SkipRanges([(8, 11), (14, 15)]))
    places = [6, 7, 11, 12, 13, *range(15, len(want))]
    got = take(batches, len(places))
    assert [place for place, _ in got] == places
    assert_batches(got, want)

    fresh = SkippingIterator(make())
    fresh.set_state(json.loads(json.dumps(state)))
    got = take(fresh, 3)
    assert [place for place, _ in got] == [10, 11, 12]
    assert_batches(got, want)
    assert fresh.how == how


@pytest.mark.parametrize(
    "kind", ["example's", "iterator random", "iterator filter", "concat then split", "generator"]
)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_rewinds_skips_and_restarts(kind, data):
    _, make = PIPELINES[kind]
    want = first(make())
    places = st.integers(0, len(want) + 3)
    ranges = st.lists(st.tuples(places, places).map(sorted), max_size=3).map(SkipRanges)
    batches, skips, at = SkippingIterator(make()), SkipRanges(), 0
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 8))):
            at = skips.after(at)
            if at >= len(want):
                break
            assert batches.data_index == at
            place, batch = next(batches)
            assert place == at
            np.testing.assert_equal(batch, want[at])
            at += 1
        match data.draw(st.sampled_from(["seek", "skip", "save", "restart"])):
            case "seek":
                at = data.draw(places)
                batches.seek(at)
            case "skip":
                at, skips = data.draw(places), data.draw(ranges)
                batches.seek(at, skips=skips)
            case "save":
                batches.get_state()
            case "restart":
                state = json.loads(json.dumps(batches.get_state()))
                batches = SkippingIterator(make())
                batches.set_state(state)


def test_the_end_of_the_data():
    for source in (ints(5), to_iter(ints(5)).filter(lambda x: True), range(5)):
        batches = SkippingIterator(source, skips=SkipRanges([(3, 4)]))
        assert [place for place, _ in batches] == [0, 1, 2, 4]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(batches)
        batches.seek(7)
        assert list(batches) == []
        batches.seek(2)
        assert next(batches) == (2, 2)
        batches.seek(0, skips=SkipRanges([(4, 1000)]))
        assert [batch for _, batch in batches] == [0, 1, 2, 3]


def counted(calls, size=10**6):
    def read(x):
        calls.append(x)
        return x

    return ints(size).map(read)


def test_an_index_reads_nothing_on_the_way():
    calls = []
    batches = SkippingIterator(to_iter(counted(calls)), skips=SkipRanges([(10, 500_000)]))
    assert [next(batches)[1] for _ in range(11)] == [*range(10), 500_000]
    batches.seek(900_000)
    assert next(batches) == (900_000, 900_000)
    assert len(calls) == 12


def test_draining_starts_at_the_nearest_saved_state():
    calls = []
    batches = SkippingIterator(to_iter(counted(calls)).filter(lambda x: True))
    take(batches, 50)
    state = batches.get_state()
    take(batches, 50)
    calls.clear()
    batches.seek(52)
    assert next(batches) == (52, 52)
    assert calls == [50, 51, 52]
    calls.clear()
    batches.seek(3)
    assert next(batches) == (3, 3)
    assert calls == [0, 1, 2, 3]

    fresh = SkippingIterator(to_iter(counted(calls)).filter(lambda x: True))
    fresh.set_state(json.loads(json.dumps(state)))
    calls.clear()
    assert next(fresh) == (50, 50)
    assert calls == [50]


def test_only_the_last_saved_states_are_kept():
    batches = SkippingIterator(to_iter(ints()).filter(lambda x: True))
    for _ in range(40):
        next(batches)
        batches.get_state()
    assert len(batches._marks) == 16
    batches.seek(5)
    assert next(batches) == (5, 5)


def test_the_state_of_another_process_is_passed_over(monkeypatch):
    source = to_iter(ints()).filter(lambda x: x % 2)
    batches = SkippingIterator(source)
    take(batches, 6)
    state = batches.get_state()
    assert state["source"][:3] == [6, 0, 1]
    state["source"] = [6, 0, 2, {"next_index": 100}]
    fresh = SkippingIterator(source)
    fresh.set_state(state)
    assert next(fresh) == (6, 13)


def test_a_map_that_returns_none_is_noticed():
    source = to_iter(ints().map(lambda x: None if x in (4, 9) else x))
    want = first(source)
    batches = SkippingIterator(source)
    assert batches.how == "index"
    assert_batches(take(batches, 3), want)
    with pytest.warns(UserWarning, match="dropped an element before batch 5"):
        got = take(batches, 4)
    assert batches.how == "drain"
    batches.seek(1, skips=SkipRanges([(2, 6)]))
    got += take(batches, 10)
    assert [place for place, _ in got] == [3, 4, 5, 6, 1, *range(6, 15)]
    assert_batches(got, want)
    fresh = SkippingIterator(source)
    fresh.set_state(batches.get_state())
    assert fresh.how == "drain"
    assert next(fresh) == (15, want[15])


def test_a_batch_that_cannot_be_read_can_be_skipped():
    def read(x):
        if x == 3:
            raise OSError("no such record")
        return x

    batches = SkippingIterator(to_iter(ints(8).map(read), threads=2))
    assert take(batches, 3) == [(0, 0), (1, 1), (2, 2)]
    for _ in range(2):
        with pytest.raises(OSError, match="no such record"):
            next(batches)
    batches.seek(2, skips=SkipRanges([(3, 4)]))
    assert take(batches, 3) == [(2, 2), (4, 4), (5, 5)]


def test_an_old_grain_without_indices_drains(monkeypatch):
    monkeypatch.delattr(grain.experimental, "set_next_index")
    batches = SkippingIterator(ints())
    batches.seek(7)
    assert next(batches) == (7, 7)
    assert batches.how == "drain"


def test_what_is_no_source():
    with pytest.raises(TypeError, match="which cannot start again"):
        SkippingIterator(iter([1]))
    with pytest.raises(TypeError, match="which cannot start again"):
        SkippingIterator(iter(ints()))
    with pytest.raises(TypeError, match="got 3"):
        SkippingIterator(3)
    once = iter(range(9))
    batches = SkippingIterator(lambda: once)
    take(batches, 3)
    batches.seek(0)
    with pytest.raises(TypeError, match="must return a new iterator"):
        next(batches)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        batches.seek(-1)


@pytest.mark.slow
def test_worker_processes():
    """They find batches by draining, from a saved state on."""
    flags.FLAGS.mark_as_parsed()  # which Grain reads
    source = to_iter(ints().map(np.int64)).mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    want = first(source)
    batches = SkippingIterator(source)
    assert batches.how == "drain"
    assert_batches(take(batches, 8), want)
    batches.get_state()
    assert_batches(take(batches, 4), want)
    batches.seek(9, skips=SkipRanges([(10, 13)]))
    got = take(batches, 4)
    assert [place for place, _ in got] == [9, 13, 14, 15]
    assert_batches(got, want)
