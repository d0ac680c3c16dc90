"""The small model, how it is trained and where it is cut: the same for the two processes and for the reference.

Weights follow from a layer's index alone, so that they are the same for every cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.cli.show import brackets

VOCABULARY, HIDDEN, LENGTH = 13, 16, 6
NUM_LAYERS = 8
NUM_MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 2
DROPOUT_SEED = 1234
NUM_BATCHES = 4
NUM_STAGES = 2
Boundaries = tuple[int, ...]

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


@dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        name: for people.
        tolerance: by which a quantity may differ from the undivided model's, as a share of its size: both round, and
            they add in another order.
        config: what the DeepSpeed JSON has besides batch sizes.
        clipping: largest norm of the gradients; 0: none.
        bf16: whether the model computes in bf16 (with fp32 master weights).
        tied: whether embedding and head share weights.
        frozen: layers that are not trained.
        freezes: batch before which a layer is frozen, and the layer.
        dropout: share that blocks drop.
        checkpointing: whether activations are computed again in the backward.
    """

    name: str
    tolerance: float
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    clipping: float = 0.0
    bf16: bool = False
    tied: bool = True
    frozen: tuple[int, ...] = (3,)
    freezes: tuple[int, int] | None = (2, 5)
    dropout: float = 0.0
    checkpointing: bool = False

    def deepspeed_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        return {
            "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
            "gradient_accumulation_steps": NUM_MICRO_BATCHES,
            "gradient_clipping": self.clipping,
            "steps_per_print": 10**9,
            "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"},
            **self.config,
        }

    def layers(self) -> list[tuple[Any, ...]]:
        """The class of every layer and what it is built with; tied, the first one is the last one, too."""
        blocks = [
            (Block, i, self.dropout, not self.checkpointing, i in self.frozen) for i in range(1, NUM_LAYERS - 1)
        ]
        first = (Embedding, 0, 0 in self.frozen)
        return [first, *blocks, first if self.tied else (Head, NUM_LAYERS - 1)]


@dataclass(frozen=True)
class Course:
    """Where the model is cut while it trains: boundaries at the start, and those from a batch on."""

    first: Boundaries
    moves: tuple[tuple[int, Boundaries], ...] = ()

    def __str__(self) -> str:
        return " then ".join(map(brackets, (self.first, *(b for _, b in self.moves))))

    def at(self, batch: int) -> str:
        """The cut in force in a batch, counted from 0, and how it came about."""
        *earlier, present = [brackets(b) for b in (self.first, *(b for start, b in self.moves if start <= batch))]
        return f"cut {present} (moved from {earlier[-1]})" if earlier else f"cut {present}"


_ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
_BF16 = {**_ZERO, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}

MODES = (
    Mode("fp32", 1e-4, clipping=4.0),  # reached by the second batch: gradients of the first show which layers are wrong
    Mode("ZeRO-1", 1e-4, config=_ZERO, clipping=0.5),
    Mode("bf16", 1e-1, config=_BF16, clipping=0.5, bf16=True),
    Mode("checkpointing", 1e-4, tied=False, frozen=(0, 1, 2), freezes=None, dropout=0.2, checkpointing=True),
)
"""Between them: clipping that clips and none, ties, frozen layers and layers that freeze, dropout, checkpointing."""

COURSES = (
    Course((0, 1, NUM_LAYERS)),
    Course((0, 4, NUM_LAYERS)),
    Course((0, 7, NUM_LAYERS)),
    Course((0, 2, NUM_LAYERS), ((1, (0, 6, NUM_LAYERS)), (3, (0, 2, NUM_LAYERS)))),
)
"""Cuts that stay, and one that moves: back and forth, over the frozen layers."""
