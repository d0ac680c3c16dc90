"""Faults that raise, or that give nonsense: training goes on with the old partition and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from _pytest.mark import ParameterSet

from dynpipe_ds import controller, register_partitioner
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


def jump(seconds: float) -> AbstractContextManager[Any]:
    """The clock is set ahead or back in the middle of a batch, between two stamps of one layer."""
    from dynpipe_ds.profiling import HostClock

    original, calls = HostClock.stamp, iter(range(10**6))
    return patch.object(HostClock, "stamp", lambda self: original(self) + seconds * (next(calls) > 60))


@dataclass(frozen=True)
class Choice:
    """What a user's partitioner does when one rank calls it for the first time."""

    what: Callable[[], Sequence[int]]

    def register(self, *, at_fault: bool) -> None:
        """Make it known on this rank as ``"mine"``."""
        calls = iter(range(1000))

        def mine(costs: Sequence[float], num_stages: int, **options: Any) -> Sequence[int]:
            return self.what() if at_fault and next(calls) == 0 else (0, 3, 5, 8)

        register_partitioner("mine", mine)


def lookup() -> Sequence[int]:
    raise KeyError("my table")


FAULTS: dict[str, tuple[int | None, AbstractContextManager[Any] | Point | Choice, str]] = {
    "no memory where layers arrive": (2, Point("", MIGRATE + "Migration._allocate", after=True), "no room"),
    "no memory for the optimizer": (1, Point("", OPTIMIZER + "prepare"), "no room"),
    "no memory for packing": (0, Point("", MIGRATE + "Migration._pack"), "no room"),
    "a profile of NaN": (1, nonsense(float("nan")), "a batch's profile is left out"),
    "negative seconds": (2, nonsense(-1.0), "a batch's profile is left out"),
    "infinite seconds": (0, nonsense(float("inf")), "a batch's profile is left out"),
    "a clock that jumps back": (1, jump(-3600.0), "a batch's profile is left out"),
    "a clock that jumps ahead": (1, jump(3600.0), ""),  # hours are possible: the next profiles correct it
    "a partitioner that raises on one rank": (1, Choice(lookup), "rank 1: KeyError: 'my table'"),
    "a partitioner that raises": (None, Choice(lookup), "'my table'"),
    "a partitioner that loses layers": (None, Choice(lambda: (0, 3, 5, 7)), "8"),
    "a partitioner that differs": (2, Choice(lambda: (0, 2, 5, 8)), "ranks disagree on the boundaries chosen by"),
}
TYPICAL = {
    "no memory where layers arrive", "no memory for the optimizer", "a profile of NaN", "a clock that jumps back",
    "a partitioner that raises on one rank",
}


def train_with(rank: int, fault: str | None) -> tuple[list[float], list[str], list[tuple[int, ...]]]:
    """Losses, warnings and partitions after each batch; the first attempt to move comes after the third."""
    where, what, _ = FAULTS.get(fault or "", (-1, None, ""))
    at_fault = where in (rank, None)
    if isinstance(what, Choice):
        what.register(at_fault=at_fault)
    run = Run(3, first=FIRST, config={
        "dynamic_pipeline": {"enabled": True, "rebalance_every": 3, "min_gain": 0.0, "cost": "parameters",
                             "profile_batches": 1, **({"partitioner": "mine"} if isinstance(what, Choice) else {})},
    })
    engine = make_engine(run)
    batches = data(0, run.micro_batches)
    if at_fault and isinstance(what, Point):
        what.arm(out_of_memory).__enter__()
    elif at_fault and isinstance(what, AbstractContextManager):
        what.__enter__()
    with warnings.catch_warnings(record=True) as caught, patch.object(controller, "FIRST_PAUSE", 1):
        warnings.simplefilter("always")
        losses, partitions = [], []
        for _ in range(NUM_BATCHES):
            losses.append(float(engine.train_batch(batches)))
            partitions.append(engine.partition)
    told = [str(w.message) for w in caught if "dynamic_pipeline" in str(w.message)]
    return losses, told, partitions


@pytest.fixture(scope="module")
def clean() -> list[float]:
    return run_ranks(train_with, 3, None)[0][0]


def faults() -> Iterator[ParameterSet]:
    for fault in FAULTS:
        yield pytest.param(fault, marks=() if fault in TYPICAL else pytest.mark.exhaustive)


@pytest.mark.parametrize("fault", faults())
def test_training_goes_on(fault: str, clean: list[float]) -> None:
    results = run_ranks(train_with, 3, fault)
    _, what, expected = FAULTS[fault]
    for rank, (losses, told, partitions) in enumerate(results):
        assert losses == clean, "the same bits as without the fault"
        assert len(told) == (1 if rank == 0 and expected else 0), told
        assert all(expected in text for text in told)
        if isinstance(what, Point | Choice):
            assert partitions[3] == FIRST
            assert partitions[-1] != FIRST, "the next attempt succeeds"


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
