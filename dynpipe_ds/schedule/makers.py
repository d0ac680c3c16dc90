"""Orders by name: 1F1B, which DeepSpeed runs, and GPipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal

from dynpipe_ds.schedule.order import Instruction, Op, Order

ScheduleName = Literal["1f1b", "gpipe"]


def order_of(schedule: ScheduleName, num_micro_batches: int, num_stages: int) -> Order:
    """The order of all stages.

    Args:
        schedule: ``"1f1b"``, as DeepSpeed's ``TrainSchedule`` has it, or ``"gpipe"``.
        num_micro_batches: M.
        num_stages: S.

    Returns:
        The order; kept, since every batch asks for the same one.

    Raises:
        ValueError: for another schedule, or for no micro-batch or stage.
    """
    check_schedule(schedule)
    return _order_of(schedule, num_micro_batches, num_stages)


@lru_cache(maxsize=8)
def _order_of(schedule: ScheduleName, num_micro_batches: int, num_stages: int) -> Order:
    stream = _gpipe if schedule == "gpipe" else _one_f_one_b
    streams = (tuple(stream(num_micro_batches, num_stages, stage)) for stage in range(num_stages))
    return Order(num_micro_batches, tuple(streams))


def split_at_once(
    num_micro_batches: int, num_stages: int, first_stage: int, micro_batches: Iterable[int] | None = None
) -> Order:
    """1F1B with backwards in two halves, of which the second follows at once: to measure them apart.

    Args:
        num_micro_batches: M.
        num_stages: S.
        first_stage: the first one that splits.
        micro_batches: those whose backwards are split; ``None``: all.

    Returns:
        The order.
    """
    usual = order_of("1f1b", num_micro_batches, num_stages)
    streams = [list(stream) for stream in usual.stages]
    for stream in streams[first_stage:]:
        for micro_batch in range(num_micro_batches) if micro_batches is None else micro_batches:
            backward, sent = (Instruction(op, micro_batch) for op in (Op.BACKWARD, Op.SEND_GRADIENT))
            at = stream.index(sent if sent in stream else backward)
            stream.insert(at + 1, Instruction(Op.BACKWARD_WEIGHT, micro_batch))
    return Order(num_micro_batches, tuple(map(tuple, streams)))


def check_schedule(schedule: str) -> None:
    """Refuse the name of a schedule that nobody makes.

    Raises:
        ValueError: if it is not a :data:`ScheduleName`.
    """
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(f"schedule = {schedule!r}: must be '1f1b' or 'gpipe'")


def in_flight(schedule: ScheduleName, num_micro_batches: int, num_stages: int, stage: int) -> int:
    """What :meth:`Order.in_flight` counts, without making the order.

    1F1B: ``min(M, S - s)`` (PipeDream-Flush, Narayanan et al. 2021, section 2.2); GPipe: all M.
    """
    return num_micro_batches if schedule == "gpipe" else min(num_micro_batches, num_stages - stage)


def _one_f_one_b(num_micro_batches: int, num_stages: int, stage: int) -> Iterator[Instruction]:
    """DeepSpeed's order, in which a stage computes a forward where ``t - s`` is even, else a backward, in step t.

    It sends what it has computed at once. DeepSpeed's sends block, so there they wait until the neighbour receives.
    """
    first, last = stage == 0, stage == num_stages - 1
    for t in range(2 * (num_micro_batches + num_stages - 1)):
        is_forward = (t - stage) % 2 == 0
        micro_batch = (t - stage) // 2 if is_forward else (t + stage + 1) // 2 - num_stages
        if 0 <= micro_batch < num_micro_batches:
            yield from (_forward if is_forward else _backward)(micro_batch, first=first, last=last)


def _gpipe(num_micro_batches: int, num_stages: int, stage: int) -> Iterator[Instruction]:
    """GPipe's order (Huang et al. 2019): all forwards, then all backwards, both first to last."""
    first, last = stage == 0, stage == num_stages - 1
    for micro_batch in range(num_micro_batches):
        yield from _forward(micro_batch, first=first, last=last)
    for micro_batch in range(num_micro_batches):
        yield from _backward(micro_batch, first=first, last=last)


def _forward(micro_batch: int, *, first: bool, last: bool) -> Iterator[Instruction]:
    if not first:
        yield Instruction(Op.RECV_ACTIVATION, micro_batch)
    yield Instruction(Op.FORWARD, micro_batch)
    if not last:
        yield Instruction(Op.SEND_ACTIVATION, micro_batch)


def _backward(micro_batch: int, *, first: bool, last: bool) -> Iterator[Instruction]:
    if not last:
        yield Instruction(Op.RECV_GRADIENT, micro_batch)
    yield Instruction(Op.BACKWARD, micro_batch)
    if not first:
        yield Instruction(Op.SEND_GRADIENT, micro_batch)
