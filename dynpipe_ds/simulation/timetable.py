"""An order that is timed again and again: who waits for whom is worked out once.

Which message a stage waits for next is fixed by the order, so all instructions can be put into one sequence in which
each comes after those that it needs. With other seconds the same sequence is gone through once, without any search:
several times faster than :func:`~dynpipe_ds.simulation.streams.run_order`, and the same to the bit.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property

from dynpipe_ds.schedule import Op, Order
from dynpipe_ds.simulation.outcome import Counted, Held, Simulation, account
from dynpipe_ds.simulation.workload import Workload, by_micro_batch

_COMPUTE, _SEND, _RECEIVE = range(3)
_FORWARD, _WHOLE, _INPUT, _WEIGHT = range(4)  # tables of a stage


class Timetable:
    """The instructions of all stages in one sequence.

    Args:
        order: what every stage runs.
        frozen_boundaries: over how many boundaries, from the first on, no gradients go.

    Raises:
        ValueError: when a stage waits for ever.
    """

    def __init__(self, order: Order, frozen_boundaries: int = 0) -> None:
        self.order, self.frozen_boundaries = order, frozen_boundaries
        self._split = [order.split(stage) for stage in range(order.num_stages)]
        self._sequence = list(self._in_sequence())

    def makespan_s(self, workload: Workload) -> float:
        """How long a batch takes.

        Args:
            workload: of as many stages, micro-batches and frozen boundaries.

        Returns:
            Seconds of all forwards and backwards.

        Raises:
            ValueError: for another one.
        """
        self._check(workload)
        num_stages = workload.num_stages
        seconds, links_s = _seconds(workload), _links_s(workload)
        clocks_s, wires_s = [0.0] * num_stages, [0.0] * (2 * (num_stages - 1))
        arrive_s = [0.0] * len(links_s)
        for code, where, index, wire in self._sequence:
            if code == _COMPUTE:
                clocks_s[where] += seconds[index]
            elif code == _SEND:
                at_s = clocks_s[where]
                if wires_s[wire] > at_s:
                    at_s = wires_s[wire]
                wires_s[wire] = arrive_s[index] = at_s + links_s[index]
            elif arrive_s[index] > clocks_s[where]:
                clocks_s[where] = arrive_s[index]
        return max(clocks_s)

    def simulation(self, workload: Workload) -> Simulation:
        """A batch in full.

        Args:
            workload: of as many stages, micro-batches and frozen boundaries.

        Returns:
            What :func:`~dynpipe_ds.simulation.simulate` gives, to the bit.

        Raises:
            ValueError: for another one.
        """
        self._check(workload)
        num_stages, links_s = workload.num_stages, _links_s(workload)
        seconds, arrive_s, depart_s = _seconds(workload), [0.0] * len(links_s), [0.0] * len(links_s)
        clocks_s, busy_s, waiting_s, travelling_s, fills_s = ([0.0] * num_stages for _ in range(5))
        has_begun, wires_s = [False] * num_stages, [0.0] * (2 * (num_stages - 1))
        until_end = [(0.0, 0.0, 0.0)] * num_stages  # of the last computation: its waits, those for messages, its end
        for code, where, index, wire in self._sequence:
            clock_s = clocks_s[where]
            if code == _COMPUTE:
                if not has_begun[where]:
                    has_begun[where], fills_s[where] = True, clock_s
                    waiting_s[where] = travelling_s[where] = 0.0
                clocks_s[where] = clock_s = clock_s + seconds[index]
                busy_s[where] += seconds[index]
                until_end[where] = waiting_s[where], travelling_s[where], clock_s
            elif code == _SEND:
                depart_s[index] = at_s = max(wires_s[wire], clock_s)
                wires_s[wire] = arrive_s[index] = at_s + links_s[index]
            else:
                begin_s = max(clock_s, depart_s[index])
                clocks_s[where] = max(clock_s, arrive_s[index])
                waiting_s[where] += begin_s - clock_s
                travelling_s[where] += clocks_s[where] - begin_s
        counted = [
            Counted(busy, fill, *until, clock)
            for busy, fill, until, clock in zip(busy_s, fills_s, until_end, clocks_s, strict=True)
        ]
        most = [max(whole + half for whole, half in found) for found in self._held]
        return account(workload, counted, list(map(Held, most, self.peak_bytes(workload))))

    def peak_bytes(self, workload: Workload) -> tuple[int, ...]:
        """What stages hold.

        Args:
            workload: as above.

        Returns:
            Most bytes of activations that every stage holds.

        Raises:
            ValueError: for another one.
        """
        self._check(workload)
        sizes = zip(self._held, workload.activation_bytes, workload.weight_bytes, strict=True)
        return tuple(max(whole * held + half * waiting for whole, half in found) for found, held, waiting in sizes)

    @cached_property
    def _held(self) -> list[list[tuple[int, int]]]:
        """Of each stage how many micro-batches it holds at a time: before their backward, and between its halves."""
        found = []
        for stage, stream in enumerate(self.order.stages):
            split, whole, half, most = self._split[stage], 0, 0, dict[int, int]()
            for op, m in stream:
                if op is Op.FORWARD:
                    whole += 1
                elif op is Op.BACKWARD:
                    whole -= 1
                    half += m in split
                elif op is Op.BACKWARD_WEIGHT:
                    half -= 1
                if whole > most.get(half, -1):
                    most[half] = whole
            found.append([(whole, half) for half, whole in most.items()])
        return found

    def _check(self, workload: Workload) -> None:
        order = self.order
        wanted = order.num_stages, order.num_micro_batches, self.frozen_boundaries
        given = workload.num_stages, workload.num_micro_batches, workload.frozen_boundaries
        if wanted != given:
            raise ValueError(
                "a timetable of {} stages, {} micro-batches and {} frozen boundaries for a workload of {}, {} and {}: "
                "make one for this workload".format(*wanted, *given)
            )

    def _in_sequence(self) -> list[tuple[int, int, int, int]]:
        """What to do, by which stage, the number of its seconds or message, and of the wire."""
        order, count = self.order, self.order.num_micro_batches
        found: list[tuple[int, int, int, int]] = []
        positions, sent = [0] * order.num_stages, set[int]()
        waiting: dict[int, int] = {}  # who waits for a message
        ready = deque(range(order.num_stages))
        while ready:
            stage = ready.popleft()
            stream = order.stages[stage]
            while positions[stage] < len(stream):
                op, m = stream[positions[stage]]
                if op <= Op.BACKWARD_WEIGHT:
                    found.append((_COMPUTE, stage, (4 * stage + self._table(stage, op, m)) * count + m, 0))
                elif (wire := self._wire(stage, op)) is not None:
                    message = wire * count + m
                    if op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
                        found.append((_SEND, stage, message, wire))
                        sent.add(message)
                        if message in waiting:
                            ready.append(waiting.pop(message))
                    elif message not in sent:
                        waiting[message] = stage
                        break
                    else:
                        found.append((_RECEIVE, stage, message, wire))
                positions[stage] += 1
        for stage, position in enumerate(positions):
            if position < len(order.stages[stage]):
                raise ValueError(f"stage {stage} waits for ever in {order.stages[stage][position]}")
        return found

    def _table(self, stage: int, op: Op, micro_batch: int) -> int:
        if op is Op.BACKWARD:
            return _INPUT if micro_batch in self._split[stage] else _WHOLE
        return _FORWARD if op is Op.FORWARD else _WEIGHT

    def _wire(self, stage: int, op: Op) -> int | None:
        """The wire of a message: those of activations come first; ``None``: nothing is sent there."""
        boundary = stage if op in (Op.SEND_ACTIVATION, Op.RECV_GRADIENT) else stage - 1
        if op in (Op.SEND_ACTIVATION, Op.RECV_ACTIVATION):
            return boundary
        return None if boundary < self.frozen_boundaries else self.order.num_stages - 1 + boundary


def _seconds(workload: Workload) -> list[float]:
    """Of all computations, by stage, table and micro-batch."""
    return [each for s in range(workload.num_stages) for table in workload.stage_seconds(s) for each in table]


def _links_s(workload: Workload) -> list[float]:
    """Of all messages, by wire and micro-batch."""
    links = (workload.activation_link_s, workload.gradient_link_s)
    return [each for table in links for row in table for each in by_micro_batch(row, workload.num_micro_batches)]
