"""Layers that wait instead of computing; everything around them is real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16  # numbers of a sample that travel from layer to layer


class _Pass:
    """When the layers of one forward or backward through a stage are over.

    A layer begins when the one before it *should* have ended: a sleep that ends late, as all do on a busy machine,
    then makes a pass late once and not once a layer.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._last: tuple[int, int, float] = (-2, -1, 0.0)

    def until(self, layer: int, micro_batch: int, seconds: float) -> float:
        """Time at which a layer that begins now is over."""
        last_layer, last_micro_batch, ended = self._last
        follows = (last_layer + self._step, last_micro_batch) == (layer, micro_batch)
        end = (ended if follows else time.perf_counter()) + seconds
        self._last = layer, micro_batch, end
        return end


_FORWARDS, _BACKWARDS = _Pass(1), _Pass(-1)  # a rank runs one pass at a time, whatever the engine


class _Wait(torch.autograd.Function):
    """``x (1 + mean(w))``, which lasts as long as it is told; its own computing is part of that."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, layer: int, micro_batch: int, forward_s: float, backward_s: float
    ) -> Tensor:
        until = _FORWARDS.until(layer, micro_batch, forward_s)
        ctx.save_for_backward(x, weight)
        ctx.waits = layer, micro_batch, backward_s
        y = x * (1.0 + weight.mean())
        _wait(until)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        until = _BACKWARDS.until(*ctx.waits)
        x, weight = ctx.saved_tensors
        to_x = gradient * (1.0 + weight.mean()) if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = torch.full_like(weight, float((gradient * x).sum()) / weight.numel())
        _wait(until)
        return to_x, to_weight, None, None, None, None


def _wait(until: float) -> None:
    if (left := until - time.perf_counter()) > 0:
        time.sleep(left)


class ReplayLayer(nn.Module):
    """Waits; owns a real parameter, which trains and moves as any other.

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
        """Wait, and scale the input a little.

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
