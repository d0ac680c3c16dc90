"""Cross-memory attach: ranks of one machine read each other's host memory, as MPI libraries do.

A message between two processes is copied into the system by one and out of it by the other. Linux also lets a process
read the memory of another one of the same user (``process_vm_readv``): one copy, made by the receiver alone. Where a
system forbids that, or has no such call, everything travels in messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from dynpipe_ds.ranks.agreement import gather

_MOST_PIECES = 1024  # of one call (IOV_MAX)
_MOST_BYTES = 2**30  # of one call; Linux reads at most 2 GiB
_SET_PTRACER = 0x59616D61  # PR_SET_PTRACER
_THEN = "; from now on everything travels in messages"
_BOOT, _YAMA = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/sys/kernel/yama/ptrace_scope")


class Piece(NamedTuple):
    """Memory of another process, and where it shall go.

    Attributes:
        source: its address there.
        target: address here.
        num_bytes: of both.
    """

    source: int
    target: int
    num_bytes: int


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class CrossMemory:
    """Which ranks read whose memory.

    Args:
        processes: ids of those that this rank can read, by rank.
        readers: ranks that can read this one's.
    """

    def __init__(self, processes: Mapping[int, int] | None = None, readers: Sequence[int] = ()) -> None:
        self._processes = dict(processes or {})
        self._readers = frozenset(readers)

    def hidden(self) -> CrossMemory:
        """The same for a rank that nobody shall read."""
        return CrossMemory(self._processes)

    def is_read_by(self, rank: int) -> bool:
        """Whether a rank can read this one's memory, and may."""
        return rank in self._readers

    def read(self, rank: int, pieces: Sequence[Piece]) -> None:
        """Read memory of another rank.

        Args:
            rank: whose.
            pieces: what; the other rank leaves it as it is meanwhile.

        Raises:
            OSError: if the system refuses, or that process has no such memory.
        """
        _read(self._processes[rank], pieces)


_met: tuple[Any, CrossMemory] = (None, CrossMemory())  # by world


def cross_memory(*, is_allowed: bool = True) -> CrossMemory:
    """Who reads whose memory in the present world; all ranks try it once, so it is collective over them.

    Args:
        is_allowed: whether this rank may be read; ranks may differ in it. A rank that may not when they try it does
            not read either, as long as that world lasts.
    """
    global _met
    if _met[0] is not dist.group.WORLD:
        _met = dist.group.WORLD, _meet(is_allowed=is_allowed)
    return _met[1] if is_allowed else _met[1].hidden()


def give_up_cross_memory() -> None:
    """Let everything travel in messages until there is another world; called on all ranks, or on none."""
    global _met
    _met = dist.group.WORLD, CrossMemory()


class _Seen(NamedTuple):
    """What a rank tells of itself, for others to try.

    Attributes:
        machine: which one; empty where memory can't be read.
        process: its id.
        address: of the secret.
        secret: what is in memory there: ids may mean other processes in other containers.
    """

    machine: str
    process: int
    address: int
    secret: bytes


def _meet(*, is_allowed: bool) -> CrossMemory:
    secret = secrets.token_bytes(32)
    kept = ctypes.create_string_buffer(secret, len(secret))
    if is_allowed:
        _let_siblings_read()
    everyone = gather(_Seen(_machine() if is_allowed else "", os.getpid(), ctypes.addressof(kept), secret))
    me = dist.get_rank()
    readable = {
        rank: seen.process for rank, seen in enumerate(everyone)
        if rank != me and seen.machine and seen.machine == everyone[me].machine and _holds(seen)
    }
    readers = [rank for rank, its in enumerate(gather(sorted(readable))) if me in its]  # secrets live until here
    return CrossMemory(readable, readers)


def _holds(seen: _Seen) -> bool:
    found = ctypes.create_string_buffer(len(seen.secret))
    try:
        _read(seen.process, [Piece(seen.address, ctypes.addressof(found), len(seen.secret))])
    except OSError:
        return False
    return found.raw == seen.secret


def _machine() -> str:
    """Tells machines apart; empty where there is no such call."""
    with contextlib.suppress(OSError):
        return "" if _system_call() is None else _BOOT.read_text().strip()
    return ""


def _let_siblings_read() -> None:
    """Where Yama allows only ancestors to read (Ubuntu's default), allow it to what this rank's launcher started."""
    with contextlib.suppress(OSError, ValueError):
        if int(_YAMA.read_text()) == 1 and os.getppid() > 1:
            ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


@cache
def _system_call() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        vectors = ctypes.POINTER(_Vector)
        call.argtypes = [ctypes.c_int, vectors, ctypes.c_ulong, vectors, ctypes.c_ulong, ctypes.c_ulong]
        call.restype = ctypes.c_ssize_t
    return call


def _read(process: int, pieces: Sequence[Piece]) -> None:
    call = _system_call()
    for part in split(pieces, _MOST_BYTES):
        theirs = (_Vector * len(part))(*[_Vector(piece.source, piece.num_bytes) for piece in part])
        ours = (_Vector * len(part))(*[_Vector(piece.target, piece.num_bytes) for piece in part])
        found, wanted = call(process, ours, len(part), theirs, len(part), 0), sum(piece.num_bytes for piece in part)
        if found < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the memory of process {process} can't be read ({os.strerror(number)}){_THEN}")
        if found < wanted:
            raise OSError(f"of {wanted} bytes in the memory of process {process} only {found} can be read{_THEN}")


def split(pieces: Iterable[Piece], most_bytes: int, most_pieces: int = _MOST_PIECES) -> Iterator[list[Piece]]:
    """Lists of pieces, cut where needed, in their order.

    Args:
        pieces: what is to be read.
        most_bytes: in a list.
        most_pieces: in a list; by default as many as one call of the system takes.
    """
    part: list[Piece] = []
    free_bytes = most_bytes
    for source, target, num_bytes in pieces:
        start = 0
        while start < num_bytes:
            taken = min(num_bytes - start, free_bytes)
            part.append(Piece(source + start, target + start, taken))
            start, free_bytes = start + taken, free_bytes - taken
            if free_bytes == 0 or len(part) == most_pieces:
                yield part
                part, free_bytes = [], most_bytes
    if part:
        yield part
