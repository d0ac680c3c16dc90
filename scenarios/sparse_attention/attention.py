"""Hash-sparse attention in place of a block's attention."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.gpt import Attention, Block, GPTConfig, rotate
from scenarios.kernels import Task, choose
from scenarios.sparse_attention.hashing import draw_directions, hash_codes
from scenarios.sparse_attention.kernels import (
    count_pairs,
    flex_codes_attention,
    separate_codes_attention,
    shared_codes_attention,
)

Hashing = Literal["shared", "separate"]
TASK: Task = "attention within hash buckets"


class HashSparseAttention(Attention):
    """Causal attention among the tokens of a head whose codes are the same.

    Without directions (one bucket) it is plain causal attention. Codes are those of queries and keys before
    rotary positions turn them: a code shall tell content, and turned vectors would spread over the buckets by
    position.

    Args:
        config: the model's size and kind.
        hashing: ``"separate"``, a code for the query and one for the key (Pagliardini et al. 2023, section 3.2),
            or ``"shared"``, one code for both, of the sum of their directions.
        kernel: what computes it; ``None`` for the best on the device.
    """

    directions: Tensor
    pairs: Tensor

    def __init__(self, config: GPTConfig, *, hashing: Hashing, kernel: str | None = None) -> None:
        super().__init__(config)
        self.hashing = hashing
        self.kernel = kernel
        self.drawn: tuple[int, int] | None = None
        head_dim = config.hidden // config.heads
        self.register_buffer("directions", torch.empty(config.heads, head_dim, 0), persistent=False)
        # Computed pairs and pairs of dense causal attention in training, since last read.
        self.register_buffer("pairs", torch.zeros(2, dtype=torch.int64), persistent=False)

    @property
    def buckets(self) -> int:
        """Number of codes."""
        return max(1, 2 * self.directions.shape[-1])

    def draw(self, buckets: int, seed: int) -> None:
        """Draw the hash's directions; does nothing when they are the same already.

        Args:
            buckets: number of codes; even, or 1 for dense attention.
            seed: decides the directions, together with the sizes.
        """
        if self.drawn == (buckets, seed):
            return
        heads, head_dim, _ = self.directions.shape
        self.directions = draw_directions(heads, head_dim, buckets, seed=seed).to(self.directions)
        self.drawn = (buckets, seed)

    def take_pairs(self) -> list[int]:
        """Return the computed and the dense pairs since the last call, over all heads and samples."""
        counted = self.pairs.tolist()
        self.pairs.zero_()
        return counted

    def codes(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Hash queries and keys ``[batch, seq, heads, head_dim]`` to codes ``[batch, seq, heads]``."""
        if self.hashing == "separate":
            return hash_codes(q, self.directions), hash_codes(k, self.directions)
        shared = hash_codes(F.normalize(q, dim=-1) + F.normalize(k, dim=-1), self.directions)
        return shared, shared

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        batch, seq, hidden = x.shape
        dense_pairs = batch * self.heads * seq * (seq + 1) // 2
        if self.buckets == 1:
            if self.training:
                self.pairs += dense_pairs
            return super().forward(x)
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads).unbind(2)
        q_codes, k_codes = self.codes(q.detach(), k.detach())
        if self.training:
            self.pairs[0] += count_pairs(q_codes, k_codes, self.buckets)
            self.pairs[1] += dense_pairs
        if self.rotary:
            q, k = (rotate(t.transpose(1, 2), self.cos, self.sin).transpose(1, 2) for t in (q, k))
        y = self.attend(q, k, v, q_codes, k_codes)
        return self.out(y.reshape(batch, seq, hidden))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor) -> Tensor:
        """Compute attention with the chosen kernel; shapes as in :mod:`scenarios.sparse_attention.kernels`."""
        if (self.kernel or choose(TASK, q.device, q.dtype, q.shape[-1]).name) == "flex":
            return flex_codes_attention(q, k, v, q_codes, k_codes)
        if self.hashing == "shared":
            return shared_codes_attention(q, k, v, q_codes, self.buckets)
        return separate_codes_attention(q, k, v, q_codes, k_codes, self.buckets)


class HashSparseBlock(Block):
    """A block with hash-sparse attention.

    Args:
        config: the model's size and kind.
        hashing: see :class:`HashSparseAttention`.
        kernel: same.
    """

    def __init__(self, config: GPTConfig, *, hashing: Hashing = "shared", kernel: str | None = None) -> None:
        self._settings = {"hashing": hashing, "kernel": kernel}
        super().__init__(config)

    def make_attention(self, config: GPTConfig) -> nn.Module:
        """Build hash-sparse attention."""
        return HashSparseAttention(config, **self._settings)
