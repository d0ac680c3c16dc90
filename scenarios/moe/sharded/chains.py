"""Weights and sums on their way from rank to rank: each passes on what it got, piece by piece.

A home that sent every copy itself would need the time of all of them; in a chain every rank sends each copy once. Its
pieces follow each other, so that a chain of many ranks takes hardly longer than one of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scenarios.moe.placing import Lanes

PIECE_BYTES = 1 << 20
"""Bytes that are passed on at a time."""


class Hop(NamedTuple):
    """A piece on its way from one place of a chain to the next."""

    chain: int
    place: int
    piece: int


def steps_of(lengths: Sequence[int], num_pieces: int) -> Iterator[list[Hop]]:
    """What travels at the same time: piece ``p`` makes its hop ``k`` in step ``p + k``.

    Args:
        lengths: ranks of each chain.
        num_pieces: pieces of what each carries.
    """
    most = max(lengths, default=0) - 1
    for step in range(most + num_pieces - 1 if most > 0 and num_pieces else 0):
        yield [
            Hop(chain, place, step - place)
            for chain, length in enumerate(lengths)
            for place in range(length - 1)
            if 0 <= step - place < num_pieces
        ]


class Visit(NamedTuple):
    """A rank that a sum passes, and the sources whose lanes it adds there."""

    rank: int
    sources: tuple[int, ...]


def summing_chain(lanes: Lanes, expert: int, has_rows: Sequence[bool]) -> tuple[Visit, ...]:
    """Ranks that the sum of an expert's lanes passes, in the order of :meth:`Lanes.summing_order`, to its home.

    Args:
        lanes: who has computed them.
        expert: which.
        has_rows: for each source whether its lane has rows.

    Returns:
        Visits, a rank perhaps several times, not twice in a row; the last one is home. None for an expert without rows.
    """
    sources = [source for source in lanes.summing_order(expert) if has_rows[source]]
    found = [
        Visit(rank, tuple(group)) for rank, group in groupby(sources, key=lambda source: lanes.owner[source][expert])
    ]
    home = lanes.home(expert)
    if found and found[-1].rank != home:
        found.append(Visit(home, ()))
    return tuple(found)


class Load:
    """What a rank has of a chain at one place.

    Args:
        tensors: take what arrives, or have what is sent; contiguous.
        adds: tensors like them, which are added there one after the other.
        has_own: whether ``tensors`` are summands, to which what arrives is added.
    """

    def __init__(
        self, tensors: Sequence[Tensor], adds: Sequence[Sequence[Tensor]] = (), *, has_own: bool = False
    ) -> None:
        self.tensors, self.has_own = tensors, has_own
        self.pieces = pieces_of(tensors)
        self._added = [pieces_of(each) for each in adds]

    def complete(self, piece: int) -> None:
        """Add what is to be added to a piece."""
        for pieces in self._added:
            self.pieces[piece] += pieces[piece]


def pieces_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors, flat and cut."""
    return [
        piece
        for tensor in tensors
        for piece in tensor.view(-1).split(max(1, PIECE_BYTES // tensor.element_size()))
    ]  # fmt: skip


@torch.no_grad()
def run_chains(
    chains: Sequence[Sequence[int]], loads: Sequence[Mapping[int, Load]], num_pieces: int, group: dist.ProcessGroup
) -> int:
    """Pass everything on; collective over the group.

    Args:
        chains: ranks that each passes, no rank twice in a row; the same on every rank.
        loads: for each chain what this rank has at which of its places.
        num_pieces: of what each chain carries.
        group: process group; ranks are numbers within it.

    Returns:
        Bytes that this rank has received.
    """
    num_bytes, globally = 0, dist.get_process_group_ranks(group)
    for places in loads:
        if (first := places.get(0)) is not None:
            for piece in range(num_pieces):
                first.complete(piece)
    for hops in steps_of([len(chain) for chain in chains], num_pieces):
        operations: list[dist.P2POp] = []
        arrived: list[tuple[Load, int, Tensor]] = []
        for chain, place, piece in hops:
            here, there = (chains[chain][k] for k in (place, place + 1))
            if (load := loads[chain].get(place)) is not None:
                operations.append(dist.P2POp(dist.isend, load.pieces[piece], globally[there], group))
            if (load := loads[chain].get(place + 1)) is not None:
                wanted = load.pieces[piece]
                taken = torch.empty_like(wanted) if load.has_own else wanted
                operations.append(dist.P2POp(dist.irecv, taken, globally[here], group))
                arrived.append((load, piece, taken))
                num_bytes += taken.nbytes
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for load, piece, taken in arrived:
            if load.has_own:
                load.pieces[piece] += taken
            load.complete(piece)
    return num_bytes
