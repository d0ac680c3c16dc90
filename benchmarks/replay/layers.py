"""Layers that take the time they are told instead of computing; everything around them is real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.replay.clocks import BACKWARD, FORWARD, replay_clock

WIDTH = 16  # numbers of a sample that travel from layer to layer


class _Wait(torch.autograd.Function):
    """``x (1 + mean(w))``, which lasts as long as it is told; its own computing is part of that."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: int, micro_batch: int, forward_s: float, backward_s: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lasts = layer, micro_batch, backward_s
        with replay_clock().lasts(FORWARD, layer, micro_batch, forward_s):
            return x * (1.0 + weight.mean())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        to_weight = None
        with replay_clock().lasts(BACKWARD, *ctx.lasts):
            to_x = gradient * (1.0 + weight.mean()) if ctx.needs_input_grad[0] else None
            if ctx.needs_input_grad[1]:
                to_weight = torch.full_like(weight, float((gradient * x).sum()) / weight.numel())
        return to_x, to_weight, None, None, None, None


class ReplayLayer(nn.Module):
    """Takes its time; owns a real parameter, which trains and moves as any other.

    Args:
        index: layer of the model; decides the parameter's first values, too.
        num_parameters: numbers of the parameter.
    """

    def __init__(self, index: int, num_parameters: int) -> None:
        super().__init__()
        values = torch.arange(num_parameters, dtype=torch.float32)
        self.weight = nn.Parameter(0.01 * torch.sin(values * (1.0 + 0.01 * index) + index))
        self.index = index
        self._forward_s: Sequence[float] = (0.0,)
        self._backward_s: Sequence[float] = (0.0,)
        self._micro_batch = 0

    def set_batch(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> None:
        """Say how long the coming batch takes.

        Args:
            forward_s: seconds of every micro-batch, or of all.
            backward_s: the same for the backward.
        """
        self._forward_s, self._backward_s, self._micro_batch = forward_s, backward_s, 0

    def forward(self, x: Tensor) -> Tensor:
        """Take the time, and scale the input a little.

        Args:
            x: ``[samples, WIDTH]``.
        """
        number = self._micro_batch
        self._micro_batch += 1
        forward_s = self._forward_s[number % len(self._forward_s)]
        backward_s = self._backward_s[number % len(self._backward_s)]
        return _Wait.apply(x, self.weight, self.index, number, forward_s, backward_s)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of ``[samples, WIDTH]``.

    Args:
        output: of the last layer.
        target: as the data says.
    """
    return nn.functional.mse_loss(output, target)


def micro_batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of one batch.

    Args:
        seed: of the batch.
        count: micro-batches.
    """
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(1, WIDTH, generator=draw), torch.randn(1, WIDTH, generator=draw)) for _ in range(count)]
