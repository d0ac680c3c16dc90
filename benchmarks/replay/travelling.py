"""Messages that take the time along: what makes the clocks of all ranks of one machine one.

Who posts a message also writes down when, for the other end to read: gloo's sends wait for their receiver, so both go
on at the later of both moments. After a collective all ranks of its group go on at the latest moment of all. The
messages themselves are torch's, untouched.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from benchmarks.replay.clocks import VirtualClock
from dynpipe_ds.measure import use_clock

_COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
_PAUSE_S = 2e-4  # of the machine's time
_sleep = time.sleep
_KEPT = 64  # moments between two ranks; more messages are never under way
_READS = ("sleep", "time", "perf_counter", "monotonic", "process_time")


class WallClockError(RuntimeError):
    """A layer that reads the machine's time, which does not pass in a replay."""


@contextmanager
def virtual_time(clock: VirtualClock) -> Iterator[VirtualClock]:
    """Let engines that are made inside read a virtual clock, and messages take its time along.

    Args:
        clock: of this rank, which all its engines and layers share.
    """
    with ExitStack() as stack:
        for name in _COLLECTIVES:
            meeting = _meeting(getattr(c10d, name), clock, c10d.all_reduce)
            for module in (dist, c10d):
                stack.enter_context(patch.object(module, name, meeting))
        for module in (dist, c10d):
            stack.enter_context(patch.object(module, "batch_isend_irecv", _timed(c10d.batch_isend_irecv, clock)))
        for name in _READS:
            stack.enter_context(patch.object(time, name, _not_in_layers(getattr(time, name), name)))
        use_clock(clock)
        stack.callback(use_clock, None)
        yield clock


def _meeting(collective: Callable[..., Any], clock: VirtualClock, all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A collective after which all ranks of the group have the same time."""
    place = list(inspect.signature(collective).parameters).index("group")

    @wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[place] if len(args) > place else None)
        work = collective(*args, **kwargs)
        if dist.get_rank(group) < 0:
            return work
        if work is not None:
            return _Meets(work, lambda: meet(group))
        meet(group)
        return None

    def meet(group: Any) -> None:
        latest = torch.tensor([clock.now_s()], dtype=torch.float64)
        all_reduce(latest, dist.ReduceOp.MAX, group=group)
        clock.reach(float(latest))

    return run


class _Meets:
    """A collective under way."""

    def __init__(self, work: Any, meet: Callable[[], None]) -> None:
        self._work, self._meet = work, meet

    def wait(self, *args: Any) -> Any:
        done = self._work.wait(*args)
        self._meet()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Board:
    """Memory that all ranks share: when each of them posted its messages to and from each other one.

    Attributes:
        world: whose ranks they are.
    """

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self._rank, num_ranks = dist.get_rank(), dist.get_world_size()
        path: list[Any] = [None]
        if self._rank == 0:
            number, path[0] = tempfile.mkstemp(prefix="replay-")
            os.truncate(number, num_ranks**2 * 2 * _KEPT * 16)
            os.close(number)
        dist.broadcast_object_list(path, src=0)
        # Of whom, to or from whom, as receiver or sender, the last ones: how many there were, and when.
        self._moments = np.memmap(path[0], np.float64, "r+", shape=(num_ranks, num_ranks, 2, _KEPT, 2))
        self._counts: dict[tuple[int, bool], int] = {}
        dist.barrier()
        if self._rank == 0:
            os.unlink(path[0])

    def write(self, peer: int, sends: bool, moment_s: float) -> int:
        """Say when this rank posted a message; gives its number."""
        number = self._counts[peer, sends] = self._counts.get((peer, sends), 0) + 1
        place = self._moments[self._rank, peer, int(sends), number % _KEPT]
        place[1] = moment_s
        place[0] = number  # last: it says that the moment is there
        return number

    def read(self, peer: int, sends: bool, number: int) -> float:
        """When the other end of this rank's message was posted; waits until it is."""
        place = self._moments[peer, self._rank, int(not sends), number % _KEPT]
        while place[0] < number:
            _sleep(_PAUSE_S)
        assert place[0] == number, "more messages under way than are kept"
        return float(place[1])


def _timed(post: Callable[[list[Any]], list[Any]], clock: VirtualClock) -> Callable[[list[Any]], list[Any]]:
    """Sends and receives that are over on both sides when both have come to them."""
    board: _Board | None = None

    @wraps(post)
    def run(operations: list[Any]) -> list[Any]:
        nonlocal board
        if board is None or board.world is not dist.group.WORLD:  # of a new world all ranks come here first
            board = _Board()
        ends = sorted({(op.peer, op.op is dist.isend) for op in operations})
        posted = [(peer, sends, board.write(peer, sends, clock.now_s())) for peer, sends in ends]
        return [*post(operations), _Arrival(clock, board, posted)]

    return run


class _Arrival:
    """What to wait for last."""

    def __init__(self, clock: VirtualClock, board: _Board, posted: Sequence[tuple[int, bool, int]]) -> None:
        self._clock, self._board, self._posted = clock, board, posted

    def wait(self) -> None:
        self._clock.meet([self._board.read(*message) for message in self._posted])


def _not_in_layers(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any) -> Any:
        layer = _layer_that_asks()
        if layer:
            raise WallClockError(
                f"{layer} calls time.{name}: in a replay in virtual time the machine's time means nothing; let time "
                "pass with advance() of dynpipe_ds.measure.current_clock(), or replay with --clock sleeping"
            )
        return function(*args)

    return run


def _layer_that_asks() -> str:
    """The layer whose own forward or backward is the caller's caller; empty if it is none."""
    frame = sys._getframe(2)
    name, given = frame.f_code.co_name, frame.f_locals
    if name == "forward" and isinstance(given.get("self"), nn.Module):
        return f"layer {type(given['self']).__name__}"
    if name in ("forward", "backward") and "ctx" in given:
        return f"autograd function {getattr(frame.f_code, 'co_qualname', name).rpartition('.')[0] or name}"
    return ""
