"""Batches with their places in the data, some of them left out."""

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from operator import index
from typing import Any, Literal

import jax

from zclip_jax._extras import require
from zclip_jax.recovery._skips import SkipRanges

# Grain's transformations that make element i from places of their source that i alone decides. Everything else may
# drop, pack or draw elements, so that only counting finds the i-th.
PLAIN = frozenset(
    [
        "SourceMapDataset",
        "RangeMapDataset",
        "MapMapDataset",
        "RandomMapMapDataset",
        "MapWithIndexMapDataset",
        "ShuffleMapDataset",
        "WindowShuffleMapDataset",
        "SliceMapDataset",
        "RepeatMapDataset",
        "BatchMapDataset",
        "MixedMapDataset",
        "ConcatenateMapDataset",
        "ZipMapDataset",
        "_WithSeedMapDataset",
        "PrefetchIterDataset",
        "ThreadPrefetchIterDataset",
        "MapIterDataset",
        "RandomMapIterDataset",
        "MapWithIndexIterDataset",
        "BatchIterDataset",
        "LimitIterDataset",
        "_WithSeedIterDataset",
        "WithOptionsIterDataset",
    ]
)
MOST_MARKS = 16
UNKNOWN = -1  # the position of an iterator that raised an error


class SkippingIterator:
    """Yields `(data_index, batch)`, leaves batches out, and goes back to any of them.

    A *data index* is the place of a batch in the uninterrupted pipeline, counted from 0. It is not the step: the two
    differ as soon as one batch was left out. What is left out has no influence on what comes after it.

    `how` says in which way a batch is found. With `"index"`, the pipeline is a plain chain of Grain's map
    transformations and batches, and every place is reached at once. With `"drain"`, which is right for every
    pipeline, the batches on the way are read and dropped; if the iterator has `get_state` and `set_state`, as all of
    Grain's have, that starts at the nearest place where `get_state` of this object was called. A `map` that returns
    None drops elements too: that is noticed when it happens, with a warning, and `how` becomes `"drain"`.

    Args:
      source: a Grain `MapDataset` or `IterDataset`, any iterable that can be read several times, or a function that
        returns a new iterator at its first batch. It must give the same batches each time.
      skips: what to leave out.

    Raises:
      TypeError: `source` can be read only once, or not at all.

    Examples:
      >>> from zclip_jax.recovery import SkippingIterator, SkipRanges
      >>> batches = SkippingIterator(lambda: iter("abcdefg"), skips=SkipRanges([(1, 3)]))
      >>> next(batches), next(batches), batches.data_index, batches.how
      ((0, 'a'), (3, 'd'), 4, 'drain')
      >>> batches.seek(0, skips=SkipRanges([(3, 6)]))
      >>> [batch for _, batch in batches]
      ['a', 'b', 'c', 'g']
    """

    def __init__(self, source: Any, skips: SkipRanges | None = None):
        self._make = _maker(source)
        self.how: Literal["index", "drain"] = "index" if _is_plain(source) else "drain"
        self.skips = SkipRanges() if skips is None else skips
        self._wanted = 0
        self._marks: dict[int, Any] = {}  # states of the iterator by position
        self._iterator: Any = None
        self._position = UNKNOWN  # of what the iterator gives next
        self._restart()

    @property
    def data_index(self) -> int:
        """Of the next batch."""
        return self.skips.after(self._wanted)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        wanted = self.data_index
        self._move(wanted)
        batch = self._read()
        if self.how == "index" and self._dropped():
            warnings.warn(
                f"the pipeline dropped an element before batch {wanted + 1}, so that an index does not find its "
                "batches: from now on those on the way are read and dropped",
                stacklevel=2,
            )
            self.how = "drain"
            self._restart()
            self._move(wanted)
            batch = self._read()
        self._wanted = wanted + 1
        return wanted, batch

    def seek(self, data_index: int, skips: SkipRanges | None = None) -> None:
        """Makes `data_index` the next batch, or the first after it that is not left out.

        Args:
          data_index: at least 0.
          skips: what to leave out from now on; None for what was left out before.
        """
        if index(data_index) < 0:
            raise ValueError(f"data_index must be at least 0, got {data_index}")
        self._wanted = index(data_index)
        self.skips = self.skips if skips is None else skips

    def get_state(self) -> dict[str, Any]:
        """The place and what is left out, ready for JSON, to be saved with a checkpoint.

        It holds the state of the iterator underneath where a restart would otherwise have to drain. That is one
        process's own: another process, or another number of them, passes over it and drains.
        """
        state: dict[str, Any] = {
            "data_index": self.data_index,
            "skips": self.skips.to_json(),
            "how": self.how,
        }
        state["source"] = None
        if self.how == "drain" and (kept := self._mark()) is not None:
            source = _encode(kept)
            if _survives_json(source, kept):
                state["source"] = [self._position, jax.process_index(), jax.process_count(), source]
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called, in this process or in another one."""
        if state["how"] == "drain":  # perhaps learnt on the way
            self.how = "drain"
        if self.how == "drain" and state["source"] is not None and self._marks:
            position, *process, source = state["source"]
            if process == [jax.process_index(), jax.process_count()]:
                self._marks[position] = _decode(source)
        self.seek(state["data_index"], SkipRanges.from_json(state["skips"]))

    def _restart(self) -> None:
        old, self._iterator = self._iterator, self._make()
        if old is self._iterator:
            raise TypeError("source must return a new iterator each time, got the same one again")
        if hasattr(old, "close"):
            old.close()
        self._position = 0
        self._mark()

    def _mark(self) -> Any:
        """Keeps the iterator's state, to come back to without draining, and returns it."""
        if self._position == UNKNOWN or not hasattr(self._iterator, "set_state"):
            return None
        kept = self._marks[self._position] = copy.deepcopy(self._iterator.get_state())
        while len(self._marks) > MOST_MARKS:  # the first stays
            del self._marks[list(self._marks)[1]]
        return kept

    def _move(self, wanted: int) -> None:
        if self._position == wanted:
            return
        if self.how == "index":
            if self._jump(wanted):
                return
            self.how = "drain"
            self._restart()
        start = max((place for place in self._marks if place <= wanted), default=None)
        if self._position == UNKNOWN or self._position > wanted:
            if start is None:
                self._restart()
            else:
                self._go_to_mark(start)
        elif start is not None and start > self._position:
            self._go_to_mark(start)
        while self._position != wanted:
            self._read()

    def _go_to_mark(self, place: int) -> None:
        self._position = UNKNOWN
        self._iterator.set_state(copy.deepcopy(self._marks[place]))
        self._position = place

    def _jump(self, wanted: int) -> bool:
        self._position = UNKNOWN
        try:
            _grain().set_next_index(self._iterator, wanted)
        except IndexError:  # past the end
            raise StopIteration from None
        except (AttributeError, NotImplementedError, ValueError):  # another version of Grain
            return False
        self._position = wanted
        return True

    def _read(self) -> Any:
        position, self._position = self._position, UNKNOWN
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._position = position
            raise
        self._position = position + 1
        return batch

    def _dropped(self) -> bool:
        return _grain().get_next_index(self._iterator) != self._position


