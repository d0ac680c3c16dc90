"""Copies of those who leave, given to those who stay: a stage's weights may be in nobody else's memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dynpipe_ds.migration.transport import exchange_bytes
from dynpipe_ds.ranks.agreement import gather
from dynpipe_ds.snapshots.inventory import Seat, Snapshot, newest_common
from dynpipe_ds.snapshots.store import Copy

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


def plan_hand_over(inventory: Iterable[Snapshot], staying: Sequence[int]) -> dict[Seat, tuple[int, int]]:
    """Who gives whose copy to whom, so that those who stay can go back by themselves; the same on every rank.

    Args:
        inventory: all copies that the ranks hold.
        staying: ranks that stay, ascending.

    Returns:
        By owner, source and destination; of the newest batch that all of them together can go back to.
    """
    copies = [copy for copy in inventory if copy.is_complete]
    batch = newest_common(copies)
    found: dict[Seat, tuple[int, int]] = {}
    for owner in sorted({copy.owner for copy in copies if copy.batch == batch}):
        best = max(
            (copy for copy in copies if (copy.batch, copy.owner) == (batch, owner)),
            key=lambda copy: (copy.is_whole, copy.holder in staying, -copy.holder),
        )
        if best.holder not in staying:
            found[owner] = best.holder, staying[len(found) % len(staying)]
    return found


def hand_over(run: Run, staying: Sequence[int]) -> None:
    """Give the copies of those who leave to those who stay; collective over both.

    Their memory is not bounded by ``survive.max_bytes`` until the next snapshot is complete.

    Args:
        run: of this rank.
        staying: ranks that stay, in the present world, ascending.
    """
    store, rank = run.snapshots.store, dist.get_rank()
    store.hold()
    own = [replace(copy, holder=rank) for copy in run.snapshots.inventory()]
    inventory = [copy for theirs in gather(own) for copy in theirs]
    batch = newest_common(inventory)
    plan = plan_hand_over(inventory, staying)
    going: dict[int, list[tuple[bytes, bytes, bytes]]] = {}
    for owner, (source, destination) in plan.items():
        if source == rank and batch is not None:
            copy = store.get(batch, owner)
            told = copy.snapshot.dumps(), copy.manifest, copy.data.numpy().tobytes()
            going.setdefault(destination, []).append(told)
    sources = sorted({source for source, destination in plan.values() if destination == rank})
    sends = {destination: pickle.dumps(copies) for destination, copies in sorted(going.items())}
    for data in exchange_bytes(sends, sources, run.stage.device).values():
        for text, manifest, content in pickle.loads(data):
            room = store.room(len(content), is_bounded=False)
            if content:
                room.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            store.put(Copy(Snapshot.loads(text, rank), manifest, room))
