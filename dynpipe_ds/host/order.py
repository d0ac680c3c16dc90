"""An order as DeepSpeed's instructions, for its engine to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from deepspeed.runtime.pipe import schedule

from dynpipe_ds.schedule import Instruction, Op, Order, order_of


class BackwardInput(schedule.BufferOpInstruction):  # type: ignore[misc]
    """The gradients of a micro-batch's inputs."""


class BackwardWeight(schedule.BufferOpInstruction):  # type: ignore[misc]
    """The gradients of the parameters, of a micro-batch whose inputs have theirs."""


_COMMANDS: dict[Op, type] = {
    Op.FORWARD: schedule.ForwardPass,
    Op.BACKWARD: schedule.BackwardPass,
    Op.BACKWARD_WEIGHT: BackwardWeight,
    Op.SEND_ACTIVATION: schedule.SendActivation,
    Op.RECV_ACTIVATION: schedule.RecvActivation,
    Op.SEND_GRADIENT: schedule.SendGrad,
    Op.RECV_GRADIENT: schedule.RecvGrad,
}


class OrderSchedule(schedule.PipeSchedule):  # type: ignore[misc]
    """One stage's part of an order, in the form that DeepSpeed's engine executes.

    A step ends with a forward or a backward; a barrier between two steps, which DeepSpeed's own steps allow, could
    block. Of 1F1B the instructions, and their buffers, are those of DeepSpeed's ``TrainSchedule``.

    Args:
        order: what all stages run, kept as an attribute.
        stage: which of them this is.

    Raises:
        ValueError: when it splits backwards and does not begin them in the order of micro-batches.
    """

    def __init__(self, order: Order, stage: int) -> None:
        super().__init__(order.num_micro_batches, order.num_stages, stage)
        self.order = order
        self._stream = order.stages[stage]
        self._split = order.split(stage)
        if self._split:
            _check_begun_in_order(stage, self._stream)
        self._loads = stage in (0, order.num_stages - 1)
        self._num_buffers = max(2, _widest(self._stream))

    def steps(self) -> Iterator[list[Any]]:
        """Yield DeepSpeed's instructions, ending with the reductions and the optimizer's step."""
        commands: list[Any] = []
        for op, micro_batch in self._stream:
            buffer_id = micro_batch % self._num_buffers
            if op is Op.FORWARD and self._loads:
                commands.append(schedule.LoadMicroBatch(buffer_id))
            is_half = op is Op.BACKWARD and micro_batch in self._split
            commands.append((BackwardInput if is_half else _COMMANDS[op])(buffer_id))
            if op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT):
                yield commands
                commands = []
        yield [*commands, schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """Buffers of this stage: no two micro-batches that it holds share one."""
        return self._num_buffers


OrderFor = Callable[[int, int], Order]
"""Which order a training batch runs, by its micro-batches M and the stages S; the same on every rank."""

ONE_F_ONE_B: OrderFor = partial(order_of, "1f1b")


def ordered(order: Order | None, num_micro_batches: int, num_stages: int) -> Order:
    """An order where it is of this size, else 1F1B: a batch may have other micro-batches than the ones before.

    Args:
        order: ``None``: 1F1B.
        num_micro_batches: M.
        num_stages: S.
    """
    if order is None or (order.num_micro_batches, order.num_stages) != (num_micro_batches, num_stages):
        return ONE_F_ONE_B(num_micro_batches, num_stages)
    return order


def planned(pipe_schedule: Any, order_for: OrderFor = ONE_F_ONE_B) -> Any:
    """What to run in place of a schedule of DeepSpeed's: for a training batch an order, any other as it is.

    Args:
        pipe_schedule: what DeepSpeed's engine would run.
        order_for: says which order.
    """
    if type(pipe_schedule) is not schedule.TrainSchedule:
        return pipe_schedule
    order = order_for(pipe_schedule.micro_batches, pipe_schedule.stages)
    return OrderSchedule(order, pipe_schedule.stage_id)


def _check_begun_in_order(stage: int, stream: tuple[Instruction, ...]) -> None:
    """Refuse a backward that begins before an earlier micro-batch's: it may have to run whole, and adds up then."""
    begun = [instruction for instruction in stream if instruction.op is Op.BACKWARD]
    for first, second in pairwise(begun):
        if second.micro_batch < first.micro_batch:
            raise ValueError(
                f"order of stage {stage}: it runs {first} before {second}; where backwards are split they must begin "
                "in the order of micro-batches, since one that can't be split adds up its gradients at once"
            )


def _widest(stream: tuple[Instruction, ...]) -> int:
    """Most neighbouring micro-batches from the oldest to the newest one held: with so many buffers none collide.

    A micro-batch is held from its first to its last instruction.
    """
    last = {micro_batch: i for i, (_, micro_batch) in enumerate(stream)}
    held: set[int] = set()
    widest = 0
    for i, (_, micro_batch) in enumerate(stream):
        held.add(micro_batch)
        widest = max(widest, max(held) - min(held) + 1)
        if last[micro_batch] == i:
            held.remove(micro_batch)
    return widest
