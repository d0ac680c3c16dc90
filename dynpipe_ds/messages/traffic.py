"""Which messages a stage sends and gets in a batch, in which sequence: what follows from an order alone.

Between two stages lie two channels, one a direction, each first in, first out. The sequence of a channel is that in
which its sender sends. Pure: values in, values out, the same on every rank.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from dynpipe_ds.schedule import Instruction, Op, Order

MOST_IN_A_LINE = 2
"""Most messages under way on a channel of which nothing ever comes back, as in evaluation."""


class Kind(IntEnum):
    """What a message carries."""

    ACTIVATION = 0
    GRADIENT = 1


class Message(NamedTuple):
    """One message of a channel, which may be several tensors.

    Attributes:
        kind: what it carries.
        micro_batch: of which micro-batch, counted from 0.
    """

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind.name.lower()} of micro-batch {self.micro_batch}"


SENT = {Op.SEND_ACTIVATION: Kind.ACTIVATION, Op.SEND_GRADIENT: Kind.GRADIENT}
TAKEN = {Op.RECV_ACTIVATION: Kind.ACTIVATION, Op.RECV_GRADIENT: Kind.GRADIENT}


@dataclass(frozen=True)
class Traffic:
    """The messages of one stage in a batch.

    Attributes:
        turns: micro-batches of each kind of message instruction, as the stage runs them; a kind that is not there
            has them in their order.
        arrivals: by neighbour, what it sends here, in its sequence; ``None`` where that is not known, and then nothing
            is received ahead.
        most: by neighbour, most messages that may be under way to it.
        digest: a number that differs where orders do; 0 for no order.
    """

    turns: Mapping[Op, tuple[int, ...]] = field(default_factory=dict)
    arrivals: Mapping[int, tuple[Message, ...]] | None = None
    most: Mapping[int, int] = field(default_factory=dict)
    digest: int = 0


def traffic_of(order: Order, stage: int) -> Traffic:
    """The messages of a stage in a training batch.

    Args:
        order: what all stages run.
        stage: which of them.
    """
    stream, neighbours = order.stages[stage], _neighbours(stage, order.num_stages)
    return Traffic(
        turns={op: tuple(m for kind, m in stream if kind is op) for op in (*SENT, *TAKEN)},
        arrivals={other: tuple(_sent(order.stages[other], stage - other)) for other in neighbours},
        most={other: most_under_way(stream, order.stages[other], other - stage) for other in neighbours},
        digest=digest(order),
    )


def traffic_in_line(num_micro_batches: int, stage: int, num_stages: int) -> Traffic:
    """The messages of a stage where each micro-batch only goes forward: evaluation.

    Args:
        num_micro_batches: M.
        stage: index of the stage.
        num_stages: S.
    """
    activations = tuple(Message(Kind.ACTIVATION, m) for m in range(num_micro_batches))
    return Traffic(
        arrivals={stage - 1: activations} if stage else {}, most={stage + 1: MOST_IN_A_LINE}, digest=num_micro_batches
    )


def most_under_way(sender: Sequence[Instruction], receiver: Sequence[Instruction], step: int) -> int:
    """Most messages on a channel that the sender can't know to have been received.

    What comes back tells it: the receiver has sent that after all that it received before. Waiting for an older
    message than these can't block: whatever the sender runs then, the order lets it run only after that one was
    received. So this is the least room in which every order that could run in unbounded room runs as well.

    Args:
        sender: instructions of one stage.
        receiver: of its neighbour.
        step: 1 if that is the next stage, -1 if it is the one before.
    """
    sending, replying = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)[::step]
    taking, hearing = (Op.RECV_ACTIVATION, Op.RECV_GRADIENT)[::step]
    taken_before, taken = {}, 0  # a reply -> messages received before it was sent
    for op, micro_batch in receiver:
        taken += op is taking
        if op is replying:
            taken_before[micro_batch] = taken
    sent = known = most = 0
    for op, micro_batch in sender:
        if op is hearing:
            known = max(known, taken_before[micro_batch])
        if op is sending:
            sent += 1
            most = max(most, sent - known)
    return most


def digest(order: Order) -> int:
    """32 bits that two orders share if they are equal, and hardly otherwise."""
    numbers = array("q", (order.num_micro_batches, order.num_stages, *order.late))
    for stream in order.stages:
        numbers.append(len(stream))
        numbers.extend(chain.from_iterable(stream))
    return zlib.crc32(numbers.tobytes())


def _sent(stream: Sequence[Instruction], step: int) -> Iterator[Message]:
    """What a stage sends to the next one (``step`` 1) or to the one before (-1)."""
    sending = Op.SEND_ACTIVATION if step == 1 else Op.SEND_GRADIENT
    return (Message(SENT[op], micro_batch) for op, micro_batch in stream if op is sending)


def _neighbours(stage: int, num_stages: int) -> list[int]:
    return [other for other in (stage - 1, stage + 1) if 0 <= other < num_stages]
