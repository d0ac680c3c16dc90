"""The model of the examples: blocks of unequal width."""

import torch
from deepspeed.pipe import LayerSpec
from torch import nn


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def layers():
    blocks = [LayerSpec(Block, 64, 64 * (1 + i % 3)) for i in range(6)]
    model = [LayerSpec(nn.Linear, 32, 64), *blocks, LayerSpec(nn.Linear, 64, 8)]
    batch = (torch.randn(4, 32), torch.randint(8, (4,)))
    return model, batch, nn.functional.cross_entropy
