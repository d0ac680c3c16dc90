"""A run that goes on from a checkpoint decides as the uninterrupted one, in automatic mode, on three ranks.

What is measured is told by :func:`told`, so that both runs see the same: seconds of every layer by batch, and what
a move cost on every rank.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dynpipe_ds import RebalanceEvent
from dynpipe_ds.decide.balancer import Balancer
from dynpipe_ds.measure.recorder import BatchRecorder
from tests.distributed.configs import UNEVEN
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.faults.points import MIGRATE, Point

NUM_BATCHES, NUM_ORDERED, FAILS_FROM = 28, 17, 12
SECTION = {"enabled": True, "rebalance_every": "auto", "profile_batches": 3, "schedule": "1f1b"}

# By name of the run: what its moves cost, in seconds (a batch takes about half a second), and after which
# batches it is saved.
RUNS: dict[str, tuple[float, list[int]]] = {
    "cheap moves": (0.05, [14, 18]),  # batch 14 follows the change, 18 lies in the pause after a failure
    # Batch 3 follows the first move at once: its cost is not gathered yet. By batch 24 times are steady again.
    "dear moves": (40.0, [3, 24]),
    "orders": (0.05, [3, 14]),  # planned with partitions; batch 3 lies between the two trials
}
TYPICAL = [("cheap moves", 18), ("dear moves", 3), ("dear moves", 24), ("orders", 3)]
ALL = [(name, first) for name, (_, save_after) in RUNS.items() for first in save_after]

PROFILE_S = 0.0075  # what a profile is told to cost; a batch is told to take 1 s


def seconds_of(batch: int, layer: int) -> tuple[float, float]:
    """Forward and backward of one micro-batch: noisy, and the last layers become four times dearer on the way."""
    noise = random.Random(1000 * batch + layer).gauss(1.0, 0.04)
    dear = 4.0 if batch >= FAILS_FROM and layer >= 5 else 1.0
    return 0.01 * noise * dear, 0.02 * noise * dear


@contextmanager
def told(rank: int, now: dict[str, int], cost_s: float) -> Iterator[None]:
    """Every rank is told what it measures."""
    original = BatchRecorder.stop

    def stop(self: Any) -> Any:
        times, batch = original(self), now["batch"]
        many = times.num_micro_batches
        forward = {layer: many * seconds_of(batch, layer)[0] for layer in times.forward_s}
        backward = {layer: many * seconds_of(batch, layer)[1] for layer in times.forward_s}
        split = {layer: times.num_split / many * backward[layer] for layer in times.halves}
        return replace(
            times, forward_s=forward, backward_s=backward, fill_s=0.0, waiting_s=0.0, compute_end_s=1.0, step_s=0.0,
            batch_s=1.0, first_forward=None, first_backward=None,
            halves={layer: (seconds, 0.4 * seconds) for layer, seconds in split.items()},
        )

    observe = Balancer.observe
    cost = property(lambda self: cost_s * (1 + rank))  # the last rank is the slowest
    with (
        patch.object(BatchRecorder, "stop", stop), patch.object(RebalanceEvent, "seconds", cost),
        patch.object(Balancer, "observe", lambda self, profile, _cost_s: observe(self, profile, PROFILE_S)),
    ):  # fmt: skip
        yield


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room on this device")


def go_on(rank: int, name: str, folder: str, first: int, *, save: bool) -> dict[str, Any]:
    """Train from a batch to the end; a move fails if the model has changed and none has failed before."""
    cost_s, save_after = RUNS[name]
    section = SECTION | ({"schedule": "auto"} if name == "orders" else {})
    run = Run(3, first=UNEVEN[3], config={"dynamic_pipeline": section})
    engine, now = make_engine(run), {"batch": first}
    batches = islice(data(0, run.micro_batches), first * run.micro_batches, None)
    decisions: list[Any] = []
    original = Balancer.judge

    def worth_it(self: Any, plan: Any, profile: Any, *, glances: bool = False) -> Any:
        decision = original(self, plan, profile, glances=glances)
        decisions.append((now["batch"], plan.boundaries, asdict(decision)))
        return decision

    if first:
        engine.load_checkpoint(f"{folder}/{name}", tag=str(first))
    losses, partitions = [], []
    fault: Callable[[], Any] | None = None
    with told(rank, now, cost_s), patch.object(Balancer, "judge", worth_it), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in range(first, NUM_ORDERED if name == "orders" else NUM_BATCHES):
            now["batch"] = batch
            if batch == FAILS_FROM:
                armed = Point("", MIGRATE + "Migration._allocate", after=True).arm(out_of_memory if rank == 1 else int)
                armed.__enter__()
                fault = lambda armed=armed: armed.__exit__(None, None, None)  # noqa: E731
            losses.append(float(engine.train_batch(batches)))
            partitions.append(engine.partition)
            if save and batch + 1 in save_after:
                engine.save_checkpoint(f"{folder}/{name}", tag=str(batch + 1))
    if fault is not None:
        fault()
    return {
        "losses": losses, "partitions": partitions, "order": str(engine.order),
        "decisions": decisions, "state": digest(engine),
        "profiled": [profile.batch for profile in engine.dynamic.balancer.state_dict()["profiles"]],
        "knows": engine.dynamic.balancer.state_dict() | {"profiles": None, "newest": None},
    }


def uninterrupted(rank: int, folder: str) -> dict[str, Any]:
    return {name: go_on(rank, name, folder, 0, save=True) for name in RUNS}


def resumed(rank: int, folder: str, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [go_on(rank, name, folder, first, save=False) for name, first in cases]


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """What every rank saw of the runs that nobody interrupts, and their folder of checkpoints."""
    folder = str(tmp_path_factory.mktemp("whole"))
    return run_ranks(uninterrupted, 3, folder, timeout_s=300.0), folder


@pytest.mark.parametrize(
    "cases", [pytest.param(TYPICAL, id="typical"), pytest.param(ALL, id="all", marks=pytest.mark.exhaustive)]
)
def test_a_resumed_run_decides_as_the_uninterrupted_one(
    whole_runs: tuple[list[dict[str, Any]], str], cases: list[tuple[str, int]]
) -> None:
    whole, folder = whole_runs
    cheap, dear, _ = (whole[0][name]["partitions"] for name in RUNS)
    moves = [batch for batch in range(1, NUM_BATCHES) if cheap[batch] != cheap[batch - 1]]
    assert moves[0] < 4 and len(moves) >= 2, moves
    attempt = next(batch for batch, plan, told in whole[0]["cheap moves"]["decisions"]
                   if batch >= FAILS_FROM and told["rebalance"])  # fmt: skip
    assert 14 <= attempt + 1 <= 18, attempt
    # The first attempt failed, the next came after a pause, at the first batch then that was profiled.
    assert moves[1] in (attempt + 8, attempt + 9)
    assert len(set(dear)) == 2, "one move, and none that does not pay"
    profiled = whole[0]["dear moves"]["profiled"]
    assert 24 not in profiled or 25 not in profiled, "it goes on where some batches are not profiled"
    assert FAILS_FROM in profiled or FAILS_FROM + 1 in profiled
    results = run_ranks(resumed, 3, folder, cases, timeout_s=300.0)
    for rank, parts in enumerate(results):
        for (name, first), part in zip(cases, parts, strict=True):
            expected = whole[rank][name]
            assert part["partitions"] == expected["partitions"][first:], (name, first)
            assert part["order"] == expected["order"] and ("W" in part["order"]) == (name == "orders")
            assert part["losses"] == expected["losses"][first:], (name, first)
            assert part["profiled"] == expected["profiled"], (name, first)
            assert part["decisions"] == [d for d in expected["decisions"] if d[0] >= first], (name, first)
            assert part["state"] == expected["state"] and part["knows"] == expected["knows"], (name, first)


@pytest.mark.exhaustive
def test_on_fewer_stages_layer_times_carry_over(whole_runs: tuple[list[dict[str, Any]], str]) -> None:
    run_ranks(on_two_stages, 2, whole_runs[1])


def on_two_stages(rank: int, folder: str) -> None:
    engine = make_engine(Run(2, config={"dynamic_pipeline": SECTION}))
    engine.load_checkpoint(f"{folder}/cheap moves", tag="18")
    known = engine.dynamic.balancer.state_dict()
    assert len(known["profiles"]) >= 14 and known["num_newest"] == 0
    assert known["costs_s"] == [] and known["paused_until"] == 0
    batches, now = data(0, 4), {"batch": 18}
    with told(rank, now, 0.05):
        for _ in range(3):
            engine.train_batch(batches)
    assert engine.profile is not None
    assert len(engine.dynamic.balancer.state_dict()["profiles"]) == len(known["profiles"]) + 3
