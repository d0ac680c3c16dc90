"""Micro-batches that were read since a moment that training may go back to, to be read once more.

Ranks that read data keep what they read, so any iterator will do: none is asked to go back. An iterator may draw from
the random streams that dropout draws from as well; then it is kept where it left them, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

from dynpipe_ds.host.data_position import random_streams, set_random_streams

Streams = tuple[Any, ...]


def all_streams() -> Streams:
    """Where this process's random streams are: torch's, on the device as well, Python's and NumPy's."""
    return (*random_streams(), random.getstate(), numpy.random.get_state())


def set_all_streams(streams: Streams) -> None:
    """Go on from where they were.

    Args:
        streams: as :func:`all_streams` gave them.
    """
    *torchs, python, numpys = streams
    set_random_streams((torchs[0], torchs[1]))
    random.setstate(python)
    numpy.random.set_state(numpys)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    if isinstance(one, tuple) and one and not isinstance(one[0], int):
        return all(map(_same, one, other))
    return bool(one == other)


def copied(value: Any) -> Any:
    """Containers and tensors of a micro-batch once more; other values are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(copied(item) for item in value)
    return value


def num_bytes(value: Any) -> int:
    """Bytes of the tensors in a micro-batch."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    return sum(map(num_bytes, value)) if isinstance(value, tuple | list) else 0


class KeptData:
    """What this rank has read for each training batch, and where its random streams were when the batch began.

    Attributes:
        counters: of micro-batches, as they are when a batch begins; evaluations count, too, and are not repeated.
    """

    def __init__(self) -> None:
        self.counters: dict[int, dict[str, int]] = {}
        self._read: dict[int, list[tuple[Any, Streams | None]]] = {}
        self._began: dict[int, Streams] = {}
        self._batch: int | None = None
        self._position = 0
        self._noted = -1
        self._evaluated: list[Any] | None = None
        self._again: Iterator[Any] | None = None
        self._again_until = self._kept_from = 0
        self._counted_from: int | None = None

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Keep what is read within, for other tries of the same; each begins by :meth:`again`."""
        self._evaluated = []
        try:
            yield
        finally:
            self._evaluated = None

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation is kept at present."""
        return self._evaluated is not None

    @property
    def present_batch(self) -> int | None:
        """The training batch that is under way; ``None`` between batches, and where nothing is kept."""
        return self._batch

    def reads_again(self, number: int) -> bool:
        """Whether a batch is read from another source than the user's iterator.

        Args:
            number: of the batch.
        """
        return self._again is not None and number < self._again_until

    @property
    def num_evaluated(self) -> int:
        """Micro-batches that this rank has read for the present evaluation."""
        return len(self._evaluated or ())

    def again(self) -> None:
        """Give what was read in the evaluation so far once more, before what comes then."""
        self._position = 0

    @contextmanager
    def batch(self, number: int) -> Iterator[None]:
        """Keep what is read within, or give it again if it was read before.

        Args:
            number: of the batch, counted from 0.
        """
        streams = self._began.get(number)
        if streams is None:
            self._began[number] = all_streams()
        else:
            set_all_streams(streams)
        self._batch, self._position = number, 0
        try:
            yield
        finally:
            self._batch = None

    def next(self, read: Callable[[], Any]) -> Any:
        """A micro-batch: one that was kept, or the next one, which is then kept.

        Args:
            read: reads it.
        """
        if self._batch is None:
            return read() if self._evaluated is None else self._next_evaluated(self._evaluated, read)
        if self.reads_again(self._batch):
            again = self._again
            assert again is not None
            read = lambda: next(again)  # noqa: E731
            if self._batch < self._kept_from:
                return read()
        kept = self._read.setdefault(self._batch, [])
        if self._position == len(kept):
            before = all_streams()
            value = read()
            after = all_streams()
            kept.append((copied(value), None if _same(before, after) else after))
        else:
            stored, streams = kept[self._position]
            value = copied(stored)
            if streams is not None:
                set_all_streams(streams)
        self._position += 1
        return value

    def read_again(self, source: Iterator[Any] | None, first: int, kept_from: int, until: int) -> None:
        """Read batches of which nothing is kept from another source.

        Args:
            source: their micro-batches, in order; ``None`` where this rank reads no data.
            first: of these batches.
            kept_from: batches from this one on are kept; the others can be read again once more.
            until: behind the last of them.
        """
        self.stop_reading_again()
        for kept in (self._read, self._began):
            for number in [number for number in kept if first <= number < until]:
                del kept[number]
        self._again, self._kept_from, self._again_until = source, kept_from, until

    def stop_reading_again(self) -> None:
        """Let go of a source that was broken off."""
        if isinstance(self._again, Generator):
            self._again.close()
        self._again = None

    def count_from(self, number: int | None) -> None:
        """Keep the counters of batches from one on although their data is kept no more.

        Args:
            number: of that batch; ``None``: of no batch.
        """
        self._counted_from = number

    def _next_evaluated(self, kept: list[Any], read: Callable[[], Any]) -> Any:
        if self._position == len(kept):
            kept.append(read())
        self._position += 1
        return copied(kept[self._position - 1])

    def is_first_time(self) -> bool:
        """Whether the present batch was never trained before; asked once it is."""
        if self._batch is None:
            return True
        is_first = self._batch > self._noted
        self._noted = max(self._noted, self._batch)
        return is_first

    @property
    def num_noted(self) -> int:
        """Batches of which all ranks have read everything, as far as this rank knows, the present one included."""
        return self._noted + 1

    def num_read(self, number: int) -> int:
        """Micro-batches of a batch that are kept here."""
        return len(self._read.get(number, ()))

    def give(self, first: int, stop: int) -> dict[int, Any]:
        """What was read for some batches, for another rank that is to read it.

        Args:
            first: of the batches.
            stop: the one after the last.
        """
        return {b: [value for value, _ in self._read[b]] for b in range(first, stop) if b in self._read}

    def take(self, read: Mapping[int, Any]) -> None:
        """Keep what another rank has read, where nothing was read here.

        Args:
            read: what :meth:`give` gave there.
        """
        for number, values in read.items():
            if not self._read.get(number):
                self._read[number] = [(value, None) for value in values]

    def forget_before(self, number: int) -> None:
        """Let go of batches before one: they will not be trained again."""
        self._read = {b: kept for b, kept in self._read.items() if b >= number}
        self._began = {b: streams for b, streams in self._began.items() if b >= number}
        first = number if self._counted_from is None else min(number, self._counted_from)
        self.counters = {b: numbers for b, numbers in self.counters.items() if b >= first}

    def forget(self, number: int) -> None:
        """Let go of one batch: what was read for it stays read, and the next try reads on."""
        self._read.pop(number, None)
        self._began.pop(number, None)
        self.counters.pop(number, None)

    def start_afresh(self) -> None:
        """Let go of everything: batches are numbered from another past on."""
        self.counters.clear()
        self._read.clear()
        self._began.clear()
        self._noted = -1

    def forget_streams(self) -> None:
        """Let the batches to come begin where the random streams then are: this rank is another worker now."""
        self._began.clear()

    @property
    def oldest(self) -> int | None:
        """The first batch that is kept; ``None`` if there is none."""
        return min(self._began, default=None)

    def num_bytes(self, number: int | None = None) -> int:
        """Bytes that are kept.

        Args:
            number: of one batch; ``None``: of all.
        """
        kept = self._read.values() if number is None else [self._read.get(number, [])]
        return sum(num_bytes(value) for batch in kept for value, _ in batch)
