"""Who trains which of a batch's micro-batches where there are fewer replicas than the data is made for; pure.

The *sources* are the replicas for which data is made: those with which the job was started. Where some of them are
gone, the others train their micro-batches too. The micro-batches of a batch, source after source, are cut into as many
equal parts as there are replicas, so that each is trained once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Hand(NamedTuple):
    """What a replica trains of one source in every batch.

    Attributes:
        source: its number.
        first: micro-batch of a batch.
        stop: behind the last one.
    """

    source: int
    first: int
    stop: int


def dealt(replica: int, num_mine: int, each: int) -> tuple[Hand, ...]:
    """What a replica trains in every batch.

    Args:
        replica: its number.
        num_mine: micro-batches that every replica trains.
        each: micro-batches of every source.

    Returns:
        By source, ascending.
    """
    start, stop = replica * num_mine, (replica + 1) * num_mine
    return tuple(
        Hand(source, max(start - source * each, 0), min(stop - source * each, each))
        for source in range(start // each, -(-stop // each))
    )


def fewer(replicas: int, *sizes: int) -> Iterator[int]:
    """Smaller numbers of replicas that can train the same batch, the largest first.

    Args:
        replicas: that there are now.
        *sizes: numbers of micro-batches that each of them trains, as the data has them and as they are run; those of
            all replicas together must be cut evenly.
    """
    for number in range(replicas - 1, 0, -1):
        if not any(replicas * size % number for size in sizes):
            yield number
