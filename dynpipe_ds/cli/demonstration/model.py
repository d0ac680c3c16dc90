"""The demonstration's model, data and configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynpipe_ds.cli.demonstration.course import FREEZE_AT, NUM_BLOCKS, NUM_LAYERS, WINDOW

VOCABULARY, HIDDEN, HEADS, LENGTH = 256, 128, 4, 128
NUM_MICRO_BATCHES, MICRO_BATCH_SIZE = 8, 2
START = (0, NUM_LAYERS // 2, NUM_LAYERS)
SEED = 1234
_INIT_STD = 0.02


class Embedding(nn.Module):
    """Of bytes and of their positions, ``(batch, length)`` to ``(batch, length, hidden)``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=_INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """Look bytes and positions up."""
        total: Tensor = self.tokens(x) + self.positions.weight
        return total


class Block(nn.Module):
    """Causal attention and an MLP, each behind a LayerNorm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, hidden)`` to the same shape."""
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        change: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + change


class Head(nn.Module):
    """The last LayerNorm and the projection to ``(batch, length, vocabulary)``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.project = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, hidden)`` to logits."""
        logits: Tensor = self.project(self.norm(x))
        return logits


LAYERS: tuple[type[nn.Module], ...] = (Embedding, *[Block] * NUM_BLOCKS, Head)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy, in nats a byte."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs of bytes and the bytes after them, of the English text that ships inside Python."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    stream = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(len(stream) - LENGTH, (MICRO_BATCH_SIZE,), generator=generator)
        windows = torch.stack([stream[start : start + LENGTH + 1] for start in starts.tolist()]).long()
        yield windows[:, :-1], windows[:, 1:]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW of torch, for which DeepSpeed compiles nothing."""
    return torch.optim.AdamW(parameters, lr=3e-4)


def deepspeed_config(*, dynamic: bool) -> dict[str, Any]:
    """DeepSpeed's configuration; both runs measure alike, and only one moves layers.

    It decides after every fourth batch. By default ("auto") it would wait for evidence, which on a busy machine may
    take longer than a demonstration.
    """
    decisions = {"rebalance_every": WINDOW, "first_batch": FREEZE_AT + WINDOW - 1, "min_gain": 0.05}
    section = {"enabled": True, "schedule": "1f1b", **(decisions if dynamic else {"rebalance_every": "never"})}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "dynamic_pipeline": section,
    }
