"""A place where processes meet: a key-value store that one of them holds, on the job's interface alone.

The launcher's store lives in the process that was rank 0 at the start, and torch binds a store of its own to every
interface of the machine. Here any process can hold one, bound to the address by which the job's machines reach it.
Whoever reaches that address can use the store, as with any job of torch: let the job's network be its own.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch._C._distributed_c10d import TCPStore

from dynpipe_ds.ranks.answering import RunningClock, own_address

T = TypeVar("T")

STORE_S = 35.0
"""Longest time for anything that a store does, in seconds that this process runs."""

_BACKLOG = 4096


class Place(NamedTuple):
    """Where to meet.

    Attributes:
        host: name or number of the machine.
        port: of the store.
    """

    host: str
    port: int


_own: tuple[int, Place, Any] | None = None  # by process: a fork has not its parent's


def open_place() -> Place:
    """The place that this process holds until it ends; always the same one.

    Raises:
        OSError: if no socket can be had.
    """
    global _own
    if _own is None or _own[0] != os.getpid():
        family, advertised, bound = own_address()
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.bind((bound, 0))
        listening.listen(_BACKLOG)
        place = Place(advertised, int(listening.getsockname()[1]))
        store = TCPStore(
            place.host, place.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_S),
            master_listen_fd=listening.detach(),
        )
        _own = os.getpid(), place, store
    return _own[1]


def enter(place: Place) -> Any:
    """The store at a place, which may be this process's own.

    Raises:
        RuntimeError: if it can't be reached in time.
    """
    if _own is not None and _own[:2] == (os.getpid(), place):
        return _own[2]
    return bounded(lambda: TCPStore(
        place.host, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S)
    ))


def bounded(action: Callable[[], T], patience_s: float | None = None) -> T:
    """Use a store, which lives in another process: if that one is stopped, no timeout of the store's own counts.

    Args:
        action: what to do with it.
        patience_s: longest time, in seconds that this process runs; by default ``STORE_S``.

    Raises:
        RuntimeError: if it takes longer.
    """
    patience_s = STORE_S if patience_s is None else patience_s
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            failures.append(error)

    thread, clock = threading.Thread(target=run, name="dynpipe_ds store", daemon=True), RunningClock()
    thread.start()
    while thread.is_alive():
        if clock.tick() > patience_s:
            raise RuntimeError(f"the store where the ranks meet did not answer for {patience_s:g} s; timed out")
        thread.join(0.25)
    if failures:
        raise failures[0]
    return results[0]
