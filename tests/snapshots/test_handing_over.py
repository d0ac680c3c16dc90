"""Which copies those who leave give to those who stay."""

from __future__ import annotations

from dataclasses import replace

from dynpipe_ds.snapshots.handing_over import plan_hand_over
from dynpipe_ds.snapshots.inventory import Seat, Snapshot, missing

OWN = Snapshot(4, Seat(0, 0), (0, 4, 8), 2, 0, True, True, 8, 0, True)
PART = replace(OWN, is_whole=False)  # what a neighbour holds where a replica would have the rest


def copies_of(seat: Seat, owner: int, holder: int) -> list[Snapshot]:
    return [replace(OWN, owner=seat, holder=owner), replace(PART, owner=seat, holder=holder)]


def test_what_only_who_leaves_holds_goes_to_who_stays() -> None:
    """Two stages of two replicas, each copied to the next rank; rank 1 is lost, and rank 0 leaves."""
    inventory = [
        *copies_of(Seat(0, 0), 0, 1)[:1], *copies_of(Seat(0, 1), 1, 2)[1:], *copies_of(Seat(1, 0), 2, 3),
        replace(OWN, owner=Seat(1, 1), holder=3), replace(PART, owner=Seat(1, 1), holder=0),
    ]
    plan = plan_hand_over(inventory, [2, 3])
    assert plan == {Seat(0, 0): (0, 2)}
    stay = [copy for copy in inventory if copy.holder in (2, 3)]
    assert Seat(0, 1) in missing(stay), "without it nobody has the weights of stage 0"
    assert not missing([*stay, replace(OWN, holder=2)])


def test_nothing_is_given_where_nothing_is_complete() -> None:
    assert plan_hand_over([replace(OWN, is_complete=False)], [2, 3]) == {}
    assert plan_hand_over([OWN], [2, 3]) == {}, "other seats are missing"
