"""An order as DeepSpeed's instructions, for its engine to run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from deepspeed.runtime.pipe import schedule

from dynpipe_ds.schedule import Instruction, Op, Order, order_of

_COMMANDS: dict[Op, type] = {
    Op.FORWARD: schedule.ForwardPass,
    Op.BACKWARD: schedule.BackwardPass,
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
        ValueError: when the order needs two losses or two received gradients at a time: DeepSpeed's engine keeps one.
    """

    def __init__(self, order: Order, stage: int) -> None:
        super().__init__(order.num_micro_batches, order.num_stages, stage)
        self.order = order
        self._stream = order.stages[stage]
        self._loads = stage in (0, order.num_stages - 1)
        # What the backward takes: the loss of the forward before it, or the gradient received before it.
        _check_one_at_a_time(stage, self._stream, Op.FORWARD if stage == order.num_stages - 1 else Op.RECV_GRADIENT)
        self._num_buffers = max(2, _widest(self._stream))

    def steps(self) -> Iterator[list[Any]]:
        """Yield DeepSpeed's instructions, ending with the reductions and the optimizer's step."""
        commands: list[Any] = []
        for op, micro_batch in self._stream:
            buffer_id = micro_batch % self._num_buffers
            if op is Op.FORWARD and self._loads:
                commands.append(schedule.LoadMicroBatch(buffer_id))
            commands.append(_COMMANDS[op](buffer_id))
            if op in (Op.FORWARD, Op.BACKWARD):
                yield commands
                commands = []
        yield [*commands, schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """Buffers of this stage: no two micro-batches that it holds share one."""
        return self._num_buffers


def planned(pipe_schedule: Any) -> Any:
    """What to run in place of a schedule of DeepSpeed's: for a training batch 1F1B as planned, any other as it is."""
    if type(pipe_schedule) is not schedule.TrainSchedule:
        return pipe_schedule
    order = order_of("1f1b", pipe_schedule.micro_batches, pipe_schedule.stages)
    return OrderSchedule(order, pipe_schedule.stage_id)


def _check_one_at_a_time(stage: int, stream: tuple[Instruction, ...], giver: Op) -> None:
    """Refuse a second loss, or received gradient, before the backward that takes the first."""
    wanted = [instruction for instruction in stream if instruction.op in (giver, Op.BACKWARD)]
    for first, second in pairwise(wanted):
        if first.op is giver and second != Instruction(Op.BACKWARD, first.micro_batch):
            raise ValueError(
                f"order of stage {stage}: {second} follows {first}, but DeepSpeed's engine keeps one loss and one "
                f"received gradient, so B{first.micro_batch} must be next; change the order"
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
