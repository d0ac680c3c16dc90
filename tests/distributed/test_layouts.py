"""How tensors lie in memory is the same on both sides of a cut: the bits are those of the undivided model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.models import VOCABULARY
from tests.distributed.ranks import run_ranks
from tests.distributed.test_exactness import ADAMW, BF16_FP32_SUMS, CLIP, ZERO
from tests.distributed.test_shapes import Case, Outcome, train
from tests.matrix import mostly

NUM_BATCHES = 3


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """All partitions in which every stage has a layer."""
    return [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1)]


def train_each(_rank: int, cases: list[Case]) -> list[Outcome]:
    return [train(case, case.moves) for case in cases]


def case_of(layers: Callable[[], list[Any]], **kwargs: Any) -> Case:
    return Case(layers, 1, (0, len(layers())), {}, num_batches=NUM_BATCHES, **kwargs)


def compare_with_undivided(undivided: Case, num_stages: int, some: slice = slice(None)) -> Outcome:
    """Train on one stage, on every cut, and once through all cuts; all must agree on every bit."""
    num_layers = undivided.first[-1]
    found = cuts(num_layers, num_stages)[some]
    static = [replace(undivided, num_stages=num_stages, first=cut) for cut in found]
    moves = {batch: found[(2 * batch + 1) % len(found)] for batch in range(1, NUM_BATCHES)}
    whole = run_ranks(train_each, 1, [undivided])[0][0]
    assert len(set(whole.losses)) == NUM_BATCHES and all(loss == loss for loss in whole.losses)
    by_rank = run_ranks(train_each, num_stages, [*static, replace(static[0], moves=moves)])
    for i, name in enumerate([*map(str, found), f"moving along {moves}"]):
        outcomes = [rank[i] for rank in by_rank]
        assert outcomes[0].losses == whole.losses, f"losses differ: {name}"
        assert {k: v for o in outcomes for k, v in o.digest.items()} == whole.digest, f"layers differ: {name}"
    return whole


# -- convolutions -----------------------------------------------------------------------------


def lies_in_channels(x: Tensor) -> Tensor:
    assert x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x


class Convolution(nn.Module):
    """Changes its output in place, as convolution models do."""

    def __init__(self, width_in: int, width_out: int, norm: type[nn.Module], size: int = 3) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(width_in, width_out, size, padding=size // 2)
        self.norm = nn.GroupNorm(4, width_out) if norm is nn.GroupNorm else norm(width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolve(lies_in_channels(x))).relu_()


class ActivateFirst(nn.Module):
    """Changes its input in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(nn.functional.relu_(lies_in_channels(x) - 0.1).mul_(1.5))


def pool(x: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(lies_in_channels(x), 2)


class ImageHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(lies_in_channels(x).mean((2, 3)))


def convolution_layers() -> list[Any]:
    return [
        LayerSpec(Convolution, 3, 16, nn.BatchNorm2d), LayerSpec(Convolution, 16, 24, nn.GroupNorm), pool,
        LayerSpec(Convolution, 24, 20, nn.BatchNorm2d), LayerSpec(ActivateFirst, 20), LayerSpec(ImageHead, 20),
    ]


def images() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    while True:
        x = torch.randn(2, 3, 14, 14, generator=generator).to(memory_format=torch.channels_last)
        yield x, torch.randint(VOCABULARY, (2,), generator=generator)


def weights_in_channels(engine: Any, batch: int) -> None:
    """DeepSpeed's ``initialize`` refuses such weights, so they are made so after it."""
    if batch == 0:
        engine.module.to(memory_format=torch.channels_last)
    for parameter in engine.module.parameters():
        state = engine.stage_optimizer.export([parameter])[0]
        for tensor in (parameter, *(v for v in state.values() if isinstance(v, Tensor) and v.dim() == 4)):
            assert tensor.dim() < 4 or tensor.is_contiguous(memory_format=torch.channels_last)


CONVOLUTIONS = case_of(convolution_layers, batches=images)
CONVOLVING = {
    "adamw": replace(CONVOLUTIONS, before_batch=weights_in_channels),
    # Flat buffers hold weights in the usual order, whatever the cut.
    "zero1": replace(CONVOLUTIONS, config={**ADAMW, **ZERO, **CLIP}),
    "bf16": replace(CONVOLUTIONS, config={**ADAMW, **BF16_FP32_SUMS, **CLIP}),
}


@pytest.mark.parametrize(
    ("optimizer", "num_stages"),
    mostly(product(CONVOLVING, [2, 3, 4]), [("adamw", 2), ("zero1", 3), ("bf16", 2)]),
)
def test_convolutions(optimizer: str, num_stages: int) -> None:
    compare_with_undivided(CONVOLVING[optimizer], num_stages)
