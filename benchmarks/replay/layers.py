"""Layers that take the time they are told instead of computing; everything around them is real."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.replay.clocks import replay_clock

WIDTH = 16  # numbers of a sample that travel from layer to layer


class _Wait(torch.autograd.Function):
    """Lasts as long as it is told, forward and back; keeps some memory from the one to the other."""

    leaves_gradients_alone = True  # so no gradient needs to be copied for it where a backward is split

    @staticmethod
    def forward(ctx: Any, y: Tensor, held_bytes: int, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        with replay_clock().lasts(forward_s):
            ctx.save_for_backward(torch.empty(held_bytes, dtype=torch.uint8))
            return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        with replay_clock().lasts(ctx.backward_s):
            return gradient, None, None, None


class ReplayLayer(nn.Module):
    """``x (1 + mean(w))``, which takes its time; owns a real parameter, which trains and moves as any other.

    The backward has two parts. The gradient of the input takes its time on the way back through the layer; the gradient
    of the parameter, which comes from a product of matrices and can wait, takes its own when it is computed.

    Args:
        index: layer of the model; decides the parameter's first values, too.
        num_parameters: numbers of the parameter.
        held_bytes: of activations, kept for each micro-batch from forward to backward.
    """

    def __init__(self, index: int, num_parameters: int, held_bytes: int = 0) -> None:
        super().__init__()
        values = torch.arange(num_parameters, dtype=torch.float32)
        self.weight = nn.Parameter(0.01 * torch.sin(values * (1.0 + 0.01 * index) + index))
        self._held_bytes = held_bytes
        self._forward_s: Sequence[float] = (0.0,)
        self._backward_s: Sequence[float] = (0.0,)
        self._weight_share = 0.0
        self._micro_batch = 0

    def set_batch(self, forward_s: Sequence[float], backward_s: Sequence[float], weight_share: float = 0.0) -> None:
        """Say how long the coming batch takes.

        Args:
            forward_s: seconds of every micro-batch, or of all.
            backward_s: the same for the backward, both parts together.
            weight_share: of the backward, the parameter's part; a parameter that is frozen has none.
        """
        self._forward_s, self._backward_s, self._micro_batch = forward_s, backward_s, 0
        self._weight_share = weight_share

    def forward(self, x: Tensor) -> Tensor:
        """Take the time, and scale the input a little.

        Args:
            x: ``[samples, WIDTH]``.
        """
        number = self._micro_batch
        self._micro_batch += 1
        forward_s = self._forward_s[number % len(self._forward_s)]
        backward_s = self._backward_s[number % len(self._backward_s)]
        scale = (1.0 + self.weight.mean()).view(1, 1)
        weight_s = self._weight_share * backward_s if scale.requires_grad else 0.0
        if weight_s:
            scale.register_hook(partial(_take, weight_s))  # type: ignore[no-untyped-call]
        y = torch.mm(x.reshape(-1, 1), scale).view(x.shape)
        waited: Tensor = _Wait.apply(y, self._held_bytes, forward_s, backward_s - weight_s)
        return waited


def _take(seconds: float, _gradient: Tensor) -> None:
    """The time of a parameter's gradient, at the product that it comes from."""
    with replay_clock().lasts(seconds):
        pass


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
