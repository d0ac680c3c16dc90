"""What host memory keeps, and how much of it."""

from __future__ import annotations

import pytest
import torch

from dynpipe_ds.snapshots.inventory import Seat, Snapshot
from dynpipe_ds.snapshots.store import Copy, SnapshotStore, StoreFullError, checksum


def put(store: SnapshotStore, batch: int, stage: int = 0, num_bytes: int = 100) -> Copy:
    data = store.room(num_bytes)
    data.fill_(batch)
    manifest = b"plain"
    snapshot = Snapshot(
        batch, Seat(stage, 0), (0, 1, 2), 1, 9, True, False, num_bytes, checksum(manifest, data), True
    )
    copy = Copy(snapshot, manifest, data)
    store.put(copy)
    return copy


def batches(store: SnapshotStore) -> list[int]:
    return sorted({s.batch for s in store.inventory(0)})


def test_the_newest_two_are_kept_and_memory_does_not_grow() -> None:
    store = SnapshotStore()
    sizes = []
    for batch in range(0, 40, 4):
        store.begin(batch)
        for stage in (0, 1):
            put(store, batch, stage)
        assert batches(store) == ([batch - 4, batch] if batch else [0])
        store.settle(batch)
        assert batches(store) == [batch]
        sizes.append(store.num_bytes)
    assert set(sizes[1:]) == {400}


def test_of_those_that_are_not_known_to_be_everywhere_the_settled_one_stays() -> None:
    store = SnapshotStore()
    for batch in (0, 4, 8):
        store.begin(batch)
        put(store, batch)
        if batch == 0:
            store.settle(0)
    assert batches(store) == [0, 8]


def test_the_inventory_says_who_holds_and_damage_is_seen() -> None:
    store = SnapshotStore()
    copy = put(store, 3)
    assert [s.holder for s in store.inventory(5)] == [5]
    assert store.get(3, Seat(0, 0)).is_sound()
    copy.data[7] += 1
    assert not store.get(3, Seat(0, 0)).is_sound()
    store.forget(owner=Seat(1, 0))
    assert batches(store) == [3]
    store.forget()
    assert batches(store) == []


def test_a_copy_that_does_not_fit_is_refused_with_both_values() -> None:
    store = SnapshotStore(max_bytes=150)
    put(store, 0)
    with pytest.raises(StoreFullError, match=r"a copy of 60 bytes beside 100 .*max_bytes allows 150"):
        store.room(60)
    store.forget()
    assert store.room(140).numel() == 140


def test_checksums_go_on() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    assert checksum(b"x", data) == checksum(b"x", data[50:], checksum(b"x", data[:50]))


def test_what_is_held_is_not_dropped_by_a_late_thread() -> None:
    store = SnapshotStore()
    put(store, 0)
    put(store, 4)
    store.hold()
    store.settle(4)
    assert batches(store) == [0, 4]
    store.begin(8)
    assert batches(store) == [4]
