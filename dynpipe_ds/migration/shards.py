"""Which elements of sharded optimizer state go from which rank to which when layers move: pure, apart from sending.

Replicas share out a flat buffer in equal shares, one behind the other (ZeRO-1, bf16). When parameters leave or come,
all that lies behind them shifts, and with it what each replica holds. Between two such layouts every element has one
rank that has it and one that needs it, so the transfers are disjoint, and no shorter list could do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Piece(NamedTuple):
    """The part of a parameter that one rank holds.

    Attributes:
        rank: that holds it.
        start: its first element, in the parameter.
        stop: behind its last element, in the parameter.
        position: of the first element, in the rank's share.
    """

    rank: int
    start: int
    stop: int
    position: int


class Place(NamedTuple):
    """Where a parameter lies in a flat buffer that ranks share out.

    Attributes:
        ranks: that share it out, in the order of their shares.
        share: elements of each share.
        offset: elements before the parameter, in the whole buffer.
        num_elements: of the parameter.
    """

    ranks: tuple[int, ...]
    share: int
    offset: int
    num_elements: int

    def pieces(self) -> Iterator[Piece]:
        """What each rank holds of the parameter, in order; nothing of ranks that hold none of it."""
        start, stop = self.offset, self.offset + self.num_elements
        while start < stop:
            holder, position = divmod(start, self.share)
            end = min(stop, (holder + 1) * self.share)
            yield Piece(self.ranks[holder], start - self.offset, end - self.offset, position)
            start = end


@dataclass(frozen=True)
class FlatLayout:
    """A flat buffer: parameters one behind the other, shared out by ranks.

    Attributes:
        sizes: number of elements of each parameter, in the order in which they lie there, by any name.
        ranks: that share it out, in the order of their shares.
        multiple: what the elements of a share are a multiple of.
        alignment: elements to a multiple of which every parameter's offset is rounded up.
    """

    sizes: Mapping[Hashable, int]
    ranks: tuple[int, ...] = (0,)
    multiple: int = 2
    alignment: int = 1

    @cached_property
    def num_used(self) -> int:
        """Elements up to the end of the last parameter."""
        return max((offset + size for offset, size in zip(self.offsets, self.sizes.values(), strict=True)), default=0)

    @cached_property
    def offsets(self) -> list[int]:
        """Elements before each parameter."""
        found, end = [], 0
        for size in self.sizes.values():
            found.append(end + -end % self.alignment)
            end = found[-1] + size
        return found

    @cached_property
    def share(self) -> int:
        """Elements that each rank holds, the padding at the end included."""
        parts = self.multiple * len(self.ranks)
        return (self.num_used + -self.num_used % parts) // len(self.ranks)

    @cached_property
    def places(self) -> dict[Hashable, Place]:
        """Where each parameter lies."""
        pairs = zip(self.sizes.items(), self.offsets, strict=True)
        return {name: Place(self.ranks, self.share, offset, size) for (name, size), offset in pairs}


class Run(NamedTuple):
    """Consecutive elements that one rank has and one needs, which may be the same rank.

    Attributes:
        source: rank that has them.
        destination: rank that needs them.
        read_at: position of the first one in the source's old share.
        write_at: position of the first one in the destination's new share.
        num_elements: how many.
    """

    source: int
    destination: int
    read_at: int
    write_at: int
    num_elements: int

    def continued_by(self, other: Run) -> bool:
        """Whether another run begins where this one ends, on both ranks."""
        read_at, write_at = self.read_at + self.num_elements, self.write_at + self.num_elements
        return (self.source, self.destination, read_at, write_at) == other[:4]


def runs_of(before: Place, after: Place) -> Iterator[Run]:
    """Who has and who needs which elements of one parameter.

    Args:
        before: where it lies.
        after: where it shall lie.
    """
    needed = list(after.pieces())
    for held in before.pieces():
        for piece in needed:
            start, stop = max(held.start, piece.start), min(held.stop, piece.stop)
            if start < stop:
                read_at, write_at = held.position + start - held.start, piece.position + start - piece.start
                yield Run(held.rank, piece.rank, read_at, write_at, stop - start)


def joined(runs: Iterable[Run]) -> list[Run]:
    """Runs with those put together that continue each other."""
    found: list[Run] = []
    latest: dict[tuple[int, int], int] = {}
    for run in runs:
        i = latest.get(run[:2])
        if i is not None and found[i].continued_by(run):
            found[i] = found[i]._replace(num_elements=found[i].num_elements + run.num_elements)
        else:
            latest[run[:2]] = len(found)
            found.append(run)
    return found


class ShardTransfer(NamedTuple):
    """Elements of one kind of a parameter's state that one rank sends to another.

    Attributes:
        source: rank that sends them.
        destination: rank that receives them.
        parameter: its name.
        start: the first element, in the parameter.
        stop: behind the last element, in the parameter.
        kind: ``"master"``, or the optimizer's name for a moment.
    """

    source: int
    destination: int
    parameter: Hashable
    start: int
    stop: int
    kind: str


def plan_transfers(
    before: Iterable[FlatLayout], after: Iterable[FlatLayout], kinds: Sequence[str]
) -> list[ShardTransfer]:
    """List what ranks send each other so that all have their shares of the new layouts.

    Args:
        before: the flat buffers of all stages, one a stage and parameter group.
        after: those that shall be, with the same names of parameters. What is only in one of the two is left out.
        kinds: of state that every element has.

    Returns:
        The transfers, which are disjoint; what stays on its rank is not among them.
    """
    old = {name: place for layout in before for name, place in layout.places.items()}
    found = []
    for layout in after:
        for name, place in layout.places.items():
            for run in runs_of(old[name], place) if name in old else ():
                if run.source != run.destination:
                    start = place.ranks.index(run.destination) * place.share + run.write_at - place.offset
                    stop = start + run.num_elements
                    found += [ShardTransfer(run.source, run.destination, name, start, stop, kind) for kind in kinds]
    return found


def least_bytes(
    before: Iterable[FlatLayout], after: Iterable[FlatLayout], kinds: Mapping[str, int], weight_bytes: int = 0
) -> int:
    """The least that ranks must send each other, all together: what each needs and does not have, once.

    Args:
        before: the flat buffers of all stages, one a stage and parameter group.
        after: those that shall be.
        kinds: bytes of an element, by kind of state.
        weight_bytes: bytes of an element of the weights, which every rank of a layout holds whole; 0 leaves them out.

    Returns:
        Bytes. State and weights are two things here, also where master weights are rounded to the weights.
    """
    old = {name: place for layout in before for name, place in layout.places.items()}
    state = weights = 0
    for layout in after:
        for name, place in layout.places.items():
            if name in old:
                state += sum(r.num_elements for r in runs_of(old[name], place) if r.source != r.destination)
                weights += place.num_elements * len(set(place.ranks) - set(old[name].ranks))
    return state * sum(kinds.values()) + weights * weight_bytes
