"""Layers of many kinds in stages that split their backwards: the bits are those of 1F1B."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.configs import ADAMW, BY_HAND, CLIP
from tests.distributed.models import digest
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import AT_THE_END, OrderFor, counting_splits, delayed
from tests.splitting.blocks import WIDTH, Attention, Changing, Hooked, Mlp, Own, Sharing, Views


class Forked(nn.Module):
    """One tensor in, several out: one wants no gradient, one is used by nobody later."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.aside = Mlp(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.mlp(x), x, torch.arange(4.0), self.aside(x)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        x, skipped, numbers, _ = values
        return self.mlp(x) + skipped * numbers[:, None]


class Recomputed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Thrice(Sharing):
    def __init__(self) -> None:
        super().__init__(3)


class Mixed(Sharing):
    def __init__(self) -> None:
        super().__init__(5, mixed=True)


class Viewed(Views):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


KINDS: dict[str, list[type[nn.Module]]] = {
    "tuples": [Mlp, Mlp, Forked, Joined, Mlp, Mlp],
    "several outputs over a cut": [Mlp, Mlp, Mlp, Forked, Joined, Mlp],
    "functions": [Own, Mlp, Own, Changing, Own, Mlp],
    "frozen prefix": [Frozen, Frozen, Mlp, Mlp, Attention, Mlp],
    "frozen stage": [Frozen, Frozen, Frozen, Frozen, Frozen, Mlp],
    "frozen middle": [Mlp, Mlp, Frozen, Frozen, Mlp, Attention],
    "sharing": [Thrice, Mlp, Mixed, Viewed, Thrice, Mixed],
    "hooks": [Hooked, Mlp, Hooked, Mlp, Hooked, Hooked],
    "recomputed": [Mlp, Recomputed, Recomputed, Mlp, Recomputed, Mlp],
}
TYPICAL = ("tuples", "functions", "recomputed")


def loss_fn(x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(x, target)


def train_kind(kind: str, num_stages: int, order_for: OrderFor | None) -> tuple[Any, int]:
    torch.manual_seed(5)
    module = DynamicPipelineModule(
        [LayerSpec(layer) for layer in KINDS[kind]], num_stages=num_stages, loss_fn=loss_fn, partition_method="uniform"
    )
    config = {
        **ADAMW, **CLIP, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
        "steps_per_print": 10**9, "dynamic_pipeline": BY_HAND,
    }  # fmt: skip
    with counting_splits() as split:
        engine, *_ = deepspeed.initialize(model=module, config=config)
        if order_for is not None:
            engine.dynamic.pipeline.order_for = order_for
        draw = torch.Generator().manual_seed(1)
        batches = iter(lambda: tuple(torch.randn(2, 4, WIDTH, generator=draw) for _ in range(2)), None)
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        seen = [sorted(layer.seen) for layer in engine.local_layers().values() if hasattr(layer, "seen")]
        return (losses, digest(engine), float(engine.get_global_grad_norm()), seen), len(split)


def train_each(_rank: int, kind: str, num_stages: int, delays: list[int]) -> list[tuple[Any, int]]:
    return [train_kind(kind, num_stages, None), *(train_kind(kind, num_stages, delayed(delay)) for delay in delays)]


def compare(kind: str, num_stages: int, delays: list[int]) -> None:
    for rank, ((plain, none), *others) in enumerate(run_ranks(train_each, num_stages, kind, num_stages, delays)):
        assert none == 0 and all(loss == loss for loss in plain[0])
        for delay, (bits, _) in zip(delays, others, strict=True):
            assert bits == plain, f"rank {rank}, W delayed by {delay}"
        assert others[-1][1] or rank < num_stages - 1 or kind == "frozen stage", "the last stage splits"


@pytest.mark.parametrize("kind", TYPICAL)
def test_the_bits_are_those_of_1f1b(kind: str) -> None:
    compare(kind, 2, [2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_1f1b_with_every_kind(kind: str, num_stages: int) -> None:
    compare(kind, num_stages, [0, 1, AT_THE_END])


