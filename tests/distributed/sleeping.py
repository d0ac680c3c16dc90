"""Layers that take a known time by a clock of their own, so that a machine's speed does not matter.

Nobody sleeps: each process has a time that passes only where a layer says so, and a message arrives at the moment it
was sent. What the profiler measures by it can be computed by hand, to the last bit for times such as 0.25 s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds.measure import recorder as profiling
from dynpipe_ds.migration import transport
from dynpipe_ds.migration.transport import post
from tests.distributed.models import HIDDEN, Embed, Head

Tensors = Mapping[int, Sequence[Tensor]]

_now_s = 0.0


def sleep(seconds: float) -> None:
    """Let time pass, if :func:`told_time` is in force."""
    global _now_s
    _now_s += seconds


class _Arrival:
    """What to wait for last: from then on it is not earlier than when the message was sent."""

    def __init__(self, sent_s: Tensor) -> None:
        self._sent_s = sent_s

    def wait(self) -> None:
        sleep(max(0.0, float(self._sent_s) - _now_s))


def _post(sends: Tensors, receives: Tensors) -> list[Any]:
    """What travels takes the time along."""
    now = torch.tensor([_now_s], dtype=torch.float64)
    theirs = {rank: torch.zeros_like(now) for rank, tensors in receives.items() if tensors}
    works = post(
        {rank: [*tensors, now] for rank, tensors in sends.items() if tensors},
        {rank: [*receives[rank], sent_s] for rank, sent_s in theirs.items()},
    )
    return [*works, *map(_Arrival, theirs.values())]


def told_time() -> ExitStack:
    """From now on, until what is returned is closed, the profiler of this process measures the layers' own time."""
    stack = ExitStack()
    stack.enter_context(patch.object(profiling.HostClock, "stamp", lambda _: _now_s))
    stack.enter_context(patch.object(transport, "post", _post))
    return stack


def meet() -> None:
    """Let all ranks begin the next batch at once; collective."""
    latest = torch.tensor([_now_s], dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    sleep(float(latest) - _now_s)


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
