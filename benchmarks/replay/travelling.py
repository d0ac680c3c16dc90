"""Messages that take the time along: what makes the clocks of all ranks of one machine one.

Who posts a message also writes down when, for the other end to read. A send is over at once, and who waits for what it
brings goes on when it has arrived (``clocks.Arrivals``). What is exchanged in a batch of operations, such as layers
that move, waits for its receiver, so both go on at the later of both moments. After a collective all ranks of its group
go on at the latest moment of all. The messages themselves are torch's, untouched.
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
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from benchmarks.replay.clocks import ReplayClock, VirtualClock
from dynpipe_ds.measure import use_clock

T = TypeVar("T")
_COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
_PAUSE_S = 2e-4  # of the machine's time
_sleep = time.sleep
_KEPT = 2048  # moments between two ranks; more messages are never under way
_RECEIVES, _SENDS, _SENDS_AHEAD = range(3)
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
        stack.enter_context(timed_messages(clock))
        for name in _READS:
            stack.enter_context(patch.object(time, name, _not_in_layers(getattr(time, name), name)))
        use_clock(clock)
        stack.callback(use_clock, None)
        yield clock


@contextmanager
def timed_messages(clock: ReplayClock) -> Iterator[None]:
    """Let messages arrive when they have left and travelled; exchanges only in virtual time.

    Args:
        clock: of this rank; its ``arrivals`` say how long they travel.
    """
    post = _Post(clock, c10d.isend, c10d.irecv)
    timed: dict[str, Callable[..., Any]] = {
        "isend": post.send, "irecv": post.receive, "recv": post.as_it_is(c10d.recv),  # which calls irecv
    }
    if isinstance(clock, VirtualClock):
        timed["batch_isend_irecv"] = post.exchanging(c10d.batch_isend_irecv, clock)
    with ExitStack() as stack:
        for name, function in timed.items():
            for module in (dist, c10d):
                stack.enter_context(patch.object(module, name, function))
        yield


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
            return _Then(work, lambda: meet(group))
        meet(group)
        return None

    def meet(group: Any) -> None:
        latest = torch.tensor([clock.now_s()], dtype=torch.float64)
        all_reduce(latest, dist.ReduceOp.MAX, group=group)
        clock.reach(float(latest))

    return run


class _Then:
    """Something under way, and what is to be done when it is over."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self._work, self._then = work, then

    def wait(self, *args: Any) -> Any:
        done = self._work.wait(*args)
        self._then()
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
            os.truncate(number, num_ranks**2 * 3 * _KEPT * 16)
            os.close(number)
        dist.broadcast_object_list(path, src=0)
        # Of whom, to or from whom, as what, the last ones: how many there were, and when.
        self._moments = np.memmap(path[0], np.float64, "r+", shape=(num_ranks, num_ranks, 3, _KEPT, 2))
        self._counts: dict[tuple[int, int], int] = {}
        dist.barrier()
        if self._rank == 0:
            os.unlink(path[0])

    def number(self, peer: int, role: int) -> int:
        """Count a message to or from another rank."""
        number = self._counts[peer, role] = self._counts.get((peer, role), 0) + 1
        return number

    def write(self, peer: int, role: int, moment_s: float) -> int:
        """Say when this rank posted a message; gives its number."""
        number = self.number(peer, role)
        place = self._moments[self._rank, peer, role, number % _KEPT]
        place[1] = moment_s
        place[0] = number  # last: it says that the moment is there
        return number

    def read(self, peer: int, role: int, number: int) -> float:
        """When another rank posted its end of a message; waits until it does."""
        place = self._moments[peer, self._rank, role, number % _KEPT]
        while place[0] < number:
            _sleep(_PAUSE_S)
        assert place[0] == number, "more messages under way than are kept"
        return float(place[1])


class _Post:
    """Sends and receives that take the time along.

    Args:
        clock: of this rank.
        send: torch's.
        receive: torch's.
    """

    def __init__(self, clock: ReplayClock, send: Callable[..., Any], receive: Callable[..., Any]) -> None:
        self._clock, self._send, self._receive = clock, send, receive
        self._kept: _Board | None = None
        self._is_inside = False  # another function of torch's

    @property
    def _board(self) -> _Board:
        if self._kept is None or self._kept.world is not dist.group.WORLD:  # of a new world all ranks come here first
            self._kept = _Board()
        return self._kept

    def send(self, tensor: Tensor, dst: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Begin to send; whoever does goes on at once."""
        if dst is not None and not self._is_inside:
            self._board.write(dst, _SENDS_AHEAD, self._clock.now_s())
        return self._send(tensor, dst, *args, **kwargs)

    def receive(self, tensor: Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Begin to receive; whoever waits for it goes on when it has arrived."""
        if src is None or self._is_inside:
            return self._receive(tensor, src, *args, **kwargs)
        board = self._board
        number = board.number(src, _SENDS_AHEAD + 1)
        work = self._receive(tensor, src, *args, **kwargs)
        return _Then(work, lambda: self._clock.arrivals.left(board.read(src, _SENDS_AHEAD, number)))

    def exchanging(
        self, post: Callable[[list[Any]], list[Any]], clock: VirtualClock
    ) -> Callable[[list[Any]], list[Any]]:
        """Sends and receives that are over on both sides when both have come to them."""

        @wraps(post)
        def run(operations: list[Any]) -> list[Any]:
            board = self._board
            ends = sorted({(op.peer, _SENDS if op.op is dist.isend else _RECEIVES) for op in operations})
            posted = [(peer, 1 - role, board.write(peer, role, clock.now_s())) for peer, role in ends]
            return [*self.as_it_is(post)(operations), _Arrival(clock, board, posted)]

        return run

    def as_it_is(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function of torch's that may call those that are replaced, but means its own."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> T:
            was_inside, self._is_inside = self._is_inside, True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = was_inside

        return run


class _Arrival:
    """What to wait for last."""

    def __init__(self, clock: VirtualClock, board: _Board, posted: Sequence[tuple[int, int, int]]) -> None:
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
