"""A memory cap a stage, checked against what the profiler measured on the real engine."""

from __future__ import annotations

from typing import Any

import pytest

from dynpipe_ds.partition import InfeasiblePartitionError, StageMemory
from tests.distributed.configs import BY_HAND
from tests.distributed.models import Run, make_engine, train
from tests.distributed.ranks import run_ranks

SECTION = {**BY_HAND, "partitioner": "optimal", "cost": "parameters"}


def trained(caps: Any = None) -> Any:
    """An engine with a profile, under caps in bytes."""
    run = Run(num_stages=2, num_batches=2, config={"dynamic_pipeline": {**SECTION, "memory_cap_bytes": caps}})
    engine = make_engine(run)
    train(engine, run)
    return engine


def partitions_under_caps(_rank: int) -> tuple[list[int], tuple[int, ...], tuple[int, ...], str]:
    engine = trained()
    profile = engine.profile

    def stage_bytes(boundaries: Any) -> tuple[int, ...]:
        return StageMemory(
            state_bytes=profile.state_bytes(), activation_bytes=profile.activation_bytes(),
            num_micro_batches=engine.micro_batches, cap_bytes=1,
        ).stage_bytes(boundaries)

    engine.rebalance()
    free = engine.partition
    # Stage 0 holds two micro-batches in flight, stage 1 one: a cap just below what stage 0 holds now
    # must push a layer to stage 1.
    cap = stage_bytes(free)[0] - 1
    engine = trained([cap, 10**12])
    engine.rebalance()
    capped = engine.partition
    held = stage_bytes(capped)
    with pytest.raises(InfeasiblePartitionError) as error:
        trained(1).rebalance()
    return [cap, *held], free, capped, str(error.value)


def test_cap_moves_layers_and_an_impossible_one_is_refused_everywhere() -> None:
    results = run_ranks(partitions_under_caps, 2)
    (cap, held, _), free, capped, message = results[0]
    assert capped[1] < free[1]
    assert held <= cap
    assert "layer" in message and "1" in message
    assert [r[2] for r in results] == [capped, capped]
