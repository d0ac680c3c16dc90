"""Messages that take the time along: what makes the clocks of all ranks one.

Every message between two ranks is accompanied by the moment at which it was posted, both ways: gloo's sends wait for
their receiver, so both go on at the later of both moments. After a collective all ranks of its group go on at the
latest moment of all. The messages themselves are torch's, untouched.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from benchmarks.replay.clocks import VirtualClock
from dynpipe_ds.measure import use_clock

_COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
_FROM_SENDER, _FROM_RECEIVER = 7001, 7002  # tags
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


def _timed(post: Callable[[list[Any]], list[Any]], clock: VirtualClock) -> Callable[[list[Any]], list[Any]]:
    """Sends and receives that are over on both sides when both have come to them."""

    @wraps(post)
    def run(operations: list[Any]) -> list[Any]:
        now = torch.tensor([clock.now_s()], dtype=torch.float64)
        theirs: list[Tensor] = []
        times = []
        for peer, sends in sorted({(op.peer, op.op is dist.isend) for op in operations}):
            theirs.append(torch.zeros_like(now))
            mine, other = (_FROM_SENDER, _FROM_RECEIVER) if sends else (_FROM_RECEIVER, _FROM_SENDER)
            times.append(dist.P2POp(dist.isend, now, peer, tag=mine))
            times.append(dist.P2POp(dist.irecv, theirs[-1], peer, tag=other))
        works = post([*operations, *times])
        return [*works, _Arrival(clock, theirs)]

    return run


class _Arrival:
    """What to wait for last."""

    def __init__(self, clock: VirtualClock, theirs: Sequence[Tensor]) -> None:
        self._clock, self._theirs = clock, theirs

    def wait(self) -> None:
        self._clock.meet([float(moment) for moment in self._theirs])


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
