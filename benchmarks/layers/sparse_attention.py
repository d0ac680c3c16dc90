"""A block with hash-sparse attention, at some numbers of buckets."""

from __future__ import annotations

import torch

from benchmarks.layers.case import Case, count_operations, forward_backward_s
from scenarios.gpt import Block, GPTConfig
from scenarios.sparse_attention.attention import Hashing, HashSparseBlock

MODELS = {
    "h256 s512": (GPTConfig(hidden=256, seq_len=512), 2),
    "h256 s2048": (GPTConfig(hidden=256, seq_len=2048), 1),
}
BUCKETS = (2, 4, 8, 16, 32)


def cases() -> list[Case]:
    """All numbers of buckets with shared codes, one with separate codes."""
    kinds: list[tuple[Hashing, int]] = [("shared", n) for n in BUCKETS] + [("separate", 8)]
    return [case(name, hashing, buckets) for name in MODELS for hashing, buckets in kinds]


def case(name: str, hashing: Hashing, buckets: int) -> Case:
    """One block on normally distributed input, so that buckets are about equal."""
    config, batch = MODELS[name]
    torch.manual_seed(0)
    dense, sparse = Block(config), HashSparseBlock(config, hashing=hashing)
    sparse.load_state_dict(dense.state_dict())
    sparse.attention.draw(buckets, seed=0)
    x = torch.randn(batch, config.seq_len, config.hidden)
    forward_backward_s(sparse, x)
    pairs, dense_pairs = sparse.attention.take_pairs()
    amount = f"{name}, {buckets} buckets, {hashing}, density {pairs / dense_pairs:.2f}"

    def operations() -> float:
        return count_operations(sparse, x) / count_operations(dense, x)

    return Case(amount, sparse, dense, x, x, operations)
