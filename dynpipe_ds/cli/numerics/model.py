"""The small model, its data and its optimizer: the same for the two processes and for the reference.

Weights follow from a layer's index alone, so that they are the same for every cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, HIDDEN, LENGTH = 13, 16, 6
NUM_LAYERS = 8
NUM_MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 2
DROPOUT_SEED = 1234

BETAS = (0.9, 0.99)
# Large, so that AdamW stays smooth: with the usual 1e-8 the rounding of a gradient near zero would be amplified.
EPS = 1e-2


def _weights(index: int, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(1000 + 10 * index + len(shape))
    return nn.Parameter(torch.randn(*shape, generator=generator) * 0.25)


class Embedding(nn.Module):
    """Token embedding, ``(batch, length)`` to ``(batch, length, hidden)``; tied, also the output layer."""

    def __init__(self, index: int, frozen: bool = False) -> None:
        super().__init__()
        self.weight = _weights(index, VOCABULARY, HIDDEN)
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Look tokens up."""
        return nn.functional.embedding(x, self.weight)

    def logits(self, x: Tensor) -> Tensor:
        """The weights as output layer: ``(batch, length, hidden)`` to ``(batch, length, vocabulary)``."""
        return x @ self.weight.t()


class Head(Embedding):
    """An output layer with weights of its own."""

    forward = Embedding.logits


class Block(nn.Module):
    """A residual layer; its running mean, a buffer, depends on the order of the micro-batches."""

    def __init__(self, index: int, dropout: float, keeps_mean: bool, frozen: bool) -> None:
        super().__init__()
        width = HIDDEN + 2 * index
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = _weights(index, HIDDEN, width)
        self.bias = _weights(index, width)
        self.down = _weights(-index, width, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.mean: Tensor | None
        self.register_buffer("mean", torch.zeros(HIDDEN) if keeps_mean else None)
        self.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layer computes to ``(batch, length, hidden)``."""
        if self.training and self.mean is not None:
            self.mean.mul_(0.5).add_(x.detach().mean((0, 1)))
        change: Tensor = self.dropout(torch.tanh(self.norm(x) @ self.up + self.bias) @ self.down)
        return x + change


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, in fp32."""
    return nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), labels.view(-1))


def micro_batches(seed: int = 5) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and what follows them, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(VOCABULARY, (MICRO_BATCH_SIZE, LENGTH + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with two parameter groups: weight decay for matrices, another learning rate for vectors."""
    given = list(parameters)
    matrices = {"params": [p for p in given if p.dim() > 1], "weight_decay": 0.5}
    vectors = {"params": [p for p in given if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.04}
    return torch.optim.AdamW([matrices, vectors], lr=0.02, betas=BETAS, eps=EPS)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """A learning rate that falls after every batch."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: 0.5**batch)
