"""Data of batches that nobody has kept any more, read once more.

Two things can do that: a function of the user's that opens the data at a batch, and an iterator that can say where it
is, and go back there (``state_dict``, ``load_state_dict``). What was read again leaves the present iterator where it
was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dynpipe_ds.host.data_position import same_random_streams
from dynpipe_ds.host.dealing import Hand

OpenAt = Callable[[int, int], Iterable[Any]]
"""``open_at(batch, replica)``: micro-batches as a replica of the job's start reads them, from the first one of a batch
on."""


class Position:
    """Where an iterator is that can go back there.

    Args:
        iterator: that has ``state_dict`` and ``load_state_dict``.
        behind: micro-batches that other stages have taken from theirs, and this one has not.
    """

    def __init__(self, iterator: Any, behind: int) -> None:
        self._iterator, self._behind = iterator, behind
        self._state = copy.deepcopy(iterator.state_dict())

    def read(self, number: int) -> Iterator[Any]:
        """Go back, and give what was read next; when it is over, or closed, the iterator is where it was.

        Args:
            number: of micro-batches.
        """
        present = copy.deepcopy(self._iterator.state_dict())
        self._iterator.load_state_dict(copy.deepcopy(self._state))
        try:
            with same_random_streams():
                for _ in range(self._behind):
                    next(self._iterator)
            for left in range(number, 0, -1):
                value = next(self._iterator)
                if left == 1:  # nobody asks for more
                    self._iterator.load_state_dict(present)
                    present = None
                yield value
        finally:
            if present is not None:
                self._iterator.load_state_dict(present)


def position_of(iterator: Any, behind: int) -> Position | None:
    """Where an iterator is.

    Args:
        iterator: of the user's.
        behind: as there.

    Returns:
        ``None`` if it can't go back.
    """
    can = all(callable(getattr(iterator, name, None)) for name in ("state_dict", "load_state_dict"))
    return Position(iterator, behind) if can else None


def opened(open_at: OpenAt, batch: int, replica: int) -> Iterator[Any]:
    """What a function of the user's gives; random numbers that it draws leave no trace.

    Args:
        open_at: the function.
        batch: from its first micro-batch on.
        replica: as this one reads it.
    """
    with same_random_streams():
        return iter(open_at(batch, replica))


def deal(streams: Mapping[int, Iterator[Any]], now: Callable[[], tuple[tuple[Hand, ...], int]]) -> Iterator[Any]:
    """Micro-batches of several sources, batch by batch.

    Args:
        streams: of each source, from the first micro-batch of the same batch on.
        now: what is trained here of every source, and how many micro-batches each has; asked for each batch.
    """
    while True:
        hands, each = now()
        for hand in hands:
            for number in range(each):
                try:
                    value = next(streams[hand.source])
                except StopIteration:
                    return
                if hand.first <= number < hand.stop:
                    yield value
