"""A layer is put together while its weights travel, unless what puts it together reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor

from tests.distributed.configs import OPTIMIZERS
from tests.distributed.models import HIDDEN, Block, Embed, Head, Run, make_engine
from tests.distributed.ranks import run_ranks
from tests.distributed.test_shapes import Case, Outcome, train

MOVES = {1: (0, 1, 5), 2: (0, 3, 5), 3: (0, 2, 5)}


class Noisy(Block):
    """Draws from a stream of its own, and looks at its weights when it is put together."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(5)
        self.total = 0.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.total = float(self.up.weight.detach().double().sum())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + 0.1 * torch.rand(HIDDEN, generator=self.noise).to(x.dtype)


def layers() -> list[Any]:
    return [LayerSpec(Embed), LayerSpec(Noisy), LayerSpec(Block), LayerSpec(Noisy), LayerSpec(Head)]


def train_both(_rank: int, case: Case) -> list[Outcome]:
    return [train(replace(case, moves={}), {}), train(case, case.moves)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stream_of_its_own_goes_on_where_the_layer_arrives(optimizer: str) -> None:
    by_rank = run_ranks(train_both, 2, Case(layers, 2, (0, 3, 5), MOVES, config=OPTIMIZERS[optimizer], num_batches=4))
    static, moving = ({k: v for rank in by_rank for k, v in rank[way].digest.items()} for way in range(2))
    assert by_rank[0][0].losses == by_rank[0][1].losses and static == moving


class Wordy(Block):
    """So much by value that it takes more than one message to say how the layer is put together."""

    def __init__(self) -> None:
        super().__init__()
        self.words = [f"word {i}" for i in range(5_000)]

    def forward(self, x: Tensor) -> Tensor:
        self.words.append(f"word {len(self.words)}")
        out: Tensor = super().forward(x)
        return out + len(self.words) / 10_000


def wordy() -> list[Any]:
    return [LayerSpec(Embed), LayerSpec(Wordy), LayerSpec(Wordy), LayerSpec(Wordy), LayerSpec(Head)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_long_bodies(optimizer: str) -> None:
    by_rank = run_ranks(train_both, 2, Case(wordy, 2, (0, 3, 5), MOVES, config=OPTIMIZERS[optimizer], num_batches=4))
    static, moving = ({k: v for rank in by_rank for k, v in rank[way].digest.items()} for way in range(2))
    assert by_rank[0][0].losses == by_rank[0][1].losses and static == moving


def sums(_rank: int) -> dict[int, tuple[float, float]]:
    import tests.distributed.models as models

    with patch.object(models, "layers_of", lambda _run: layers()):
        engine = make_engine(Run(num_stages=2, first=(0, 3, 5)))
    engine.repartition((0, 1, 5))
    return {
        index: (layer.total, float(layer.up.weight.detach().double().sum()))
        for index, layer in engine.local_layers().items() if isinstance(layer, Noisy)
    }


def test_what_reads_weights_reads_those_that_came() -> None:
    found = run_ranks(sums, 2)[1]
    assert found[1][0] == found[1][1] != 0.0, found


def count_calls(_rank: int, optimizer: str) -> list[int]:
    engine = make_engine(Run(num_stages=2, config=OPTIMIZERS[optimizer]))
    counts = []
    for boundaries in ((0, 3, 8), (0, 5, 8)):
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
            engine.repartition(boundaries)
        counts.append(calls.call_count)
    return counts


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_move_asks_all_ranks_twice(optimizer: str) -> None:
    """What the call means, and whether all have done it."""
    assert run_ranks(count_calls, 2, optimizer) == [[2, 2], [2, 2]]


def freeze_on_one_rank(rank: int) -> tuple[list[int], list[bool]]:
    engine = make_engine(Run(num_stages=2, first=(0, 4, 8)))
    if rank == 1:
        engine.local_layers()[5].requires_grad_(False)
    engine.repartition((0, 6, 8))
    trained = [p.requires_grad for p in engine.local_layers().get(5, Head()).parameters()]
    return list(engine.partition), trained


def test_what_was_frozen_just_before_is_noticed_and_moves() -> None:
    (first, trained), (second, _) = run_ranks(freeze_on_one_rank, 2)
    assert first == second == [0, 6, 8] and trained and not any(trained)
