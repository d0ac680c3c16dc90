"""A frozen block: behind one that trains, in a frozen prefix, and in a prefix whose output is kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.layers.case import Case, Shape, count_operations
from scenarios.freezing import set_frozen
from scenarios.freezing.cache import CacheableBlock, Role
from scenarios.gpt import Block, GPTConfig

SHAPE = Shape(hidden=256, heads=4, seq_len=256, batch=4)


class Prefix(nn.Module):
    """A layer with nothing before it that wants a gradient.

    Args:
        layer: the frozen layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer as the engine does: its input is data, and what it puts out is where backward ends."""
        output: Tensor = self.layer(x.detach())
        return output.detach().requires_grad_(True)


def frozen_block(model: GPTConfig, role: Role = Role.COMPUTE) -> CacheableBlock:
    """Build a block that is frozen."""
    block = CacheableBlock(model)
    set_frozen(block, True)
    block.activations.begin(role, 0)
    return block


def cases(shape: Shape = SHAPE) -> list[Case]:
    """List a block that trains, and three frozen ones."""
    torch.manual_seed(0)
    model = shape.model()
    x, dense = torch.randn(shape.batch, shape.seq_len, shape.hidden), Block(model)
    operations = count_operations(dense, x)

    def case(amount: str, layer: nn.Module) -> Case:
        return Case(amount, layer, dense, x, x, lambda: count_operations(layer, x) / operations)

    return [
        case("trains", Block(model)),
        case("frozen, gradients pass", frozen_block(model)),
        case("frozen prefix", Prefix(frozen_block(model))),
        case("frozen prefix, cached", Prefix(frozen_block(model, Role.SKIP))),
    ]
