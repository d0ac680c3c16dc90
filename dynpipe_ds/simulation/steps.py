"""The loops of a timetable: all instructions of an order into one sequence, and through that again and again.

On lists or arrays, see :mod:`~dynpipe_ds.simulation.compiled`.
"""

from __future__ import annotations

from typing import NamedTuple

from dynpipe_ds.schedule.order import Op
from dynpipe_ds.simulation.compiled import Loop

COMPUTE, SEND, RECEIVE, NOTHING = range(4)

_FORWARD, _BACKWARD, _WEIGHT = int(Op.FORWARD), int(Op.BACKWARD), int(Op.BACKWARD_WEIGHT)


class Streams(NamedTuple):
    """The instructions of all stages, and what each kind of them does.

    Attributes:
        ops: of one stage after the other.
        micro_batches: the same.
        starts: where each stage's begin, and the end, ``(S + 1,)``.
        is_split: whether the backward of a micro-batch has two parts, ``(S, M)``.
        num_if_split: what the number of its seconds then is more.
        codes: what each kind does on each stage, ``(S, 7)``: compute, send, receive or nothing.
        numbers: of its first seconds or message.
        wires: that the message goes over.
    """

    ops: list[int]
    micro_batches: list[int]
    starts: list[int]
    is_split: list[list[bool]]
    num_if_split: int
    codes: list[list[int]]
    numbers: list[list[int]]
    wires: list[list[int]]


class Steps(NamedTuple):
    """What is done, one after the other, each after what it needs.

    Attributes:
        codes: compute, send or receive.
        stages: by whom.
        numbers: of the seconds, or of the message.
        wires: that the message goes over.
    """

    codes: list[int]
    stages: list[int]
    numbers: list[int]
    wires: list[int]


@Loop
def put_in_sequence(
    streams: Streams, positions: list[int], is_sent: list[bool], who_waits: list[int], steps: Steps
) -> int:
    """Find a sequence.

    Args:
        streams: all instructions.
        positions: of each stage's next instruction; to be written.
        is_sent: whether a message is; to be written.
        who_waits: for a message, -1 if nobody does; to be written.
        steps: to be written.

    Returns:
        How many steps there are. A stage whose position is not at its end waits for ever.
    """
    num_steps, num_seen = 0, 0
    ready = list(range(len(streams.starts) - 1))
    while num_seen < len(ready):
        stage = ready[num_seen]
        num_seen += 1
        position, is_waiting = positions[stage], False
        while position < streams.starts[stage + 1] and not is_waiting:
            op, micro_batch = streams.ops[position], streams.micro_batches[position]
            code, number = streams.codes[stage][op], streams.numbers[stage][op] + micro_batch
            if code == SEND:
                is_sent[number] = True
                if who_waits[number] >= 0:
                    ready.append(who_waits[number])
            elif code == RECEIVE and not is_sent[number]:
                who_waits[number] = stage
                is_waiting = True
            elif op == _BACKWARD and streams.is_split[stage][micro_batch]:
                number += streams.num_if_split
            if not is_waiting:
                position += 1
                if code != NOTHING:
                    steps.codes[num_steps] = code
                    steps.stages[num_steps] = stage
                    steps.numbers[num_steps] = number
                    steps.wires[num_steps] = streams.wires[stage][op]
                    num_steps += 1
        positions[stage] = position
    return num_steps


@Loop
def run_steps(
    steps: Steps, seconds: list[float], links_s: list[float], clocks_s: list[float], wires_s: list[float],
    arrive_s: list[float],
) -> float:
    """Go through all steps.

    Args:
        steps: in sequence.
        seconds: of all computations.
        links_s: of all messages.
        clocks_s: of all stages, 0; to be written.
        wires_s: when the newest message of a wire comes, 0; to be written.
        arrive_s: when each message comes; to be written.

    Returns:
        When the last stage is done.
    """
    for code, stage, number, wire in zip(steps.codes, steps.stages, steps.numbers, steps.wires):  # noqa: B905 (Numba)
        if code == COMPUTE:
            clocks_s[stage] += seconds[number]
        elif code == SEND:
            at_s = clocks_s[stage]
            if wires_s[wire] > at_s:
                at_s = wires_s[wire]
            wires_s[wire] = arrive_s[number] = at_s + links_s[number]
        elif arrive_s[number] > clocks_s[stage]:
            clocks_s[stage] = arrive_s[number]
    return max(clocks_s)


@Loop
def find_held(streams: Streams, most: list[list[int]]) -> None:
    """How many micro-batches stages hold at a time.

    Args:
        streams: all instructions.
        most: of each stage, by how many of them are between the parts of their backward, how many are before it,
            ``(S, M + 1)``; -1: never. To be written.
    """
    for stage in range(len(streams.starts) - 1):
        whole = half = 0
        for position in range(streams.starts[stage], streams.starts[stage + 1]):
            op = streams.ops[position]
            if op == _FORWARD:
                whole += 1
            elif op == _BACKWARD:
                whole -= 1
                if streams.is_split[stage][streams.micro_batches[position]]:
                    half += 1
            elif op == _WEIGHT:
                half -= 1
            if whole > most[stage][half]:
                most[stage][half] = whole
