"""Mixture of Depths: a block at three capacities, router and predictor included."""

from __future__ import annotations

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from benchmarks.layers.case import Case, Shape, count_operations
from scenarios.gpt import Block
from scenarios.mod import RoutedBlock

SHAPES = tuple(Shape(hidden=size, heads=4, seq_len=size, batch=4) for size in (256, 512))


class WithLoss(nn.Module):
    """A routed block whose predictor is trained as well: the extra loss is added to the stream."""

    def __init__(self, block: RoutedBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        stream, extra_loss = self.block((x, torch.zeros((), device=x.device)))
        return stream + extra_loss


def cases(*shapes: Shape) -> list[Case]:
    """12.5, 25 and 50% of the tokens, at two sizes."""
    found = []
    for shape in shapes or SHAPES:
        config = shape.model()
        torch.manual_seed(0)
        x = torch.randn(shape.batch, shape.seq_len, shape.hidden)
        for capacity in (1.0, 0.5, 0.25, 0.125):
            layer = WithLoss(RoutedBlock(config, LayerSpec(Block, config), capacity=capacity))
            dense = Block(config)
            found.append(Case(
                amount=f"capacity {capacity:.1%}, hidden {shape.hidden}, sequence {shape.seq_len}",
                layer=layer, dense=dense, activation=x, dense_activation=x,
                operations=lambda layer=layer, dense=dense, x=x: (
                    count_operations(layer, x) / count_operations(dense, x)
                ),
            ))  # fmt: skip
    return found
