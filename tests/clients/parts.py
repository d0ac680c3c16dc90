"""Layers and data that several client shapes share; the tuples they pass are each project's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

VOCABULARY, HIDDEN, LENGTH = 19, 12, 5


class Attention(nn.Module):
    """One head, causal or as the mask says (true: hidden)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2) / HIDDEN**0.5).masked_fill(mask, -1e4)
        return self.out(scores.softmax(dim=-1) @ v)


class Block(nn.Module):
    """A transformer layer without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.Tanh(), nn.Linear(2 * HIDDEN, HIDDEN))

    def run(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(x)


class Lora(nn.Module):
    """A frozen linear layer with a small trained addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def causal_mask(batch: int, length: int = LENGTH) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1).expand(batch, -1, -1).contiguous()


def tokens(replica: int, length: int = LENGTH + 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + replica)
    while True:
        yield torch.randint(VOCABULARY, (2, length), generator=generator)
