"""Which batch can be gone back to, and who then gives what to whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynpipe_ds.snapshots.inventory import Parcel, Part, Seat, Snapshot, missing, newest_common, plan_restore


def copy(
    stage: int, holder: int, *, replica: int = 0, batch: int = 4, whole: bool = True, replicas: int = 1,
    sharded: bool = False, complete: bool = True, boundaries: tuple[int, ...] = (0, 2, 4, 6),
) -> Snapshot:
    return Snapshot(batch, Seat(stage, replica), boundaries, replicas, holder, whole, sharded, 10, 7, complete)


def ring(batch: int) -> list[Snapshot]:
    """Three stages: each holds its own and the copy of the one before it."""
    return [copy(s, h, batch=batch) for s in range(3) for h in (s, (s + 1) % 3)]


def without(copies: list[Snapshot], *holders: int) -> list[Snapshot]:
    return [c for c in copies if c.holder not in holders]


@pytest.mark.parametrize("lost", range(3))
def test_any_single_holder_may_be_lost(lost: int) -> None:
    assert newest_common(without(ring(4) + ring(8), lost)) == 8


def test_two_neighbours_are_too_many() -> None:
    assert newest_common(without(ring(4), 0, 1)) is None
    assert missing(without(ring(4), 0, 1)) == [Seat(0, 0)]


def test_an_incomplete_copy_counts_for_nothing() -> None:
    newer = [replace(c, is_complete=c.holder != 1) for c in ring(8)]
    assert newest_common(without(ring(4) + newer, 0)) == 4  # of stage 0 rank 1 alone has a copy, not all of it


def test_what_is_shared_must_be_whole_somewhere() -> None:
    two = [copy(s, 2 * s + r, replica=r, replicas=2, boundaries=(0, 2, 4)) for s in range(2) for r in range(2)]
    theirs = [replace(c, holder=(c.holder + 1) % 4, is_whole=False) for c in two]
    assert newest_common(without(two + theirs, 0)) == 4
    assert newest_common(without(two + theirs, 0, 1)) is None
    assert missing(without(two + theirs, 0)) == []


def test_the_same_seats_take_their_own() -> None:
    parcels = plan_restore(ring(4), 4, {r: Seat(r, 0) for r in range(3)}, (0, 2, 4, 6))
    assert all(p.source == p.destination for p in parcels)
    assert [p.layers for p in parcels if p.part is Part.ALL] == [(0, 1), (2, 3), (4, 5)]


def test_a_lost_stage_comes_from_its_neighbour_into_other_stages() -> None:
    left = without(ring(4), 1)  # ranks 0 and 2 of then are 0 and 1 now
    left = [replace(c, holder={0: 0, 2: 1}[c.holder]) for c in left]
    parcels = plan_restore(left, 4, {0: Seat(0, 0), 1: Seat(1, 0)}, (0, 3, 6))
    assert parcels == [
        Parcel(0, 0, Seat(0, 0), Part.STATE),
        Parcel(0, 0, Seat(0, 0), Part.ALL, (0, 1)),
        Parcel(1, 0, Seat(1, 0), Part.ALL, (2,)),
        Parcel(1, 1, Seat(1, 0), Part.STATE),
        Parcel(1, 1, Seat(1, 0), Part.ALL, (3,)),
        Parcel(1, 1, Seat(2, 0), Part.ALL, (4, 5)),
    ]


def test_shards_come_from_every_replica_and_what_is_shared_from_one_that_has_it() -> None:
    own = [copy(0, r, replica=r, replicas=2, sharded=True, boundaries=(0, 2)) for r in range(2)]
    neighbours = [replace(own[r], holder=1 - r, is_whole=False) for r in range(2)]
    parcels = plan_restore([own[1], neighbours[0]], 4, {0: Seat(0, 0), 1: Seat(0, 1)}, (0, 2))
    of_first = [p for p in parcels if p.destination == 0]
    assert [(p.part, p.owner) for p in of_first] == [
        (Part.STATE, Seat(0, 0)), (Part.ALL, Seat(0, 0)), (Part.SHARED, Seat(0, 1)), (Part.SHARDS, Seat(0, 1)),
    ]
    assert {p.source for p in parcels} == {1}


def test_what_is_not_held_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch 4 can't be gone back to: .*Seat\(stage=0, replica=0\)"):
        plan_restore(without(ring(4), 0, 1), 4, {0: Seat(0, 0)}, (0, 6))
    with pytest.raises(ValueError, match="batch 9 can't be gone back to: .*anybody"):
        plan_restore(ring(4), 9, {0: Seat(0, 0)}, (0, 6))


def test_a_snapshot_is_told_to_its_holder() -> None:
    told = copy(1, 1, replica=1, replicas=2)
    assert Snapshot.loads(told.dumps(), 5) == replace(told, holder=5)
