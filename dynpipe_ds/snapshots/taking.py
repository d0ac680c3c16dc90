"""Snapshots as the training loop sees them: when one is due, what is copied before a batch, what before its step.

Whether one is taken is agreed in one small message, and only at batches when one may be due. A rank whose earlier copy
is still on its way lets all others wait for the next batch, not for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dynpipe_ds.host import accelerator
from dynpipe_ds.ranks.agreement import gather
from dynpipe_ds.snapshots.capture import Captured, capture
from dynpipe_ds.snapshots.interval import LONGEST, SnapshotCost, smallest_interval
from dynpipe_ds.snapshots.inventory import Seat, Snapshot
from dynpipe_ds.snapshots.memory import COPIES, allowed_bytes, free_bytes, problem, state_bytes
from dynpipe_ds.snapshots.neighbours import neighbours, share_is_safe
from dynpipe_ds.snapshots.store import SnapshotStore
from dynpipe_ds.snapshots.transfer import PATIENCE_S, Courier, Outcome, Outgoing, copy_all
from dynpipe_ds.telling import log, warn

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_DATA_SHARE = 8
"""Micro-batches that no snapshot covers yet may take this part of what copies may; twice that if a snapshot fails."""


class Snapshots:
    """Takes snapshots; nothing at all if the section does not enable it.

    Args:
        run: between two batches, whenever something is called here.
        extra: gives plain values that belong to the state.

    Attributes:
        store: the copies that are here.
        num_changes: how often the script has changed what going back would not repeat.
        micro_batches: of the last batch; another number is a change by the script.
    """

    def __init__(self, run: Run, extra: Callable[[], Mapping[str, Any]]) -> None:
        self._run = run
        self._extra = extra
        self.config = run.config.survive
        self.store = SnapshotStore()
        self._courier: Courier | None = None
        self._sends_shared = True
        self._seat: Seat | None = None
        self.num_changes = 0
        self._outgoing: Outgoing | None = None
        self._hold_device: Callable[[], object] = lambda: None
        self._next = self._floor = 0
        self._last: int | None = None
        self._cost = SnapshotCost()
        self._data_bytes = self.micro_batches = 0
        self._told: set[str] = set()

    # -- beginning and end --------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether snapshots are taken."""
        return self._courier is not None

    @property
    def is_under_way(self) -> bool:
        """Whether a copy was on its way when the newest batch began."""
        return self._courier is not None and self._courier.is_busy

    def start(self, node: str) -> None:
        """Begin if the section says so; collective over all ranks.

        Args:
            node: name of this rank's node.

        Raises:
            ValueError: on every rank, if there is not enough host memory on some rank, with need and limit.
        """
        if not self.config.enabled:
            return
        self.store = SnapshotStore(pinned=accelerator.kind() != "cpu")
        nodes = self.connect(node)
        everything, alone = state_bytes(self._run.stage)
        sent = everything if self._sends_shared else alone
        told = gather((everything, sent, free_bytes(), self._run.stage.pipeline.rank))
        holders = neighbours(nodes)
        needed = [COPIES * e for e, _, _, _ in told]
        for rank, holder in enumerate(holders):
            needed[holder] += COPIES * told[rank][1]
        free = [f for _, _, f, _ in told]
        allowed = [allowed_bytes(free, nodes, rank) for rank in range(len(nodes))]
        given = self.config.max_bytes
        problems = [(rank, problem(needed[rank], allowed[rank], given)) for rank in range(len(nodes))]
        wrong = [f"rank {rank}: {text}" for rank, text in problems if text]
        if wrong:
            self.end()
            raise ValueError("; ".join(wrong))
        rank = self._run.stage.pipeline.rank
        self.store.max_bytes = allowed[rank] if given is None else min(given, allowed[rank])
        if rank == 0:
            log.info(
                "dynamic_pipeline: survive: snapshots every %s batches; copies take up to %.1f MiB of host memory on a "
                "worker (rank %d), %.1f MiB on all of them; rank 0 may use %.1f MiB", self.config.snapshot_every,
                max(needed) / 2**20, needed.index(max(needed)), sum(needed) / 2**20, self.store.max_bytes / 2**20,
            )

    def connect(self, node: str) -> list[str]:
        """Meet the others in a process group for copies alone; collective over all ranks, again in a new world.

        Args:
            node: name of this rank's node.

        Returns:
            The nodes of all ranks.
        """
        pipeline = self._run.stage.pipeline
        nodes = gather(node)
        if self._courier is not None:
            self._courier.leave()
        self._finish_local()
        self._node = node
        seat = Seat(pipeline.stage_id, pipeline.replica)
        if seat != self._seat:
            pipeline.reading.kept.forget_streams()
        self._seat = seat
        holders, rank = neighbours(nodes), pipeline.rank
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
        holder, owner = (holders[rank], holders.index(rank)) if holders else (None, None)
        self._courier = Courier(self.store, group, rank, holder, owner)
        safe = share_is_safe(nodes, pipeline.ranks_of(pipeline.stage_id))
        self._sends_shared = not safe and pipeline.replica == 0
        self._next, self._last = self._run.num_batches, None
        self._cost = SnapshotCost()  # other ranks hold other layers, and send over other links
        return nodes

    def pause(self) -> None:
        """Wait, for a while, until nothing is on its way: process groups are about to go."""
        if self._courier is not None:
            self._courier.wait(PATIENCE_S)

    def reconnect(self) -> None:
        """After ranks have left on purpose: what was copied before is of no use any more; collective over all ranks."""
        if self._courier is not None:
            self.store.forget()
            self.connect(self._node)

    def start_afresh(self) -> None:
        """After a checkpoint was loaded: what was copied and kept belongs to another past."""
        if self._courier is not None:
            self.pause()
            self._take_note(self._courier.outcomes())
            self.store.forget()
            self._run.stage.pipeline.reading.kept.start_afresh()
            self._last = None
            self.changed()

    def end(self) -> None:
        """Take no more."""
        if self._courier is not None:
            self._finish_local()
            self._courier.leave()
        self._courier = None

    # -- around a batch -----------------------------------------------------------------------

    def changed(self) -> None:
        """Take note of a change between batches that going back would not repeat."""
        self.expire()
        self.num_changes += 1

    def expire(self) -> None:
        """Older snapshots are of no use any more: take another one before the next batch."""
        self._floor = self._next = self._run.num_batches

    def begin_batch(self) -> None:
        """Take a snapshot if one is due; collective over all ranks if one may be."""
        if self._courier is None:
            return
        self._take_note(self._courier.outcomes())
        batch, count = self._run.num_batches, int(self._run.stage.pipeline.engine.micro_batches)
        if count != self.micro_batches:  # by the script, which would not do it again
            is_first, self.micro_batches = not self.micro_batches, count
            self.changed()
            self.num_changes -= is_first
        if batch < self._next:
            return
        started = self._run.clock.now_s()
        if self._is_due(batch):
            self._take(batch)
        self._spent(self._run.clock.now_s() - started, before_batch=True)

    def before_change(self) -> None:
        """Let nobody, the optimizer above all, change what is still being copied."""
        if self._outgoing is None:
            return
        started = self._run.clock.now_s()
        self._finish_local()
        self._spent(self._run.clock.now_s() - started)

    def end_batch(self, seconds: float) -> None:
        """Take note of a batch.

        Args:
            seconds: that it took, without what :meth:`begin_batch` did.
        """
        if self._courier is not None:
            self._finish_local()
            self._cost.batch(seconds, is_under_way=self.is_under_way)
            self._data_bytes = self._run.stage.pipeline.reading.kept.num_bytes(self._run.num_batches - 1)

    def inventory(self) -> list[Snapshot]:
        """The copies that are here and of use."""
        rank = self._run.stage.pipeline.rank
        return [snapshot for snapshot in self.store.inventory(rank) if snapshot.batch >= self._floor]

    # -- deciding -----------------------------------------------------------------------------

    def _is_due(self, batch: int) -> bool:
        """Whether all ranks take one now; collective over all ranks."""
        assert self._courier is not None
        limit = self.store.max_bytes
        affordable = LONGEST if limit is None else limit // _DATA_SHARE // max(self._data_bytes, 1)
        busy, broken, cost, room, is_new = self._greatest(
            self._courier.is_busy, self._courier.is_broken, self._cost.in_batches, -max(affordable, 1),
            not self._cost.is_compared,
        )
        if broken:
            self.tell("group", "a copy did not come through, so the ranks connect anew for the next one")
            last = self._last
            self.connect(self._node)
            self._last = last
        elif busy:
            self._next = batch + 1
            return False
        every = self.config.snapshot_every
        least = 2 if is_new else 1  # batches without one, to compare with
        interval = max(least, smallest_interval(cost)) if every == "auto" else every
        due = self._floor if self._last is None else self._last + min(interval, int(-room))
        if self._last is not None and self._last < self._floor:
            due = self._floor
        self._next = max(due, batch + 1)
        return due <= batch

    def _greatest(self, *numbers: float) -> list[float]:
        box = torch.tensor([float(n) for n in numbers], dtype=torch.float64, device=self._run.stage.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        found: list[float] = box.tolist()
        return found

    # -- doing --------------------------------------------------------------------------------

    def _take(self, batch: int) -> None:
        assert self._courier is not None
        self.store.begin(batch)
        outgoing = Outgoing(batch)
        self._cost.begin()
        try:
            self._fill(outgoing, capture(self._run, self._extra()))
        except Exception as error:  # noqa: BLE001 - this rank's trouble; the others are told in the thread
            outgoing.problem = f"{type(error).__name__}: {error}"
        self._last, self._next = batch, batch + 1
        self._outgoing = outgoing
        self._courier.send(outgoing)

    def _fill(self, outgoing: Outgoing, captured: Captured) -> None:
        stage = self._run.stage
        pipeline = stage.pipeline
        for text in captured.warnings:
            self.tell(text, text)
        data = self.store.room(captured.num_bytes)
        outgoing.data, outgoing.manifest = data, captured.manifest
        outgoing.sent_bytes = captured.num_bytes if self._sends_shared else captured.own_bytes
        outgoing.during = captured.during
        copy_all(captured.now, data)
        if accelerator.kind() != "cpu":
            self._hold_device, outgoing.ready = accelerator.copies_aside(lambda: copy_all(captured.during, data))
            outgoing.alive, outgoing.during = captured.during, []
        assert self._seat is not None
        outgoing.snapshot = Snapshot(
            outgoing.batch, self._seat, stage.partition, stage.module.replica.count, pipeline.rank, True,
            captured.is_sharded, captured.num_bytes, 0, False,
        )

    def _finish_local(self) -> None:
        if self._outgoing is not None:
            if accelerator.kind() == "cpu":
                self._outgoing.copied.wait()
            else:
                self._hold_device()
        self._outgoing = None

    def _spent(self, seconds: float, *, before_batch: bool = False) -> None:
        self._cost.spend(seconds, before_batch=before_batch)
        self._run.overhead.snapshots_s += seconds

    def _take_note(self, outcomes: Iterable[Outcome]) -> None:
        """What the thread computed on a CPU was taken from training; on the host of an accelerator it was idle."""
        for outcome in outcomes:
            if accelerator.is_synchronous():
                self._spent(outcome.cpu_s)
            self._run.overhead.snapshots_s += self._cost.end()
            if outcome.is_complete:
                self._run.stage.pipeline.reading.kept.forget_before(outcome.batch)
                continue
            if outcome.problem:
                self.tell("dropped", f"the snapshot of batch {outcome.batch} was dropped ({outcome.problem})")
            self._bound_data(outcome.batch)

    def _bound_data(self, batch: int) -> None:
        """Keep micro-batches no longer than they can be afforded, where no snapshot comes to cover them."""
        kept, limit = self._run.stage.pipeline.reading.kept, self.store.max_bytes
        if limit is not None and kept.num_bytes() > 2 * limit // _DATA_SHARE:
            kept.forget_before(batch)
            self._floor = max(self._floor, batch)
            self.tell("data", f"micro-batches before batch {batch} were dropped, so older snapshots are of no use")

    def tell(self, kind: str, message: str) -> None:
        """Warn once for each kind of trouble, on the rank that has it.

        Args:
            kind: of trouble.
            message: text.
        """
        if kind not in self._told:
            warn(f"survive: {message}; training goes on, and this is not said again")
        self._told.add(kind)
