"""The engine runs the planned order: the bits are those of DeepSpeed's schedule, and another order runs, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

from dynpipe_ds.host import order as planning
from dynpipe_ds.schedule import Order
from tests.distributed.models import Run, run_and_digest
from tests.distributed.ranks import run_ranks

SERIAL = "F0 SA0 RG0 B0 F1 SA1 RG1 B1 | RA0 F0 B0 SG0 RA1 F1 B1 SG1"
RUNS = {
    2: Run(2, num_batches=3, micro_batches=2, dropout=0.1, moves={1: (0, 2, 8)}),
    3: Run(3, num_batches=3, micro_batches=5, tied=True, moves={1: (0, 1, 6, 8)}),
}
PLANNED = planning.OrderSchedule


def run_as(rank: int, run: Run, how: str) -> tuple[Any, list[str]]:
    """Train by the planned order, by DeepSpeed's own schedule, or by another order; and what the engine executed."""
    ran: list[str] = []

    def schedule_of(order: Order, stage: int) -> Any:
        if how == "deepspeed":
            made = TrainSchedule(order.num_micro_batches, order.num_stages, stage)
        else:
            made = PLANNED(Order.parse(SERIAL) if how == "serial" else order, stage)
        steps = made.steps

        def noted() -> Iterator[list[Any]]:
            for commands in steps():
                ran.extend(command.name for command in commands)
                yield commands

        made.steps = noted
        return made

    with patch.object(planning, "OrderSchedule", schedule_of):
        return run_and_digest(rank, run), ran


def run_as_each(rank: int, run: Run, ways: list[str]) -> list[tuple[Any, list[str]]]:
    return [run_as(rank, run, how) for how in ways]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_planned_order_trains_the_same_bits(num_stages: int) -> None:
    run = RUNS[num_stages]
    ways = ["planned", "deepspeed", *(["serial"] if num_stages == 2 else [])]
    planned, by_deepspeed, *others = map(list, zip(*run_ranks(run_as_each, num_stages, run, ways), strict=True))
    assert all(ran.count("OptimizerStep") == run.num_batches for _, ran in planned)
    assert [bits for bits, _ in by_deepspeed] == [bits for bits, _ in planned]
    for serial in others:
        assert serial[0][1][:5] == ["LoadMicroBatch", "ForwardPass", "SendActivation", "RecvGrad", "BackwardPass"]
        assert serial[0][1] != planned[0][1]
        assert [digest for digest, _ in serial] == [digest for digest, _ in planned]
