"""Instruction streams: what every stage does, in order.

Loading, reduction and optimizer step are left out: a workload has the seconds of the last two at the end
(``step_s``), and loading belongs to the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Literal, NamedTuple

ScheduleName = Literal["1f1b", "gpipe"]


class Op(IntEnum):
    """Kinds of instructions that take time."""

    FORWARD = 0
    BACKWARD = 1
    SEND_ACTIVATION = 2
    RECV_ACTIVATION = 3
    SEND_GRADIENT = 4
    RECV_GRADIENT = 5


class Instruction(NamedTuple):
    """One instruction of a stage.

    Attributes:
        op: what to do.
        micro_batch: with which micro-batch, counted from 0.
    """

    op: Op
    micro_batch: int


def one_f_one_b_stream(num_micro_batches: int, num_stages: int, stage: int) -> Iterator[Instruction]:
    """1F1B's order (PipeDream-Flush, Narayanan et al. 2021): forwards ahead, then a backward and a forward in turns.

    Messages stand where DeepSpeed's ``TrainSchedule`` has them: what a stage made is sent before the next receive,
    but in a full pipeline a forward's output waits until the gradient for the backward after it has come.

    Args:
        num_micro_batches: M.
        num_stages: S.
        stage: s.
    """
    ahead = in_flight("1f1b", num_micro_batches, num_stages, stage)
    work = [Instruction(Op.FORWARD, micro_batch) for micro_batch in range(ahead)]
    for micro_batch in range(num_micro_batches):
        work.append(Instruction(Op.BACKWARD, micro_batch))
        if micro_batch + ahead < num_micro_batches:
            work.append(Instruction(Op.FORWARD, micro_batch + ahead))
    receives = {} if stage == 0 else {Op.FORWARD: Op.RECV_ACTIVATION}
    sends = {} if stage == 0 else {Op.BACKWARD: Op.SEND_GRADIENT}
    if stage < num_stages - 1:
        receives[Op.BACKWARD], sends[Op.FORWARD] = Op.RECV_GRADIENT, Op.SEND_ACTIVATION
    to_send: list[Instruction] = []
    last, is_full = Op.FORWARD, ahead == num_stages - stage
    for op, micro_batch in work:
        to_receive = [Instruction(receives[op], micro_batch)] if op in receives else []
        receives_first = is_full and last is Op.FORWARD and op is Op.BACKWARD
        yield from (*to_receive, *to_send) if receives_first else (*to_send, *to_receive)
        yield Instruction(op, micro_batch)
        to_send, last = [Instruction(sends[op], micro_batch)] if op in sends else [], op
    yield from to_send


def gpipe_stream(num_micro_batches: int, num_stages: int, stage: int) -> Iterator[Instruction]:
    """GPipe's order (Huang et al. 2019): all forwards, then all backwards, both first to last.

    Args:
        num_micro_batches: M.
        num_stages: S.
        stage: s.
    """
    first, last = stage == 0, stage == num_stages - 1
    for micro_batch in range(num_micro_batches):
        if not first:
            yield Instruction(Op.RECV_ACTIVATION, micro_batch)
        yield Instruction(Op.FORWARD, micro_batch)
        if not last:
            yield Instruction(Op.SEND_ACTIVATION, micro_batch)
    for micro_batch in range(num_micro_batches):
        if not last:
            yield Instruction(Op.RECV_GRADIENT, micro_batch)
        yield Instruction(Op.BACKWARD, micro_batch)
        if not first:
            yield Instruction(Op.SEND_GRADIENT, micro_batch)


def streams_of(
    schedule: ScheduleName, num_micro_batches: int, num_stages: int
) -> list[list[Instruction]]:
    """The streams of all stages.

    Args:
        schedule: ``"1f1b"``, as DeepSpeed's ``TrainSchedule``, or ``"gpipe"``.
        num_micro_batches: M.
        num_stages: S.

    Returns:
        S lists of instructions.

    Raises:
        ValueError: for another schedule.
    """
    check_schedule(schedule)
    stream = gpipe_stream if schedule == "gpipe" else one_f_one_b_stream
    return [list(stream(num_micro_batches, num_stages, stage)) for stage in range(num_stages)]


def check_schedule(schedule: str) -> None:
    """Refuse the name of a schedule that is not simulated.

    Args:
        schedule: the name.

    Raises:
        ValueError: if it is not a :data:`ScheduleName`.
    """
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(f"schedule = {schedule!r}: must be '1f1b' or 'gpipe'")


def in_flight(schedule: ScheduleName, num_micro_batches: int, num_stages: int, stage: int) -> int:
    """Most micro-batches that a stage holds between forward and backward.

    1F1B: ``min(M, S - s)`` (PipeDream-Flush, Narayanan et al. 2021, section 2.2); GPipe: all M.

    Args:
        schedule: its name.
        num_micro_batches: M.
        num_stages: S.
        stage: s.
    """
    return num_micro_batches if schedule == "gpipe" else min(num_micro_batches, num_stages - stage)
