"""A block with hash-sparse attention, at some numbers of buckets."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.layers.case import Case, Shape, count_operations, forward_backward_s
from scenarios.gpt import Block
from scenarios.sparse_attention.attention import Hashing, HashSparseBlock

SHAPES = (
    Shape(hidden=256, heads=4, seq_len=512, batch=2),
    Shape(hidden=256, heads=4, seq_len=2048, batch=1),
)
BUCKETS = (2, 4, 8, 16, 32)


def cases(*shapes: Shape) -> Iterator[Case]:
    """All numbers of buckets with shared codes, one with separate codes."""
    kinds: list[tuple[Hashing, int]] = [("shared", n) for n in BUCKETS] + [("separate", 8)]
    yield from (case(shape, hashing, buckets) for shape in shapes or SHAPES for hashing, buckets in kinds)


def case(shape: Shape, hashing: Hashing, buckets: int) -> Case:
    """One block on normally distributed input, so that buckets are about equal."""
    config = shape.model()
    torch.manual_seed(0)
    dense, sparse = Block(config), HashSparseBlock(config, hashing=hashing)
    sparse.load_state_dict(dense.state_dict())
    sparse.attention.draw(buckets, seed=0)
    x = torch.randn(shape.batch, config.seq_len, config.hidden)
    forward_backward_s(sparse, x)
    pairs, dense_pairs = sparse.attention.take_pairs()
    amount = f"h{shape.hidden} s{shape.seq_len}, {buckets} buckets, {hashing}, density {pairs / dense_pairs:.2f}"

    def operations() -> float:
        return count_operations(sparse, x) / count_operations(dense, x)

    return Case(amount, sparse, dense, x, x, operations)
