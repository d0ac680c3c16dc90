"""Which rank was lost, when communication breaks down.

A process that is killed closes its connections, so its neighbours fail at once, with an error that names a
socket; *their* neighbours fail when they have ended, and so on. To name the first cause, every process tells
a store, from a thread of its own, that it is alive; whoever sees a connection break looks whose signs have
stopped, and the first to find out leaves the answer for all others.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

INTERVAL_S = 0.5
"""Seconds between two signs of life."""

PATIENCE = 6
"""A rank that gives no sign for this many intervals is lost."""

_STORE_TIMEOUT_S = 10

_BROKEN = re.compile(
    r"gloo|[Cc]onnection (was )?(closed|reset|refused)|[Bb]roken pipe|[Tt]imed out|remote process|NCCL", re.ASCII
)


class RankLostError(RuntimeError):
    """Another rank ended, so that this one cannot go on; names it and the last complete checkpoint.

    Args:
        ranks: who was lost, kept as an attribute.
        message: the text.
    """

    def __init__(self, ranks: list[int], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks


class Heartbeat:
    """Signs of life of this process, and a look at those of the others.

    Args:
        store: a connection of its own to the process group's store.
        rank: this process.
        num_ranks: world size.
        interval_s: seconds between two signs.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, *, interval_s: float) -> None:
        self._store, self._rank, self._num_ranks, self._interval_s = store, rank, num_ranks, interval_s
        self._known: list[int] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dynpipe_ds heartbeat", daemon=True)
        self._sign(0)
        self._thread.start()
        # A thread that the interpreter ends while it is inside the store takes the process down with it.
        atexit.register(self.stop)

    def _sign(self, number: int) -> None:
        with self._lock:
            self._store.set(f"alive/{self._rank}", str(number))

    def _beat(self) -> None:
        number = 0
        with suppress(RuntimeError):  # the store is gone: its owner has ended
            while not self._stop.wait(self._interval_s):
                number += 1
                self._sign(number)
                self._known = self._known or self._found()

    def stop(self) -> None:
        """Give no more signs."""
        self._stop.set()
        self._thread.join(timeout=_STORE_TIMEOUT_S)
        atexit.unregister(self.stop)

    def _signs(self) -> list[bytes]:
        with self._lock:
            keys = [f"alive/{rank}" for rank in range(self._num_ranks)]
            return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def lost_ranks(self) -> list[int]:
        """Find the ranks that give no more signs; takes up to ``PATIENCE`` intervals.

        Returns:
            The ranks that the first process to look found lost; rank 0 if the store is gone, which it
            holds unless the launcher does; empty if all are alive.
        """
        try:
            found = self._look()
        except RuntimeError:
            return self._known or [0]
        if found and self._rank == 0:
            # The store ends with this process: the others shall have read the answer before.
            time.sleep(3 * self._interval_s)
        return found

    def _look(self) -> list[int]:
        first, deadline_s = self._signs(), time.monotonic() + PATIENCE * self._interval_s
        silent = {rank for rank in range(self._num_ranks) if rank != self._rank}
        while silent and time.monotonic() < deadline_s:
            found = self._found()
            if found:
                return found
            time.sleep(self._interval_s / 4)
            now = self._signs()
            silent = {rank for rank in silent if now[rank] == first[rank]}
        if silent:
            with self._lock:
                self._store.compare_set("lost", "", ",".join(map(str, sorted(silent))))
        return self._found()

    def _found(self) -> list[int]:
        with self._lock:
            text = self._store.get("lost").decode() if self._store.check(["lost"]) else ""
        return [int(rank) for rank in text.split(",")] if text else []


_heartbeat: tuple[Any, Heartbeat | None] | None = None
_generation = 0


def start_heartbeat() -> Heartbeat | None:
    """Start this process's signs of life, once a process group; collective over all ranks.

    Returns:
        The heartbeat; ``None`` where the process group's store takes no second connection.
    """
    global _heartbeat, _generation
    store = dist.distributed_c10d._get_default_store()
    if _heartbeat is None or _heartbeat[0] is not dist.group.WORLD:
        if _heartbeat is not None and _heartbeat[1] is not None:
            _heartbeat[1].stop()
        own = _own_connection(store)
        _generation += 1
        made = None
        if own is not None:
            prefixed = PrefixStore(f"dynpipe_ds/heartbeat/{_generation}", own)
            made = Heartbeat(prefixed, dist.get_rank(), dist.get_world_size(), interval_s=INTERVAL_S)
        dist.barrier()  # from here on every rank has its connection
        _heartbeat = dist.group.WORLD, made
    return _heartbeat[1]


def _own_connection(store: Any) -> Any:
    """A second connection, since one blocks while the main thread waits on it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    try:
        own = store.clone() if os.environ.get("WORLD_SIZE") != "1" else None
        if own is not None:
            own.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        return own
    except (AttributeError, RuntimeError):
        return None


def broke_connection(error: BaseException) -> bool:
    """Say whether an error looks like a lost connection to another rank."""
    if isinstance(error, RankLostError):
        return False
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))


@contextmanager
def naming_lost_ranks(
    heartbeat: Heartbeat | None, doing: str, newest_checkpoint: Callable[[], str | None]
) -> Iterator[None]:
    """Turn a broken connection into an error that says who was lost and where to go on from.

    Args:
        heartbeat: this process's; without one errors pass as they are.
        doing: what goes on inside, for the message: ``"training batch 12"``.
        newest_checkpoint: finds the newest complete checkpoint that this run knows of.

    Raises:
        RankLostError: if communication broke down inside because another rank ended.
    """
    try:
        yield
    except RuntimeError as error:
        lost = heartbeat.lost_ranks() if heartbeat is not None and broke_connection(error) else []
        if not lost:
            raise
        names = ", ".join(f"rank {rank}" for rank in lost)
        newest = newest_checkpoint()
        where = (
            f"the last complete checkpoint is {newest}: load it and go on from there"
            if newest else "no checkpoint was saved or loaded by this run"
        )
        raise RankLostError(lost, f"{names} ended while {doing}, so this rank stops; {where}") from error
