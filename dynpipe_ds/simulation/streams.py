"""The reference: run an order one instruction at a time, as the engine does.

A stage is one thread of work. A message has a channel: a boundary and a direction, and channels keep
their order. The result does not depend on which stage is looked at first, since a stage only ever waits
for one particular message (a Kahn network).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dynpipe_ds.schedule import Op, Order
from dynpipe_ds.simulation.outcome import Counted, Held, Interval, Kind, Payload, Simulation, account
from dynpipe_ds.simulation.workload import Workload

_SENDS = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
_KINDS: dict[Op, Kind] = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_WEIGHT: "weight"}
Channel = tuple[int, Payload]


def run_order(workload: Workload, order: Order, *, timeline: bool = False) -> Simulation:
    """Run every stage's instructions with the dependencies of its messages.

    Raises:
        ValueError: when the order is of another size, or its stages don't fit together: one waits for ever, or gets
            another micro-batch than it expects.
    """
    sizes = [(of.num_stages, of.num_micro_batches) for of in (order, workload)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            "an order of {} stages and {} micro-batches for a workload of {} and {}: make one for this workload, "
            "with order_of".format(*sizes[0], *sizes[1])
        )
    run = _Run(workload, order, timeline)
    run.to_the_end()
    return run.outcome()


class _Task(NamedTuple):
    """One computation.

    Attributes:
        seconds: how long it takes.
        held: micro-batches that the stage holds more after it.
        held_bytes: bytes likewise.
    """

    seconds: float
    held: int
    held_bytes: int


class _Stage:
    """One stage's clock and accounts."""

    def __init__(self, index: int, order: Order, workload: Workload, keep: bool) -> None:
        self.index, self.stream, self.position = index, order.stages[index], 0
        self.tasks = _tasks(workload, index, order.split(index))
        self.clock_s = self.busy_s = self.waiting_s = self.transfer_s = 0.0
        self.fill_s = self.compute_end_s = 0.0
        self.waiting_until_end_s = self.transfer_until_end_s = 0.0  # up to the last computation
        self.started = False
        self.held = self.peak_held = self.held_bytes = self.peak_bytes = 0
        self.intervals: list[Interval] | None = [] if keep else None

    def compute(self, op: Op, micro_batch: int) -> None:
        task = self.tasks[op][micro_batch]
        if not self.started:
            self.started, self.fill_s = True, self.clock_s
            self.waiting_s = self.transfer_s = 0.0
        self.held += task.held
        self.held_bytes += task.held_bytes
        self.peak_held, self.peak_bytes = max(self.peak_held, self.held), max(self.peak_bytes, self.held_bytes)
        start_s = self.clock_s
        self.clock_s += task.seconds
        self.busy_s += task.seconds
        self.compute_end_s = self.clock_s
        self.waiting_until_end_s, self.transfer_until_end_s = self.waiting_s, self.transfer_s
        self.note(_KINDS[op], micro_batch, start_s, self.clock_s)

    def transfer(self, kind: Kind, micro_batch: int, start_s: float, end_s: float, payload: Payload) -> None:
        """Wait until a transfer starts and take part in it."""
        self.note("wait", micro_batch, self.clock_s, start_s, payload)
        self.note(kind, micro_batch, start_s, end_s, payload)
        self.waiting_s += start_s - self.clock_s
        self.transfer_s += end_s - start_s
        self.clock_s = end_s

    def note(self, kind: Kind, micro_batch: int, start_s: float, end_s: float, payload: Payload = "") -> None:
        if self.intervals is not None and end_s > start_s:
            self.intervals.append(Interval(self.index, kind, micro_batch, start_s, end_s, payload))


def _tasks(workload: Workload, stage: int, split: frozenset[int]) -> dict[Op, list[_Task]]:
    """What a stage computes, by micro-batch."""
    forward_s, whole_s, input_s, weight_s = workload.stage_seconds(stage)
    activation_bytes, weight_bytes = workload.activation_bytes[stage], workload.weight_bytes[stage]
    inputs = _alike(input_s, 0, weight_bytes - activation_bytes)
    whole = _alike(whole_s, -1, -activation_bytes)
    return {
        Op.FORWARD: _alike(forward_s, 1, activation_bytes),
        Op.BACKWARD: [inputs[m] if m in split else task for m, task in enumerate(whole)],
        Op.BACKWARD_WEIGHT: _alike(weight_s, -1, -weight_bytes),
    }


def _alike(seconds: list[float], held: int, held_bytes: int) -> list[_Task]:
    made = {each: _Task(each, held, held_bytes) for each in dict.fromkeys(seconds)}
    return [made[each] for each in seconds]


