"""Copies in this process's host memory: its own, and those that it holds for a neighbour."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dynpipe_ds.snapshots.inventory import Seat, Snapshot

_WASTE = 1.25
"""A buffer that is free is used again for at most so much less than it could hold."""


class StoreFullError(RuntimeError):
    """A copy would take more host memory than the store may use."""


@dataclass(frozen=True)
class Copy:
    """One worker's state as bytes.

    Attributes:
        snapshot: whose it is, and of which batch.
        manifest: plain values that say what lies where (:mod:`dynpipe_ds.snapshots.capture`).
        data: ``uint8`` on the host.
    """

    snapshot: Snapshot
    manifest: bytes
    data: Tensor

    def is_sound(self) -> bool:
        """Whether the bytes are still those that the checksum was made of."""
        return checksum(self.manifest, self.data) == self.snapshot.checksum


def checksum(manifest: bytes, data: Tensor, so_far: int | None = None) -> int:
    """CRC-32 of a copy's bytes; lets other threads run meanwhile.

    Args:
        manifest: first.
        data: then; one dimension of ``uint8``.
        so_far: that of the manifest and the bytes before, if these were counted already.
    """
    start = zlib.crc32(manifest) if so_far is None else so_far
    return zlib.crc32(data.numpy().data, start)


class SnapshotStore:
    """Keeps the newest copies, in a bounded number of bytes; may be used by several threads.

    Of each owner at most two are kept: the newest that every rank is known to have, and one that is newer, on its way
    or not known to be everywhere.

    Args:
        max_bytes: most that all copies together may take; ``None``: not bounded.
        pinned: whether buffers are page-locked, from which and to which accelerators copy while they compute.
    """

    def __init__(self, max_bytes: int | None = None, *, pinned: bool = False) -> None:
        self.max_bytes = max_bytes
        self._pinned = pinned
        self._copies: dict[tuple[int, Seat], Copy] = {}
        self._free: list[Tensor] = []
        self._in_use = 0
        self._settled: int | None = None
        self._is_held = False
        self._lock = threading.RLock()

    @property
    def num_bytes(self) -> int:
        """Host memory that copies take, and buffers that wait for the next ones."""
        with self._lock:
            return self._in_use + sum(buffer.numel() for buffer in self._free)

    @property
    def settled(self) -> int | None:
        """The newest batch whose copies are known to be complete on every rank."""
        return self._settled

    def begin(self, batch: int) -> None:
        """Make room for copies of a batch: of older ones only the newest that is surely complete stays.

        Args:
            batch: trained when they are taken.
        """
        with self._lock:
            self._is_held = False
            older = sorted({b for b, _ in self._copies if b != batch}, reverse=True)
            kept = self._settled if self._settled in older else next(iter(older), None)
            self._drop(lambda b: b != kept)

    def room(self, num_bytes: int, *, is_bounded: bool = True) -> Tensor:
        """A buffer for a copy; give it back by :meth:`give_back`, or :meth:`put` a copy with it.

        Args:
            num_bytes: that it needs.
            is_bounded: whether the store may refuse it.

        Raises:
            StoreFullError: if the store may not take so much, with both values.
        """
        with self._lock:
            fits = [b for b in self._free if num_bytes <= b.numel() <= max(_WASTE * num_bytes, 4096)]
            found = min(fits, key=Tensor.numel, default=None)
            if found is not None:
                self._free = [b for b in self._free if b is not found]
            else:
                self._free = []
                if is_bounded and self.max_bytes is not None and self._in_use + num_bytes > self.max_bytes:
                    raise StoreFullError(
                        f"a copy of {num_bytes} bytes beside {self._in_use} that are kept: survive.max_bytes allows "
                        f"{self.max_bytes}; raise it, or train on more workers"
                    )
                found = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._in_use += found.numel()
            return found[:num_bytes]

    def give_back(self, data: Tensor) -> None:
        """Let a buffer be used again.

        Args:
            data: from :meth:`room`.
        """
        with self._lock:
            whole = data if data._base is None else data._base
            self._in_use -= whole.numel()
            self._free.append(whole)

    def put(self, copy: Copy) -> None:
        """Keep a copy.

        Args:
            copy: its data is from :meth:`room`.
        """
        with self._lock:
            key = (copy.snapshot.batch, copy.snapshot.owner)
            if key in self._copies:
                self.give_back(self._copies[key].data)
            self._copies[key] = copy

    def settle(self, batch: int) -> None:
        """Take note that the copies of a batch are complete on every rank; older ones are not needed any more."""
        with self._lock:
            self._settled = batch
            if not self._is_held:
                self._drop(lambda b: b < batch)

    def hold(self) -> None:
        """Keep what is here until the next :meth:`begin`: somebody is about to go back to it."""
        with self._lock:
            self._is_held = True

    def forget(self, batch: int | None = None, owner: Seat | None = None) -> None:
        """Let go of copies.

        Args:
            batch: of this batch only.
            owner: of this worker only.
        """
        with self._lock:
            for key in list(self._copies):
                if batch in (None, key[0]) and owner in (None, key[1]):
                    self.give_back(self._copies.pop(key).data)
            if batch in (None, self._settled) and owner is None:
                self._settled = None

    def get(self, batch: int, owner: Seat) -> Copy:
        """A copy that is here."""
        with self._lock:
            return self._copies[batch, owner]

    def inventory(self, rank: int) -> list[Snapshot]:
        """What is here.

        Args:
            rank: of this process, as ranks are counted now.
        """
        with self._lock:
            return [replace(copy.snapshot, holder=rank) for copy in self._copies.values()]

    def _drop(self, is_old: Callable[[int], bool]) -> None:
        for key in [key for key in self._copies if is_old(key[0])]:
            self.give_back(self._copies.pop(key).data)
