"""Faults that raise, or that give nonsense.

What can be undone is: training goes on with the old partition and one warning. What can't ends all ranks.
"""

from __future__ import annotations

import errno
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from _pytest.mark import ParameterSet
from deepspeed.monitor.csv_monitor import csvMonitor

from dynpipe_ds import FatalError, MigrationError, register_partitioner
from dynpipe_ds.decide import balancer
from dynpipe_ds.migration.migrate import Migration
from tests.distributed.configs import EVEN, UNEVEN
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.faults.points import MIGRATE, OPTIMIZER, PIPELINE, STAGE, STAGE_OPTIMIZER, TRANSFER, Point
from tests.matrix import mostly

NUM_BATCHES = 7
AUTOMATIC = {
    "enabled": True, "rebalance_every": 3, "min_gain": 0.0, "cost": "parameters", "profile_batches": 1,
    "schedule": "1f1b",
}
"""The first attempt to move comes after the third batch. What a cut gains is counted in parameters; in a planned order
it would be counted in seconds, which are anything on a busy machine."""


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room on this device")


def nonsense(times: float) -> AbstractContextManager[Any]:
    """The recorder's clock gives every third batch seconds that can't be true."""
    from dynpipe_ds.measure.recorder import BatchRecorder

    original, calls = BatchRecorder.stop, iter(range(1000))

    def stop(self: Any) -> Any:
        measured = original(self)
        if next(calls) % 3 == 1:
            return replace(measured, forward_s={layer: times for layer in measured.forward_s})
        return measured

    return patch.object(BatchRecorder, "stop", stop)


def jump(seconds: float) -> AbstractContextManager[Any]:
    """The clock is set ahead or back in the middle of a batch, between two stamps of one layer."""
    from dynpipe_ds.measure import HostClock

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


def timed_out() -> Sequence[int]:
    raise ConnectionError("timed out")


@contextmanager
def unfilled_layer() -> Iterator[None]:
    """What this rank is to send first holds a tensor without data."""
    original, calls = Migration._pack, iter(range(1000))

    def pack(self: Any) -> Any:
        layers = [self._old_layers[move.layer] for move in self._leaving] if next(calls) == 0 else []
        for layer in layers:
            layer.register_buffer("unfilled", torch.empty(2, device="meta"), persistent=False)
        try:
            return original(self)
        finally:
            for layer in layers:
                del layer.unfilled

    with patch.object(Migration, "_pack", pack):
        yield


