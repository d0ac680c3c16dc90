"""A block with hash-sparse attention, at some numbers of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.layers.case import Case, forward_backward_s
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
        return count_flops(sparse, x) / count_flops(dense, x)

    return Case(amount, sparse, dense, x, x, operations)


def attention_flops(*shapes: Any, factor: int) -> int:
    """FLOPs of SDPA's CPU kernel, which the counter does not know; it computes full rectangles, as others count."""
    (batch, heads, queries, width), (_, _, keys, _) = shapes[:2]
    return factor * batch * heads * queries * keys * width


def count_flops(layer: nn.Module, x: Any) -> int:
    """Count the FLOPs of a forward and backward, those of attention among them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        forward_backward_s(layer, x)
    return int(counter.get_total_flops())


def _forward_flops(q: Any, k: Any, *_: Any, **__: Any) -> int:
    return attention_flops(q, k, factor=4)


def _backward_flops(_: Any, q: Any, k: Any, *__: Any, **___: Any) -> int:
    return attention_flops(q, k, factor=10)


CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
