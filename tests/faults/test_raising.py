"""Faults that raise, or that give nonsense: training goes on with the old partition and one warning."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.models import Run, data, make_engine
from tests.distributed.ranks import run_ranks
from tests.faults.points import MIGRATE, OPTIMIZER, Point

FIRST = (0, 1, 2, 8)
NUM_BATCHES = 7


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room on this device")


def nonsense(times: float) -> AbstractContextManager[Any]:
    """The recorder's clock gives every third batch seconds that can't be true."""
    from dynpipe_ds.profiling import BatchRecorder

    original, calls = BatchRecorder.stop, iter(range(1000))

    def stop(self: Any) -> Any:
        measured = original(self)
        if next(calls) % 3 == 1:
            return replace(measured, forward_s={layer: times for layer in measured.forward_s})
        return measured

    return patch.object(BatchRecorder, "stop", stop)


FAULTS: dict[str, tuple[int, AbstractContextManager[Any] | Point, str]] = {
    "no memory where layers arrive": (2, Point("", MIGRATE + "Migration._allocate", after=True), "no room"),
    "no memory for the optimizer": (1, Point("", OPTIMIZER + "prepare"), "no room"),
    "no memory for packing": (0, Point("", MIGRATE + "Migration._pack"), "no room"),
    "a profile of NaN": (1, nonsense(float("nan")), "a batch's profile is left out"),
    "negative seconds": (2, nonsense(-1.0), "a batch's profile is left out"),
    "a clock that jumps to infinity": (0, nonsense(float("inf")), "a batch's profile is left out"),
}


def train_with(rank: int, fault: str | None) -> tuple[list[float], list[str], tuple[int, ...]]:
    """Losses, warnings and the partition after the first attempt to move failed, or after no fault."""
    run = Run(3, first=FIRST, config={
        "dynamic_pipeline": {"enabled": True, "rebalance_every": 3, "min_gain": 0.0, "cost": "parameters",
                             "profile_batches": 1},
    })
    engine = make_engine(run)
    batches = data(0, run.micro_batches)
    where, what, _ = FAULTS.get(fault or "", (-1, None, ""))
    if rank == where and what is not None:
        (what.arm(out_of_memory) if isinstance(what, Point) else what).__enter__()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, partitions = [], []
        for _ in range(NUM_BATCHES):
            losses.append(float(engine.train_batch(batches)))
            partitions.append(engine.partition)
    told = [str(w.message) for w in caught if "dynamic_pipeline" in str(w.message)]
    return losses, told, partitions[3]


@pytest.fixture(scope="module")
def clean() -> list[float]:
    return run_ranks(train_with, 3, None)[0][0]


@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on(fault: str, clean: list[float]) -> None:
    results = run_ranks(train_with, 3, fault)
    expected = FAULTS[fault][2]
    for rank, (losses, told, partition) in enumerate(results):
        assert losses == clean, "the same bits as without the fault"
        assert len(told) == (1 if rank == 0 else 0), told
        assert all(expected in text for text in told)
        if "memory" in fault:
            assert partition == FIRST


def raise_in_callback(rank: int) -> tuple[list[str], int]:
    run = Run(3, first=FIRST)
    engine = make_engine(run)
    events: list[Any] = []

    @engine.on_rebalance
    def explode(event: Any) -> None:
        if rank == 1:
            raise KeyError("mine")

    engine.on_rebalance(events.append)
    batches = data(0, run.micro_batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.train_batch(batches)
        engine.repartition((0, 3, 5, 8))
        engine.train_batch(batches)
    return [str(w.message) for w in caught if "on_rebalance" in str(w.message)], len(events)


def test_a_callback_that_raises_stops_nobody() -> None:
    for rank, (told, num_events) in enumerate(run_ranks(raise_in_callback, 3)):
        assert num_events == 1
        assert len(told) == (1 if rank == 1 else 0)
        assert all("raised KeyError: 'mine'; training goes on" in text for text in told)
