"""Leaving broken process groups: the connections between this process and other ranks are shut down.

Who waits for a rank that is lost need not be connected to it: it may wait for a rank that waits for that one. Gloo's
operations can't be interrupted (``abort`` of its groups does nothing), but they fail as soon as their connection does.
So connections are shut down from another thread, and whatever waits on them raises. NCCL's groups are aborted.

A connection between two ranks ends on one side at a port that one of the two listens on. Ports are noted when a world
begins (:func:`listening`). A group that is made later is found by the side that listens; that suffices if both live.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

_OWN = Path("/proc/self/fd")

End = tuple[str, int]
"""One end of a connection: number of the machine, port."""


def can_break_off() -> bool:
    """Whether this system shows a process its own connections."""
    return _OWN.is_dir()


def listening() -> set[int]:
    """Ports that this process listens on."""
    found = set()
    for number in _numbers():
        with _opened(number) as one:
            if one is not None and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(int(one.getsockname()[1]))
    return found


def break_off(others: Collection[End], spared: Collection[int]) -> int:
    """Shut down this process's connections to other ranks, so that everything that waits on one of them raises.

    Args:
        others: where other ranks listen.
        spared: own ports the connections at which stay.

    Returns:
        How many there were.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if _is_nccl(group):
            group.abort()
    own, there = listening() - set(spared), {(_plain(host), port) for host, port in others}
    return sum(_shut_down(number, own, there) for number in _numbers())


def _shut_down(number: int, own: set[int], there: set[End]) -> bool:
    with _opened(number) as one:
        if one is None:
            return False
        try:
            peer = one.getpeername()
        except OSError:
            return False  # it listens, or its connection is broken already
        if one.getsockname()[1] not in own and (_plain(str(peer[0])), int(peer[1])) not in there:
            return False
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        return True


def _is_nccl(group: dist.ProcessGroup) -> bool:
    with suppress(Exception):
        return dist.get_backend(group) == "nccl"
    return False


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:")


def _numbers() -> list[int]:
    """File descriptors of this process that are sockets."""
    found = []
    for name in os.listdir(_OWN):
        with suppress(OSError):
            if os.readlink(_OWN / name).startswith("socket:"):
                found.append(int(name))
    return found


@contextmanager
def _opened(number: int) -> Iterator[socket.socket | None]:
    """A socket of TCP, by a number of its own, since the owner may close its own at any time."""
    try:
        one = socket.socket(fileno=os.dup(number))
    except OSError:
        yield None
        return
    with one:
        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
        yield one if is_tcp else None
