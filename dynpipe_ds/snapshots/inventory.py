"""What is held of which worker, and what follows from that; values and pure functions.

Survivors of a lost worker gather their inventories, take :func:`newest_common` of all, and hand it with the seats in
the new world to :func:`plan_restore`, which says who gives what to whom. All ranks compute the same from the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NamedTuple


class Seat(NamedTuple):
    """A worker's place in the pipeline.

    Attributes:
        stage: its stage.
        replica: its data-parallel replica.
    """

    stage: int
    replica: int


@dataclass(frozen=True)
class Snapshot:
    """One copy of one worker's state.

    Attributes:
        batch: batches that were trained when it was taken.
        owner: whose state it is.
        boundaries: of the stages then, ``S + 1``.
        num_replicas: data-parallel replicas then, R.
        holder: rank that has this copy, as ranks are counted now.
        is_whole: whether what all replicas of the stage have alike is in it, too; a neighbour needs it only where no
            living replica would have it.
        is_sharded: whether replicas share out optimizer state, so that a layer's is spread over their snapshots.
        num_bytes: that it takes in host memory.
        checksum: of its bytes.
        is_complete: whether all of it has come, and its checksum was right.
    """

    batch: int
    owner: Seat
    boundaries: tuple[int, ...]
    num_replicas: int
    holder: int
    is_whole: bool
    is_sharded: bool
    num_bytes: int
    checksum: int
    is_complete: bool

    def dumps(self) -> bytes:
        """As JSON, for :meth:`loads` on the rank that will hold it."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, text: bytes, holder: int) -> Snapshot:
        """What :meth:`dumps` wrote.

        Args:
            text: as written.
            holder: rank that has the copy.
        """
        values = json.loads(text)
        seats = {"owner": Seat(*values["owner"]), "boundaries": tuple(values["boundaries"])}
        return cls(**{**values, **seats, "holder": holder})

    @property
    def num_stages(self) -> int:
        """S, then."""
        return len(self.boundaries) - 1

    @property
    def layers(self) -> range:
        """Global indices of its layers."""
        return range(self.boundaries[self.owner.stage], self.boundaries[self.owner.stage + 1])

    @property
    def seats(self) -> list[Seat]:
        """All workers then."""
        return [Seat(s, r) for s in range(self.num_stages) for r in range(self.num_replicas)]


def newest_common(inventory: Iterable[Snapshot]) -> int | None:
    """The newest batch to which the holders of some copies can go back together.

    Args:
        inventory: all copies that all of them hold.

    Returns:
        Batches trained by then; ``None`` if there is no such batch.
    """
    by_batch: dict[int, list[Snapshot]] = {}
    for snapshot in inventory:
        if snapshot.is_complete:
            by_batch.setdefault(snapshot.batch, []).append(snapshot)
    return next((batch for batch in sorted(by_batch, reverse=True) if not missing(by_batch[batch])), None)


def missing(copies: Sequence[Snapshot]) -> list[Seat]:
    """Workers of whom complete copies of one batch do not hold all.

    Args:
        copies: complete, of the same batch, at least one.

    Returns:
        Those without a copy, and those whose stage has no whole copy.
    """
    held = {copy.owner for copy in copies}
    whole = {copy.owner.stage for copy in copies if copy.is_whole}
    return [seat for seat in copies[0].seats if seat not in held or seat.stage not in whole]


class Part(Enum):
    """What is taken from a copy.

    Attributes:
        ALL: of some layers, everything that is in it.
        SHARED: of some layers, what all replicas have alike.
        SHARDS: of some layers, this replica's share of what replicas share out.
        STATE: random streams, counters and what is the same everywhere; no layers.
        DATA: micro-batches since; no layers.
    """

    ALL = "all"
    SHARED = "shared"
    SHARDS = "shards"
    STATE = "state"
    DATA = "data"


@dataclass(frozen=True)
class Parcel:
    """What one rank gives another, or keeps.

    Attributes:
        source: rank that holds the copy.
        destination: rank that needs it; may be the same.
        owner: whose copy it is from.
        part: what of it.
        layers: global indices.
    """

    source: int
    destination: int
    owner: Seat
    part: Part
    layers: tuple[int, ...] = ()


def plan_restore(
    inventory: Iterable[Snapshot], batch: int, seats: Mapping[int, Seat], boundaries: Sequence[int]
) -> list[Parcel]:
    """Who gives what to whom, so that some ranks go on from a batch with some partition.

    Replica r of the new world takes buffers, random streams and what single replicas own from replica r of the old one
    (modulo its number of replicas).

    Args:
        inventory: all copies that the ranks hold.
        batch: to go back to; ``newest_common`` gave it.
        seats: the place that each rank has from now on.
        boundaries: of the stages from now on.

    Returns:
        In an order that is the same on every rank.

    Raises:
        ValueError: if some worker's state is not held.
    """
    copies = [copy for copy in inventory if copy.is_complete and copy.batch == batch]
    if not copies or missing(copies):
        lost = missing(copies) if copies else "anybody"
        raise ValueError(f"batch {batch} can't be gone back to: no complete copies of the state of {lost} are left")
    parcels: list[Parcel] = []
    for rank, seat in sorted(seats.items()):
        parcels += _for_rank(copies, rank, seat, boundaries)
    return parcels


def _for_rank(copies: Sequence[Snapshot], rank: int, seat: Seat, boundaries: Sequence[int]) -> list[Parcel]:
    first = copies[0]
    replica = seat.replica % first.num_replicas
    wanted = range(boundaries[seat.stage], boundaries[seat.stage + 1])
    old = [s for s in range(first.num_stages) if _common(first.boundaries, s, wanted)]
    same = len(boundaries) == len(first.boundaries)
    home = seat.stage if same else (old or [first.num_stages - 1])[0]
    state = _nearest(copies, Seat(home, replica), rank)
    parcels = [Parcel(state.holder, rank, state.owner, Part.STATE)]
    for stage in old:
        layers = _common(first.boundaries, stage, wanted)
        own = _nearest(copies, Seat(stage, replica), rank)
        parcels.append(Parcel(own.holder, rank, own.owner, Part.ALL, layers))
        if not own.is_whole:
            whole = [copy for copy in copies if copy.owner.stage == stage and copy.is_whole]
            other = min(whole, key=lambda copy: (copy.holder != rank, copy.owner, copy.holder))
            parcels.append(Parcel(other.holder, rank, other.owner, Part.SHARED, layers))
        if first.is_sharded:
            for number in range(first.num_replicas):
                if number != replica:
                    other = _nearest(copies, Seat(stage, number), rank)
                    parcels.append(Parcel(other.holder, rank, other.owner, Part.SHARDS, layers))
    return parcels


def _common(boundaries: Sequence[int], stage: int, wanted: range) -> tuple[int, ...]:
    return tuple(layer for layer in range(boundaries[stage], boundaries[stage + 1]) if layer in wanted)


def _nearest(copies: Sequence[Snapshot], owner: Seat, rank: int) -> Snapshot:
    """A copy of a worker's state: whole before not, here before elsewhere."""
    found = [copy for copy in copies if copy.owner == owner]
    return min(found, key=lambda copy: (not copy.is_whole, copy.holder != rank, copy.holder))
