"""One copy on its way: out of live tensors into host memory, and from there to the neighbour, in a thread.

All ranks have such a thread and a process group of its own, so that nothing here can be mistaken for, or wait for, what
training sends. What goes wrong in one rank's thread is told to all others by the same message that says that all went
well. A neighbour that is slow is waited for in the thread alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dynpipe_ds.snapshots.inventory import Snapshot
from dynpipe_ds.snapshots.store import Copy, SnapshotStore, checksum

PATIENCE_S = 60.0
"""How long a thread waits for another rank's before it gives up, and with it these process groups."""

PIECE_BYTES = 2**25
"""Largest message: gloo takes any, but between two of them a thread can notice that it is to end."""

_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Finished(NamedTuple):
    """A copy whose bytes are all here.

    Attributes:
        copy: itself.
        sent_bytes: of the data at the front that the neighbour gets.
        sent_checksum: of the manifest and these.
    """

    copy: Copy
    sent_bytes: int
    sent_checksum: int

    def told(self) -> tuple[bytes, bytes, Tensor]:
        """What the neighbour gets: the snapshot as text, the manifest and the data."""
        snapshot, data = self.copy.snapshot, self.copy.data[: self.sent_bytes]
        is_whole = len(data) == len(self.copy.data)
        told = replace(snapshot, is_whole=is_whole, num_bytes=len(data), checksum=self.sent_checksum)
        return told.dumps(), self.copy.manifest, data


