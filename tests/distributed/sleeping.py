"""Layers that take a known time by a clock of their own, so that a machine's speed does not matter.

Nobody sleeps: each process has a time that passes only where a layer says so, and messages carry it along. What the
profiler measures by it can be computed by hand, to the last bit for times such as 0.25 s.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from benchmarks.replay.clocks import Costs, VirtualClock
from benchmarks.replay.travelling import virtual_time
from dynpipe_ds.measure import current_clock
from tests.distributed.models import HIDDEN, Embed, Head

_until_the_end = ExitStack()


def told_time(costs: Costs | None = None) -> AbstractContextManager[VirtualClock]:
    """Inside, engines of this process read a clock that nothing advances but the layers' own time and the costs."""
    return virtual_time(VirtualClock(costs))


def tell_time(costs: Costs | None = None) -> None:
    """The same from now on until this process ends."""
    if not isinstance(current_clock(), VirtualClock):
        _until_the_end.enter_context(told_time(costs))


def sleep(seconds: float) -> None:
    """Let time pass, if :func:`told_time` is in force."""
    clock = current_clock()
    if isinstance(clock, VirtualClock):
        clock.advance(seconds)


def meet() -> None:
    """Let all ranks begin the next batch at once; collective."""
    dist.barrier()


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        sleep(ctx.backward_s)
        return gradient, None, None


class Nap(nn.Module):
    """Takes its time; which can be changed while training, and be longer on slow workers.

    Args:
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        speeds: relative speed of each rank.
    """

    def __init__(self, forward_s: float, backward_s: float, speeds: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.forward_s, self.backward_s, self.speeds = forward_s, backward_s, speeds

    def forward(self, x: Tensor) -> Tensor:
        speed = self.speeds[int(os.environ["RANK"])] if self.speeds else 1.0
        return _Nap.apply(torch.tanh(self.linear(x)), self.forward_s / speed, self.backward_s / speed)


def napping(naps: list[tuple[float, float]], speeds: tuple[float, ...] = ()) -> list[Any]:
    """A model whose layers, but the first and the last, take the given (forward, backward) seconds; those take none."""
    return [LayerSpec(Embed), *(LayerSpec(Nap, f, b, speeds) for f, b in naps), LayerSpec(Head)]
