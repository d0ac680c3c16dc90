"""Layers that sleep for a known time, forward and backward, so that a machine's speed does not matter."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.models import HIDDEN, Embed, Head


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Nap(nn.Module):
    """Sleeps; its time can be changed while training, and be longer on slow workers.

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
    """A model whose layers, but the first and the last, sleep for the given (forward, backward) seconds."""
    return [LayerSpec(Embed), *(LayerSpec(Nap, f, b, speeds) for f, b in naps), LayerSpec(Head)]
