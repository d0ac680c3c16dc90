"""Stages as threads of one process, and wires between them that keep NCCL's rule to the letter.

The operations of a communicator run in the order in which each member posted them: a send, and a receive, begin when
all that the rank posted before on the same communicator is through, and need each other. When all stages wait, nothing
can go on any more: that is found at once, and raised in each of them.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynpipe_ds.messages.channels import Channels
from dynpipe_ds.messages.crossing import Awaited, Crossing, Links, Passage, Told
from dynpipe_ds.messages.traffic import SENT, TAKEN, traffic_of
from dynpipe_ds.planning import plan_order
from dynpipe_ds.schedule import Instruction, Op, Order
from dynpipe_ds.simulation import Workload

CPU = torch.device("cpu")
Shape = Callable[[int, int], tuple[int, ...]]
"""Of what a stage puts out for a micro-batch."""


class Deadlock(RuntimeError):
    """All stages wait for each other."""


class _Operation:
    def __init__(self, fabric: Fabric, peer: int, sends: bool, row: Tensor) -> None:
        self.fabric, self.peer, self.sends, self.row, self.is_done = fabric, peer, sends, row, False

    def wait(self) -> None:
        self.fabric.wait(self)


class Fabric:
    """All wires.

    Args:
        num_stages: S; each runs in a thread.
        communicator: that a message from one stage to another goes by; by default each ordered pair has its own.
    """

    def __init__(self, num_stages: int, communicator: Callable[[int, int], Hashable] = lambda a, b: (a, b)) -> None:
        self.communicator = communicator
        self._posted: dict[tuple[Hashable, int], deque[_Operation]] = {}
        self._changed = threading.Condition()
        self._running, self._is_stuck = num_stages, False
        self._awaited: list[_Operation] = []

    def post(self, rank: int, operation: _Operation) -> _Operation:
        """Add to what a rank does on a communicator, and let all run that can."""
        with self._changed:
            ends = (rank, operation.peer) if operation.sends else (operation.peer, rank)
            name = self.communicator(*ends)
            self._queue(name, rank).append(operation)
            while self._match(name, *ends) or self._match(name, *reversed(ends)):
                self._changed.notify_all()
            return operation

    def wait(self, operation: _Operation) -> None:
        """Block until an operation is through."""
        with self._changed:
            self._awaited.append(operation)
            self._look()
            while not operation.is_done and not self._is_stuck:
                self._changed.wait()
            self._awaited.remove(operation)
            if not operation.is_done:
                raise Deadlock("all stages wait")

    def end(self) -> None:
        """One stage is through."""
        with self._changed:
            self._running -= 1
            self._look()

    def _queue(self, name: Hashable, rank: int) -> deque[_Operation]:
        return self._posted.setdefault((name, rank), deque())

    def _match(self, name: Hashable, source: int, destination: int) -> bool:
        sending, receiving = self._queue(name, source), self._queue(name, destination)
        if not (sending and receiving):
            return False
        send, receive = sending[0], receiving[0]
        if not (send.sends and not receive.sends and send.peer == destination and receive.peer == source):
            return False
        receive.row.copy_(send.row)  # only now: who changed it meanwhile is found out; so is another size
        for queue in (sending, receiving):
            queue.popleft().is_done = True
        return True

    def _look(self) -> None:
        """Whether every stage that is not through waits for something that is not done."""
        if self._running and sum(not operation.is_done for operation in self._awaited) == self._running:
            self._is_stuck = True
            self._changed.notify_all()


class FabricWire(NamedTuple):
    """Between one stage and another."""

    fabric: Fabric
    rank: int
    peer: int

    def send(self, row: Tensor) -> _Operation:
        return self.fabric.post(self.rank, _Operation(self.fabric, self.peer, True, row))

    def receive(self, row: Tensor) -> _Operation:
        row.fill_(0xEE)
        return self.fabric.post(self.rank, _Operation(self.fabric, self.peer, False, row))


class Batch(NamedTuple):
    """What all stages of a test run.

    Attributes:
        order: what they run.
        shape: of what they put out.
        wants: whether gradients come back over the boundary behind a stage.
        is_dynamic: whether every micro-batch is told about.
        delay_s: longest pause before an instruction.
        dropped_by: the stage that gives the batch up after its first computation, if any does.
    """

    order: Order
    shape: Shape = lambda stage, micro_batch: (3, 2 + stage)
    wants: Callable[[int], bool] = lambda stage: True
    is_dynamic: bool = False
    delay_s: float = 0.0
    dropped_by: int | None = None


class StageRun:
    """One stage: sends what tells where it is from, checks what it gets, and that no bound is passed.

    Args:
        channels: its own.
        stage: index.
    """

    def __init__(self, channels: Channels, stage: int) -> None:
        self.channels, self.stage = channels, stage
        self.refusals: list[str] = []
        self.most_posted = 0
        self.knew: list[bool] = []

    def run(self, batch: Batch, seed: int = 0) -> None:
        self.batch, self.links, pauses = batch, Links(always_told=batch.is_dynamic), random.Random(seed)
        self.traffic = traffic_of(batch.order, self.stage)
        self.channels.begin(self.traffic, self.links, self.refusals.append)
        for op, micro_batch in batch.order.stages[self.stage]:
            if batch.delay_s:
                time.sleep(pauses.uniform(0, batch.delay_s) * (pauses.random() < 0.5))
            if op in SENT or op in TAKEN:
                message = self.channels.turn(op)
                assert message.micro_batch == micro_batch
                getattr(self, op.name.lower())(message)
            elif batch.dropped_by == self.stage:
                self.channels.drop()
            for other, out in self.channels.out.items():
                assert out.num_under_way <= self.traffic.most[other]
            self.most_posted = max([self.most_posted, *(into.num_posted for into in self.channels.into.values())])
        self.channels.finish()
        self.knew.append(self.channels.is_dropped)

    def send_activation(self, message: Any) -> None:
        links, m = self.links, message.micro_batch
        value = content(self.stage, m, self.batch.shape).requires_grad_(self.batch.wants(self.stage))
        crossing, tensors = Crossing.of(value)
        is_told = links.tells(links.outputs)
        links.outputs = crossing if is_told else links.outputs
        self.channels.out[self.stage + 1].send(message, Told(crossing) if is_told else None, tensors)
        value.data.fill_(-1)  # it may change at once
        links.awaited[m] = Awaited(bool(crossing.wanting(tensors)), is_told)
        self.channels.into[self.stage + 1].post_ahead()

    def recv_activation(self, message: Any) -> None:
        m, into = message.micro_batch, self.channels.into[self.stage - 1]
        crossing, is_told, [value] = into.take(message)
        assert torch.equal(value, content(self.stage - 1, m, self.batch.shape))
        self.links.received[m] = Passage(crossing.wanting([value]), is_told)

    def send_gradient(self, message: Any) -> None:
        passage, m = self.links.received.pop(message.micro_batch), message.micro_batch
        if not passage.wanting:
            return
        gradient = -content(self.stage - 1, m, self.batch.shape)
        told = None if passage.is_told else self.links.input_gradients
        found = Crossing.of_gradients([gradient], [True])
        if told is None:
            self.links.input_gradients = found
        self.channels.out[self.stage - 1].send(message, Told(found) if told is None else None, [gradient])
        gradient.fill_(-2)

    def recv_gradient(self, message: Any) -> None:
        m, into = message.micro_batch, self.channels.into[self.stage + 1]
        if not self.links.awaited[m].comes:
            into.skip(message)
            return
        _, _, [gradient] = into.take(message)
        assert torch.equal(gradient, -content(self.stage, m, self.batch.shape))


def content(stage: int, micro_batch: int, shape: Shape) -> Tensor:
    """What a stage puts out for a micro-batch."""
    size = shape(stage, micro_batch)
    return torch.arange(math.prod(size), dtype=torch.float32).view(size) + 1000.0 * stage + 100.0 * micro_batch


def run_stages(batches: Sequence[Batch], fabric: Fabric, seed: int = 0) -> list[StageRun]:
    """Run batches, one after the other, on all stages.

    Raises:
        Deadlock: if all stages wait.
    """
    num_stages = batches[0].order.num_stages
    runs = [
        StageRun(Channels({o: FabricWire(fabric, s, o) for o in (s - 1, s + 1) if 0 <= o < num_stages}, CPU, s), s)
        for s in range(num_stages)
    ]
    failures: list[Exception] = []

    def work(run: StageRun) -> None:
        try:
            for number, batch in enumerate(batches):
                run.run(batch, seed + 1000 * number + run.stage)
        except Exception as error:
            failures.append(error)
        finally:
            fabric.end()

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, Deadlock)), failures[0])
    return runs


def drawn(draw: random.Random, num_stages: int, num_micro_batches: int) -> Order:
    """Any order that could run: each stage takes what is there, in whatever sequence, and holds any number."""
    streams: list[list[Instruction]] = [[] for _ in range(num_stages)]
    forwards = [set(range(num_micro_batches)), *(set[int]() for _ in range(num_stages - 1))]
    backwards = [set[int]() for _ in range(num_stages)]
    last = num_stages - 1
    while any(forwards) or any(backwards):
        stage = draw.choice([s for s in range(num_stages) if forwards[s] or backwards[s]])
        is_forward = bool(forwards[stage]) and (not backwards[stage] or draw.random() < 0.5)
        m = draw.choice(sorted((forwards if is_forward else backwards)[stage]))
        (forwards if is_forward else backwards)[stage].remove(m)
        gets, runs, sends = (
            (stage > 0 and Op.RECV_ACTIVATION, Op.FORWARD, stage < last and Op.SEND_ACTIVATION) if is_forward else
            (stage < last and Op.RECV_GRADIENT, Op.BACKWARD, stage > 0 and Op.SEND_GRADIENT)
        )
        streams[stage] += [Instruction(Op(op), m) for op in (gets, runs, sends) if op is not False]
        if is_forward:
            (backwards if stage == last else forwards)[stage if stage == last else stage + 1].add(m)
        elif stage:
            backwards[stage - 1].add(m)
    return Order(num_micro_batches, tuple(tuple(stream) for stream in streams))


def planned(num_micro_batches: int, num_stages: int) -> Order:
    """What the planner makes of some stages that differ, with W's; the same wherever it is asked."""
    draw = random.Random(1000 * num_micro_batches + num_stages)
    forward_s, input_s, weight_s = ([draw.uniform(0.5, 2.0) for _ in range(num_stages)] for _ in range(3))
    backward_s = [a + b for a, b in zip(input_s, weight_s, strict=True)]
    caps = [num_stages + draw.randint(0, num_micro_batches)] * num_stages
    workload = Workload(
        forward_s, backward_s, num_micro_batches, weight_s=weight_s, activation_bytes=[1] * num_stages,
        activation_link_s=draw.uniform(0.0, 0.5), gradient_link_s=draw.uniform(0.0, 0.5),
    )
    return plan_order(workload, caps).order
