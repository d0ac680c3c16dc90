"""Gradients are copied into buckets only where replicas have to be added up; training is the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from dynpipe_ds.host.hooks import Hooks
from tests.distributed.models import Run, data, make_engine
from tests.distributed.ranks import run_ranks


def train(_rank: int, run: Run) -> tuple[list[float], int]:
    """Losses, and how often DeepSpeed reduced gradients."""
    engine = make_engine(run)
    batches, reductions = data(engine.grid.get_data_parallel_id(), run.micro_batches), []
    original = DeepSpeedEngine._reduce_non_expert_gradients

    def reduce(self: Any, *args: Any) -> None:
        reductions.append(1)
        original(self, *args)

    with patch.object(DeepSpeedEngine, "_reduce_non_expert_gradients", reduce):
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
    return losses, len(reductions)


@pytest.mark.parametrize(("num_ranks", "config", "reductions"), [
    (2, {}, 0),
    (2, {"communication_data_type": "bf16"}, 3),  # rounds on the way
    (2, {"prescale_gradients": True, "gradient_predivide_factor": 3.0}, 3),  # so does this
    (4, {}, 3),
])
def test_who_reduces(num_ranks: int, config: dict[str, Any], reductions: int) -> None:
    results = run_ranks(train, num_ranks, Run(2, config=config))
    assert [count for _, count in results] == [reductions] * num_ranks


def train_both_ways(rank: int, run: Run) -> list[list[float]]:
    as_ours, _ = train(rank, run)
    with patch.object(Hooks, "_changes_nothing", lambda *_: False):
        as_deepspeed, count = train(rank, run)
    assert count == 3
    return [as_ours, as_deepspeed]


def test_the_bits_stay() -> None:
    for as_ours, as_deepspeed in run_ranks(train_both_ways, 3, Run(3)):
        assert as_ours == as_deepspeed