class _Run:
    """All stages, and the messages between them."""

    def __init__(self, workload: Workload, order: Order, keep: bool) -> None:
        self.workload = workload
        self.stages = [_Stage(s, order, workload, keep) for s in range(order.num_stages)]
        self.posted: dict[Channel, _Stage] = {}  # who waits for a message
        self.sent: dict[Channel, deque[tuple[int, float, float]]] = {}  # not yet received
        self.wire_free_s: dict[Channel, float] = {}
        self.messages: list[Interval] | None = [] if keep else None
        self.ready = deque(self.stages)
        self.link_s: dict[Op, list[list[float]]] = {
            Op.SEND_ACTIVATION: workload.activation_link_s.tolist(),
            Op.SEND_GRADIENT: workload.gradient_link_s.tolist(),
        }

    def to_the_end(self) -> None:
        while self.ready:
            self._advance(self.ready.popleft())
        for stage in self.stages:
            if stage.position < len(stage.stream):
                op, micro_batch = stage.stream[stage.position]
                raise ValueError(
                    f"stage {stage.index} waits for ever in {op.name.lower()} of micro-batch {micro_batch}: "
                    "the streams of its neighbours have no matching instruction in time"
                )

    def _advance(self, stage: _Stage) -> None:
        """Run a stage until it has to wait for a message or is done."""
        while stage.position < len(stage.stream):
            op, micro_batch = stage.stream[stage.position]
            if op <= Op.BACKWARD_WEIGHT:
                stage.compute(op, micro_batch)
            elif not self._transfer(stage, op, micro_batch):
                return
            stage.position += 1

    def _transfer(self, stage: _Stage, op: Op, micro_batch: int) -> bool:
        """Carry out one end of a message; False if the stage has to wait."""
        forwards = op in (Op.SEND_ACTIVATION, Op.RECV_ACTIVATION)
        boundary = stage.index if op in (Op.SEND_ACTIVATION, Op.RECV_GRADIENT) else stage.index - 1
        if not forwards and boundary < self.workload.frozen_boundaries:
            return True
        channel: Channel = (boundary, "activation" if forwards else "gradient")
        if op in _SENDS:
            self._send(stage, op, micro_batch, channel)
            return True
        return self._receive(stage, micro_batch, channel)

    def _send(self, stage: _Stage, op: Op, micro_batch: int, channel: Channel) -> None:
        depart_s = max(self.wire_free_s.get(channel, 0.0), stage.clock_s)
        arrive_s = depart_s + self._link_seconds(op, channel[0], micro_batch)
        self.wire_free_s[channel] = arrive_s
        self._note_message(stage, micro_batch, depart_s, arrive_s, channel[1])
        self.sent.setdefault(channel, deque()).append((micro_batch, depart_s, arrive_s))
        if (receiver := self.posted.pop(channel, None)) is not None:
            self.ready.append(receiver)

    def _receive(self, stage: _Stage, micro_batch: int, channel: Channel) -> bool:
        if not self.sent.get(channel):
            self.posted[channel] = stage
            return False
        sent, depart_s, arrive_s = self.sent[channel].popleft()
        _check_same(channel, micro_batch, sent)
        start_s, end_s = max(stage.clock_s, depart_s), max(stage.clock_s, arrive_s)
        stage.transfer("recv", micro_batch, start_s, end_s, channel[1])
        return True

    def _note_message(
        self, sender: _Stage, micro_batch: int, depart_s: float, arrive_s: float, payload: Payload
    ) -> None:
        if self.messages is not None:
            self.messages.append(Interval(sender.index, "message", micro_batch, depart_s, arrive_s, payload))

    def _link_seconds(self, send: Op, boundary: int, micro_batch: int) -> float:
        values = self.link_s[send][boundary]
        return values[micro_batch] if len(values) > 1 else values[0]

    def outcome(self) -> Simulation:
        stages, timeline = self.stages, list[Interval]()
        for stage, step_s in zip(stages, self.workload.step_s.tolist(), strict=True):
            stage.note("step", -1, stage.clock_s, stage.clock_s + step_s)
            timeline += stage.intervals or ()
        timeline += sorted(self.messages or (), key=lambda message: message.start_s)
        counted = [
            Counted(
                stage.busy_s, stage.fill_s, stage.waiting_until_end_s, stage.transfer_until_end_s,
                stage.compute_end_s, stage.clock_s,
            )
            for stage in stages
        ]
        held = [Held(stage.peak_held, stage.peak_bytes) for stage in stages]
        return account(self.workload, counted, held, tuple(timeline))


def _check_same(channel: Channel, expected: int, got: int) -> None:
    if expected != got:
        raise ValueError(
            f"{channel[1]} over boundary {channel[0]}: micro-batch {got} meets micro-batch {expected}; the "
            "streams of both stages must send and receive in the same order"
        )