def _maker(source: Any) -> Callable[[], Iterator[Any]]:
    if hasattr(source, "__iter__"):
        if hasattr(source, "__next__"):
            raise TypeError(
                "source must be a dataset, an iterable that can be read several times, or a function that returns a "
                f"new iterator, got the iterator {source!r}, which cannot start again"
            )
        return lambda: iter(source)
    if callable(source):
        return lambda: iter(source())
    raise TypeError(
        f"source must be a dataset, an iterable or a function that returns an iterator, got {source!r}"
    )


def _is_plain(source: Any) -> bool:
    todo = [source]
    while todo:
        node = todo.pop()
        if type(node).__name__ not in PLAIN or not type(node).__module__.startswith("grain."):
            return False
        todo.extend(node.parents)
    return True


def _grain() -> Any:
    return sys.modules.get("grain.experimental") or require(
        "grain.experimental", "recovery", "a Grain dataset"
    )


def _encode(value: Any) -> Any:
    """`value` with tuples marked: packing gives wrong batches from a state in which JSON made lists of them."""
    if isinstance(value, dict):
        return {key: _encode(x) for key, x in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [_encode(x) for x in value]}
    return [_encode(x) for x in value] if isinstance(value, list) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            tuple(map(_decode, value["tuple"]))
            if value.keys() == {"tuple"}
            else {k: _decode(x) for k, x in value.items()}
        )
    return [_decode(x) for x in value] if isinstance(value, list) else value


def _survives_json(encoded: Any, value: Any) -> bool:
    try:
        return _decode(json.loads(json.dumps(encoded))) == value
    except (TypeError, ValueError):
        return False