def full_disk() -> AbstractContextManager[Any]:
    """The first rank's monitor can't write: DeepSpeed's own figures neither, nor the library's."""

    def write_events(self: Any, events: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return patch.object(csvMonitor, "write_events", write_events)


ALL_RANKS = None
UNDONE: dict[str, tuple[int | None, AbstractContextManager[Any] | Point | Choice, str]] = {
    "no memory where layers arrive": (2, Point("", MIGRATE + "Migration._allocate", after=True), "no room"),
    "no memory for a tensor that arrives": (0, Point("", MIGRATE + "make_room"), "no room"),
    "no memory for the optimizer": (1, Point("", OPTIMIZER + "prepare"), "no room"),
    "no memory after the optimizer prepared": (1, Point("", OPTIMIZER + "prepare", after=True), "no room"),
    "no memory for the optimizer's buffers": (2, Point("", STAGE_OPTIMIZER + "make_buffers"), "no room"),
    "no memory for state": (1, Point("", OPTIMIZER + "fill"), "no room"),
    "no memory in the middle of state": (2, Point("", OPTIMIZER + "fill", after=True), "no room"),
    "no memory for packing": (0, Point("", MIGRATE + "Migration._pack"), "no room"),
    "no memory for exporting state": (1, Point("", OPTIMIZER + "export"), "no room"),
    "no memory for the journey": (1, Point("", TRANSFER + "__init__"), "no room"),
    "a layer that can't be put together": (1, Point("", MIGRATE + "unpack"), "no room"),
    "a module that does not take it in": (0, Point("", "dynpipe_ds.module:DynamicPipelineModule.install"), "no room"),
    "a name that can't be given": (1, Point("", PIPELINE + "name_parameters", after=True), "no room"),
    "a layer without data": (1, unfilled_layer(), "of shape (2,) on the meta device at unfilled, which has no"),
    "a partitioner that raises on one rank": (1, Choice(lookup), "rank 1: KeyError: 'my table'"),
    "a partitioner that raises": (ALL_RANKS, Choice(lookup), "'my table'"),
    "a partitioner that loses layers": (ALL_RANKS, Choice(lambda: (0, 3, 5, 7)), "8"),
    "a partitioner that differs": (2, Choice(lambda: (0, 2, 5, 8)), "ranks disagree on the boundaries chosen by"),
    "a partitioner that speaks of connections": (1, Choice(timed_out), "rank 1: ConnectionError: timed out"),
}
MEASURED: dict[str, tuple[int | None, AbstractContextManager[Any], str]] = {
    "a profile of NaN": (1, nonsense(float("nan")), "a batch's profile is left out"),
    "negative seconds": (2, nonsense(-1.0), "a batch's profile is left out"),
    "infinite seconds": (0, nonsense(float("inf")), "a batch's profile is left out"),
    "a clock that jumps back": (1, jump(-3600.0), "a batch's profile is left out"),
    "a clock that jumps ahead": (1, jump(3600.0), ""),  # hours are possible: the next profiles correct it
    "a monitor that can't write": (0, full_disk(), "the monitor could not write (OSError: [Errno 28] No space"),
}
FAULTS: dict[str, tuple[int | None, AbstractContextManager[Any] | Point | Choice, str]] = {**UNDONE, **MEASURED}
TYPICAL = {
    "no memory in the middle of state", "a layer without data", "a profile of NaN",
    "a partitioner that raises on one rank", "a monitor that can't write",
}


def train_with(rank: int, fault: str | None) -> tuple[list[float], list[str], list[tuple[int, ...]]]:
    """Losses, warnings and partitions after each batch; the first attempt to move comes after the third."""
    with tempfile.TemporaryDirectory() as folder:
        return train_in(folder, rank, fault)


def train_in(folder: str, rank: int, fault: str | None) -> tuple[list[float], list[str], list[tuple[int, ...]]]:
    where, what, _ = FAULTS.get(fault or "", (-1, None, ""))
    at_fault = where in (rank, None)
    if isinstance(what, Choice):
        what.register(at_fault=at_fault)
    run = Run(3, first=UNEVEN[3], config={
        "csv_monitor": {"enabled": True, "output_path": folder},
        "dynamic_pipeline": {**AUTOMATIC, **({"partitioner": "mine"} if isinstance(what, Choice) else {})},
    })
    engine = make_engine(run)
    batches = data(0, run.micro_batches)
    if at_fault and isinstance(what, Point):
        what.arm(out_of_memory).__enter__()
    elif at_fault and isinstance(what, AbstractContextManager):
        what.__enter__()
    with warnings.catch_warnings(record=True) as caught, patch.object(balancer, "FIRST_PAUSE", 1):
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
        if fault in UNDONE:
            assert partitions[3] == UNEVEN[3]
        if fault in UNDONE or "monitor" in fault:
            assert partitions[-1] != UNEVEN[3], "the next attempt succeeds"


def plan_with(rank: int, at_fault: int | None) -> tuple[list[float], list[str], str, int]:
    """Losses, warnings, the order in the end, and how many plans were made, where one rank's planner raises twice."""
    from dynpipe_ds.decide import orders

    engine = make_engine(Run(3, config={"dynamic_pipeline": {"enabled": True, "schedule": "planned"}}))
    failing = iter(range(2 if rank == at_fault else 0))

    def fails(real: Callable[..., Any]) -> Callable[..., Any]:
        def plan(*args: Any, **options: Any) -> Any:
            if next(failing, None) is not None:
                raise MemoryError("no room for a plan")
            plans.append(real(*args, **options))
            return plans[-1]

        return plan

    plans: list[Any] = []
    batches = data(0, engine.micro_batches)
    with warnings.catch_warnings(record=True) as caught, ExitStack() as stack:
        warnings.simplefilter("always")
        stack.enter_context(patch.object(balancer, "FIRST_PAUSE", 1))
        for name in ("plan_batch", "plan_on_partition"):
            stack.enter_context(patch.object(orders, name, fails(getattr(orders, name))))
        losses = [float(engine.train_batch(batches)) for _ in range(14)]
    told = [str(w.message) for w in caught if "dynamic_pipeline" in str(w.message)]
    return losses, told, str(engine.order), len(plans)


def test_a_planner_that_raises_on_one_rank() -> None:
    """What planning may cost from then on is the same on all ranks: else some would meet to compare plans, and wait."""
    clean = run_ranks(plan_with, 3, None)[0][0]
    results = run_ranks(plan_with, 3, 1)
    for rank, (losses, told, order, num_plans) in enumerate(results):
        assert losses == clean
        assert len(told) == (rank == 0) and all("rank 1: MemoryError: no room for a plan" in text for text in told)
        assert order == results[0][2] and num_plans > 0, "the next attempt succeeds"


def raise_in_callback(rank: int) -> tuple[list[str], int]:
    run = Run(3, first=UNEVEN[3])
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


# -- what can't be undone -----------------------------------------------------------------------

CANT_BE_UNDONE: dict[str, tuple[int, Point]] = {
    "before heads travel": (0, Point("", MIGRATE + "Migration._exchange_heads")),
    "before bodies travel": (2, Point("", MIGRATE + "Migration._post_bodies")),
    "receiving bodies": (1, Point("", MIGRATE + "Migration._read_bodies")),
    "sending": (1, Point("", TRANSFER + "start")),
    "receiving": (0, Point("", TRANSFER + "finish")),
    "after the last vote": (1, Point("", STAGE_OPTIMIZER + "commit")),
    "renewing caches": (2, Point("", STAGE + "settle")),
    "exchanging profiles": (1, Point("", "dynpipe_ds.measure.profiler:gather_profile", call=3)),
    "noting the move": (0, Point("", "dynpipe_ds.decide.balancer:Balancer.moved")),
    "going back": (2, Point("", OPTIMIZER + "rollback")),  # because memory is short on the rank before it
}


def train_to_the_end(rank: int, fault: str) -> tuple[str, float, float, int]:
    """Message that ended this rank, when it did, when the fault was there, and batches trained."""
    victim, point = CANT_BE_UNDONE[fault]
    happened = [0.0]

    def fail() -> None:
        happened[0] = time.time()
        out_of_memory()

    engine = make_engine(Run(3, first=UNEVEN[3], config={"dynamic_pipeline": AUTOMATIC}))
    if rank == victim:
        point.arm(fail).__enter__()
    if fault == "going back" and rank == 1:
        Point("", OPTIMIZER + "prepare").arm(out_of_memory).__enter__()
    batches, num_batches = data(0, 4), 0
    try:
        for num_batches in range(NUM_BATCHES):  # noqa: B007
            engine.train_batch(batches)
    except FatalError as error:
        with pytest.raises(FatalError, match=re.escape(str(error))):
            engine.train_batch(batches)  # nobody can go on by mistake
        return str(error), time.time(), happened[0], num_batches
    return "", 0.0, 0.0, num_batches


@pytest.mark.parametrize("fault", mostly(CANT_BE_UNDONE, ["sending", "after the last vote"]))
def test_all_ranks_end_together(fault: str, record_property: Callable[[str, object], None]) -> None:
    victim, _ = CANT_BE_UNDONE[fault]
    results = run_ranks(train_to_the_end, 3, fault, may_die={0, 1, 2})
    texts = {text for text, *_ in results}
    assert len(texts) == 1, "one message, the same on every rank"
    assert f"rank {victim} failed while " in texts.copy().pop() and "OutOfMemoryError: no room on this" in texts.pop()
    assert max(num_batches for *_, num_batches in results) <= 3, "nobody finishes another batch"
    seconds = max(ended_at for _, ended_at, *_ in results) - results[victim][2]
    record_property("ended_s", round(seconds, 2))


# -- freezing ------------------------------------------------------------------------------------


def freeze_with(rank: int, fails: bool) -> tuple[list[float], str, dict[str, str]]:
    """Losses, the error of the batch after freezing, and the state at the end; layers 2 and 3 are frozen."""
    run = Run(3, first=UNEVEN[3])
    engine = make_engine(run)
    batches, losses, told = data(0, run.micro_batches), [], ""
    for batch in range(5):
        if batch == 2:
            for layer, module in engine.local_layers().items():
                module.requires_grad_(layer not in (2, 3))
            if fails and rank == 2:
                Point("", OPTIMIZER + "prepare", after=True).arm(out_of_memory).__enter__()
            if fails:
                before = digest(engine)
                with pytest.raises(MigrationError) as caught:
                    engine.train_batch(batches)
                told = str(caught.value)
                assert digest(engine) == before
        losses.append(float(engine.train_batch(batches)))
    return losses, told, digest(engine)


def freeze_both_ways(rank: int) -> list[tuple[list[float], str, dict[str, str]]]:
    return [freeze_with(rank, fails) for fails in (False, True)]


def test_a_rebuild_for_frozen_layers_is_undone_on_every_rank() -> None:
    for (their_losses, _, their_state), (losses, told, state) in run_ranks(freeze_both_ways, 3):
        assert told == (
            "rebuilding the optimizer for frozen layers failed and was undone on every rank "
            "(rank 2: OutOfMemoryError: no room on this device)"
        )
        assert losses == their_losses and state == their_state, "the next batch tries again"


def freeze_one_replica(rank: int) -> str:
    engine = make_engine(Run(2, first=EVEN[2]))
    batches = data(engine.grid.get_data_parallel_id(), 4)
    engine.train_batch(batches)
    if rank == 3:
        engine.local_layers()[6].requires_grad_(False)
    with pytest.raises(ValueError, match="replicas of stage 1 but differ in the parameters that are trained") as caught:
        engine.train_batch(batches)
    return str(caught.value)


def test_replicas_that_freeze_different_layers_are_refused() -> None:
    texts = run_ranks(freeze_one_replica, 4)
    assert len(set(texts)) == 1 and "ranks 2 and 3 are" in texts[0] and "do the same on every replica" in texts[0]