@dataclass
class Outgoing:
    """A copy that is being made on one rank.

    Attributes:
        batch: trained when it is taken.
        snapshot: of this rank; ``None`` if it could not be taken here, and ``problem`` says why.
        manifest: of it.
        data: for all its bytes.
        sent_bytes: of those at the front that the neighbour gets.
        during: tensors to copy into the data, with their first byte, before ``copied`` is set.
        alive: what the device still reads from.
        ready: waits until what the device copies has come; called in the thread.
        problem: what went wrong so far.
        copied: set when nothing is read from live tensors any more.
        cpu_s: seconds of processor time that the thread took.
    """

    batch: int
    snapshot: Snapshot | None = None
    manifest: bytes = b""
    data: Tensor = _NOTHING
    sent_bytes: int = 0
    during: list[tuple[Tensor, int]] = field(default_factory=list)
    alive: list[tuple[Tensor, int]] = field(default_factory=list)
    ready: Callable[[], object] = lambda: None
    problem: str = ""
    copied: threading.Event = field(default_factory=threading.Event)
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of the copies of a batch, on all ranks the same but for the seconds.

    Attributes:
        batch: trained when they were taken.
        is_complete: whether every rank has its own and its neighbour's.
        problem: of this rank; empty if there was none here.
        cpu_s: seconds of processor time that this rank's thread took.
    """

    batch: int
    is_complete: bool
    problem: str
    cpu_s: float


class Courier:
    """Carries copies to a neighbour, one at a time.

    Args:
        store: keeps what is complete.
        group: gloo, of all ranks, for this alone.
        rank: of this process.
        holder: rank that holds this one's copy; ``None`` in a world of one.
        owner: rank whose copy this one holds.
    """

    def __init__(
        self, store: SnapshotStore, group: dist.ProcessGroup, rank: int, holder: int | None, owner: int | None
    ) -> None:
        self._store, self._group, self._rank = store, group, rank
        self._holder, self._owner = holder, owner
        self._tasks: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._num_under_way = 0
        self.is_broken = False
        self._is_left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="dynpipe_ds snapshots", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a copy is on its way; true until its outcome was taken."""
        return self._num_under_way > 0

    def send(self, outgoing: Outgoing) -> None:
        """Begin; all ranks do, for the same batch."""
        self._num_under_way += 1
        self._tasks.put(outgoing)

    def outcomes(self) -> Iterable[Outcome]:
        """What has come to its end since it was asked last."""
        while not self._outcomes.empty():
            self._num_under_way -= 1
            yield self._outcomes.get()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is on its way any more; false if something still is."""
        until = time.monotonic() + seconds
        while self._outcomes.qsize() < self._num_under_way and not self.is_broken:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def leave(self) -> None:
        """Carry nothing any more; what is on its way may come to nothing, without a word."""
        self._is_left.set()
        self._tasks.put(None)

    # -- the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        while (outgoing := self._tasks.get()) is not None:
            started = time.thread_time()
            is_complete = False
            try:
                is_complete = self._carry(outgoing)
            except Exception as error:  # noqa: BLE001 - whatever happens here, training goes on
                outgoing.problem = outgoing.problem or f"{type(error).__name__}: {error}"
                self.is_broken = True
            finally:
                outgoing.during.clear()
                outgoing.copied.set()
                if outgoing.data is not _NOTHING:
                    self._store.give_back(outgoing.data)
            outgoing.cpu_s = time.thread_time() - started
            if not self._is_left.is_set():
                self._outcomes.put(Outcome(outgoing.batch, is_complete, outgoing.problem, outgoing.cpu_s))

    def _carry(self, outgoing: Outgoing) -> bool:
        """Finish the local copy, exchange, and agree; what fails here alone is told the others."""
        own: _Finished | None = None
        try:
            own = self._finish(outgoing)
        except Exception as error:  # noqa: BLE001 - the neighbour waits for what follows
            outgoing.problem = f"{type(error).__name__}: {error}"
        finally:
            outgoing.copied.set()
        incoming = self._exchange(outgoing, own)
        if own is not None:
            self._store.put(own.copy)
            outgoing.data = _NOTHING
        if incoming is not None:
            self._store.put(incoming)
        is_fine = own is not None and (incoming is not None or self._owner is None)
        verdict = torch.tensor([int(is_fine)])
        _within(dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=self._group, async_op=True))
        if verdict.item():
            self._store.settle(outgoing.batch)
        return bool(verdict.item())

    def _finish(self, outgoing: Outgoing) -> _Finished | None:
        if outgoing.snapshot is None:
            return None
        copy_all(outgoing.during, outgoing.data)
        outgoing.ready()
        outgoing.alive.clear()
        outgoing.copied.set()
        outgoing.during.clear()
        sent = checksum(outgoing.manifest, outgoing.data[: outgoing.sent_bytes])
        whole = checksum(b"", outgoing.data[outgoing.sent_bytes :], sent)
        snapshot = replace(outgoing.snapshot, checksum=whole, is_complete=True)
        return _Finished(Copy(snapshot, outgoing.manifest, outgoing.data), outgoing.sent_bytes, sent)

    def _exchange(self, outgoing: Outgoing, own: _Finished | None) -> Copy | None:
        """Give the neighbour what it holds of this rank, and take what this one holds of another."""
        if self._owner is None:
            return None
        text, manifest, data = (b"", b"", _NOTHING) if own is None else own.told()
        head = text + manifest
        numbers = torch.tensor([len(text), len(manifest), len(data), int(own is not None)])
        theirs = torch.empty_like(numbers)
        self._swap([numbers], [theirs])
        num_text, num_manifest, num_data, is_there = map(int, theirs.tolist())
        place: Tensor | None = None
        if is_there:
            try:
                place = self._store.room(num_data)
            except RuntimeError as error:  # full; it must come all the same, or its owner would wait
                outgoing.problem = outgoing.problem or str(error)
        received = torch.empty(num_text + num_manifest, dtype=torch.uint8)
        scrap = torch.empty(min(num_data, PIECE_BYTES) if place is None else 0, dtype=torch.uint8)
        mine = [*_pieces(torch.frombuffer(bytearray(head or b"-"), dtype=torch.uint8)[: len(head)]), *_pieces(data)]
        here = [*_pieces(received), *(_pieces(place) if place is not None else _in_scrap(scrap, num_data))]
        try:
            for number in range(max(len(mine), len(here))):
                self._swap(mine[number : number + 1], here[number : number + 1])
        except BaseException:
            if place is not None:
                self._store.give_back(place)
            raise
        if place is None:
            return None
        told = received.numpy().tobytes()
        copy = Copy(Snapshot.loads(told[:num_text], self._rank), told[num_text:], place)
        if not copy.is_sound():
            self._store.give_back(place)
            outgoing.problem = f"the copy of {copy.snapshot.owner} arrived with a wrong checksum"
            return None
        return copy

    def _swap(self, sends: list[Tensor], receives: list[Tensor]) -> None:
        assert self._holder is not None and self._owner is not None
        if self._is_left.is_set():
            raise RuntimeError("this rank takes part no more")
        works = [dist.irecv(t, self._owner, group=self._group) for t in receives]
        works += [dist.isend(t, self._holder, group=self._group) for t in sends]
        for work in works:
            _within(work)


def copy_all(tensors: Iterable[tuple[Tensor, int]], data: Tensor) -> None:
    """Copy rows of bytes to their places; of host tensors without torch's threads, which compute meanwhile.

    Args:
        tensors: with their first byte.
        data: where to.
    """
    for source, start in tensors:
        place = data[start : start + source.numel()]
        if source.device.type == "cpu":
            place.numpy()[:] = source.numpy()
        else:
            place.copy_(source, non_blocking=True)


def _pieces(data: Tensor) -> list[Tensor]:
    return [data[start : start + PIECE_BYTES] for start in range(0, data.numel(), PIECE_BYTES)]


def _in_scrap(scrap: Tensor, num_bytes: int) -> list[Tensor]:
    """Where pieces go that nobody keeps."""
    return [scrap[: num_bytes - start] for start in range(0, num_bytes, PIECE_BYTES)]


def _within(work: dist.Work | None) -> None:
    if work is not None:
        work.wait(timedelta(seconds=PATIENCE_S))
