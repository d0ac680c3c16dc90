"""A batch that was trained, as a timeline: what the recorders of all stages have noted, on one clock.

Every rank's marks are seconds since its own start of the batch. By how much these starts lie apart follows from the
messages: none arrives before it was sent, neither forwards nor backwards. Of what that allows the middle is taken, as
where clocks are set over a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from dynpipe_ds.measure.recorder import BACKWARD, FORWARD, LOAD, REDUCE, STEP, WEIGHT
from dynpipe_ds.schedule import Instruction, Op, Order
from dynpipe_ds.schedule.order import Stream
from dynpipe_ds.simulation import Interval
from dynpipe_ds.simulation.outcome import Kind, Payload

Marks = Sequence[tuple[int, float]]
_KINDS: Mapping[int, Kind] = {
    LOAD: "load", FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight", REDUCE: "step", STEP: "step",
}  # fmt: skip
_OF_NO_MICRO_BATCH = (LOAD, REDUCE, STEP)
_COMPUTES = {Op.FORWARD: FORWARD, Op.BACKWARD: BACKWARD, Op.BACKWARD_WEIGHT: WEIGHT}


class _Span(NamedTuple):
    """Begin and end, in seconds."""

    start_s: float
    end_s: float


class _Message(NamedTuple):
    """One message, each end on its stage's clock.

    Attributes:
        payload: what it carries.
        sender: stage.
        receiver: stage.
        micro_batch: of what.
        sent: when the sender ran the instruction.
        taken: when the receiver did; it waits inside if the message is not there.
    """

    payload: Payload
    sender: int
    receiver: int
    micro_batch: int
    sent: _Span
    taken: _Span

    @property
    def seconds(self) -> float:
        """From being sent to being taken, as far as both clocks agree."""
        return self.taken.end_s - self.sent.start_s


@dataclass(frozen=True)
class _Stage:
    """What one stage did, by its own clock: computations in order of time, and when it ran each send and receive."""

    computed: list[Interval]
    transfers: dict[Instruction, _Span]

    def later(self, seconds: float) -> _Stage:
        """The same by a clock that began earlier."""
        computed = [i._replace(start_s=i.start_s + seconds, end_s=i.end_s + seconds) for i in self.computed]
        spans = {what: _Span(start_s + seconds, end_s + seconds) for what, (start_s, end_s) in self.transfers.items()}
        return _Stage(computed, spans)


def measured_timeline(order: Order, stages: Sequence[Sequence[Marks]]) -> tuple[Interval, ...]:
    """Put together what the stages of a pipeline have measured in one batch.

    A stage that waits for a message is idle until it is sent (``"wait"``), and then receives it (``"recv"``). A message
    lasts until it is taken, which is later than it arrives where the receiver has other things to do.

    Args:
        order: what the batch ran.
        stages: of every stage, what :meth:`~dynpipe_ds.measure.recorder.BatchRecorder.by_instruction` gave.

    Returns:
        Intervals of all stages, each in order of time, then all messages; the first one begins at 0.
    """
    alone = [_stage(s, *of) for s, of in enumerate(zip(order.stages, stages, strict=True))]
    shifts_s = [0.0, *accumulate(_shift_s(alone, boundary) for boundary in range(len(alone) - 1))]
    own = [stage.later(shift_s) for stage, shift_s in zip(alone, shifts_s, strict=True)]
    messages = sorted(_messages(own), key=lambda message: message.sent)
    timeline: list[Interval] = []
    for s, stage in enumerate(own):
        ends = (interval for message in messages for interval in _ends(message, s))
        timeline += sorted([*stage.computed, *(i for i in ends if i.end_s > i.start_s)], key=lambda i: i.start_s)
    timeline += [
        Interval(m.sender, "message", m.micro_batch, m.sent.start_s, m.taken.end_s, m.payload) for m in messages
    ]
    begin_s = min((interval.start_s for interval in timeline), default=0.0)
    return tuple(i._replace(start_s=i.start_s - begin_s, end_s=i.end_s - begin_s) for i in timeline)


def _stage(index: int, stream: Stream, marks: Sequence[Marks]) -> _Stage:
    instructions, now_s = iter(stream), sum(seconds for _, seconds in marks[0])
    found = _Stage([], {})
    for ran in marks[1:]:
        instruction = None if ran[0][0] in _OF_NO_MICRO_BATCH else next(instructions)
        start_s = now_s
        for kind, same in groupby(ran, key=lambda mark: mark[0]):
            begin_s, now_s = now_s, now_s + sum(seconds for _, seconds in same)
            if kind in _KINDS and now_s > begin_s:
                # What a backward that runs whole finds undone belongs to earlier micro-batches.
                is_own = instruction is not None and _COMPUTES.get(instruction.op) == kind
                micro_batch = instruction.micro_batch if instruction is not None and is_own else -1
                found.computed.append(Interval(index, _KINDS[kind], micro_batch, begin_s, now_s))
        if instruction is not None and instruction.op not in _COMPUTES:
            found.transfers[instruction] = _Span(start_s, now_s)
    return found


def _messages(stages: Sequence[_Stage]) -> Iterator[_Message]:
    """All that were sent; a stage of frozen layers alone, which computes no backward, gets no gradient."""
    for sender, stage in enumerate(stages):
        for (op, m), sent in stage.transfers.items():
            if op is Op.SEND_ACTIVATION:
                taken = stages[sender + 1].transfers[Instruction(Op.RECV_ACTIVATION, m)]
                yield _Message("activation", sender, sender + 1, m, sent, taken)
            elif op is Op.SEND_GRADIENT and _has_backward(stages[sender - 1], m):
                taken = stages[sender - 1].transfers[Instruction(Op.RECV_GRADIENT, m)]
                yield _Message("gradient", sender, sender - 1, m, sent, taken)


def _has_backward(stage: _Stage, micro_batch: int) -> bool:
    return any(i.kind in ("backward", "weight") and i.micro_batch == micro_batch for i in stage.computed)


def _shift_s(stages: Sequence[_Stage], boundary: int) -> float:
    """By how much the clock behind a boundary is to be set forward; without gradients, activations take no time."""
    across = [m for m in _messages(stages) if min(m.sender, m.receiver) == boundary]
    least_s = -min(message.seconds for message in across if message.payload == "activation")
    most_s = min((message.seconds for message in across if message.payload == "gradient"), default=least_s)
    return (least_s + most_s) / 2


def _ends(message: _Message, stage: int) -> Iterator[Interval]:
    """What a stage does at its end of a message, if it has one."""
    number, payload = message.micro_batch, message.payload
    if stage == message.sender:
        yield Interval(stage, "send", number, *message.sent, payload)
    if stage == message.receiver:
        start_s, end_s = message.taken
        comes_s = min(max(start_s, message.sent.start_s), end_s)
        yield Interval(stage, "wait", number, start_s, comes_s, payload)
        yield Interval(stage, "recv", number, comes_s, end_s, payload)
