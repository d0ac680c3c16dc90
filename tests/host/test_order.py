"""An order in DeepSpeed's instructions: of 1F1B, those of its own schedule, with sends that wait for nobody."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule

from dynpipe_ds.host.order import BackwardInput, BackwardWeight, OrderSchedule, planned
from dynpipe_ds.schedule import Order, order_of

Command = tuple[type, dict[str, Any]]


def commands(pipe_schedule: schedule.PipeSchedule) -> list[Command]:
    return [(type(command), command.kwargs) for command in chain.from_iterable(pipe_schedule)]


def sending_at_once(commands: list[Command], *, first: bool, last: bool) -> list[Command]:
    """The same instructions, with every send right behind what it sends."""
    sends = {schedule.SendActivation: schedule.ForwardPass, schedule.SendGrad: schedule.BackwardPass}
    after = {computation: send for send, computation in sends.items()}
    found: list[Command] = []
    for kind, kwargs in commands:
        if kind not in sends:
            found.append((kind, kwargs))
        if kind in after and not (last if kind is schedule.ForwardPass else first):
            found.append((after[kind], kwargs))
    assert sorted(map(str, found)) == sorted(map(str, commands))
    return found


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_1f1b_is_deepspeeds(num_stages: int) -> None:
    for num_micro_batches in range(1, 10):
        order = order_of("1f1b", num_micro_batches, num_stages)
        for stage in range(num_stages):
            theirs = schedule.TrainSchedule(num_micro_batches, num_stages, stage)
            ours = OrderSchedule(order, stage)
            expected = sending_at_once(commands(theirs), first=stage == 0, last=stage == num_stages - 1)
            assert commands(ours) == expected, (num_stages, num_micro_batches, stage)
            assert ours.num_pipe_buffers() == theirs.num_pipe_buffers()
            assert commands(planned(theirs)) == expected and isinstance(planned(theirs), OrderSchedule)


def test_other_schedules_are_left_alone() -> None:
    class Own(schedule.TrainSchedule):  # type: ignore[misc]
        """A client's."""

    for given in (schedule.InferenceSchedule(2, 2, 0), Own(2, 2, 0)):
        assert planned(given) is given


def test_no_two_micro_batches_share_a_buffer() -> None:
    """Held from receive to send: stage 0 has 0, 1 and 2 before the first backward, and the last one is held longest."""
    order = Order.parse(
        "F0 SA0 F1 SA1 F2 SA2 RG0 B0 RG1 B1 RG2 B2 | RA0 RA1 RA2 F0 B0 SG0 F1 B1 SG1 F2 B2 SG2"
    )
    assert [OrderSchedule(order, stage).num_pipe_buffers() for stage in (0, 1)] == [3, 3]
    serial = Order.parse("F0 SA0 RG0 B0 F1 SA1 RG1 B1 | RA0 F0 B0 SG0 RA1 F1 B1 SG1")
    assert OrderSchedule(serial, 0).num_pipe_buffers() == 2
    loads = [kwargs for kind, kwargs in commands(OrderSchedule(serial, 0)) if kind is schedule.LoadMicroBatch]
    assert loads == [{"buffer_id": 0}, {"buffer_id": 1}]


def test_a_split_backward() -> None:
    """``B`` of a micro-batch with ``W`` is for the inputs only, and its buffer is its own until ``W``."""
    order = Order.parse("F0 SA0 F1 SA1 RG0 B0 RG1 B1 | RA0 F0 RA1 F1 B0 SG0 B1 SG1 W0 W1")
    kinds = [kind for kind, _ in commands(OrderSchedule(order, 1))]
    assert kinds.count(BackwardInput) == kinds.count(BackwardWeight) == 2 and schedule.BackwardPass not in kinds
    assert [kind for kind, _ in commands(OrderSchedule(order, 0))].count(schedule.BackwardPass) == 2
    long = Order.parse("F0 SA0 RG0 B0 F1 SA1 RG1 B1 F2 SA2 RG2 B2 | RA0 F0 B0 SG0 RA1 F1 B1 SG1 RA2 F2 B2 SG2 W0 W1 W2")
    weights = [kwargs["buffer_id"] for kind, kwargs in commands(OrderSchedule(long, 1)) if kind is BackwardWeight]
    assert weights == [0, 1, 2] and OrderSchedule(long, 1).num_pipe_buffers() == 3
    last = list(OrderSchedule(long, 1))[-1]
    assert [type(command) for command in last] == [
        schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep
    ]


def test_split_backwards_begin_in_order() -> None:
    order = Order.parse("F0 SA0 F1 SA1 RG1 B1 RG0 B0 | RA0 F0 RA1 F1 B1 SG1 B0 SG0 W0 W1")
    with pytest.raises(ValueError, match="order of stage 1: it runs B1 before B0; where backwards are split they must"):
        OrderSchedule(order, 1)
    assert OrderSchedule(order, 0).num_pipe_buffers() == 2
    assert OrderSchedule(order_of("gpipe", 2, 2), 1).num_pipe_buffers() == 2


def test_an_order_is_asked_for() -> None:
    gpipe = order_of("gpipe", 3, 2)
    asked: list[tuple[int, int]] = []

    def order_for(num_micro_batches: int, num_stages: int) -> Order:
        asked.append((num_micro_batches, num_stages))
        return gpipe

    found = planned(schedule.TrainSchedule(3, 2, 1), order_for)
    assert commands(found) == commands(OrderSchedule(gpipe, 1)) and asked == [(3, 2)]
