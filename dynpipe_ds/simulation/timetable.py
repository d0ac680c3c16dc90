"""An order that is timed again and again: who waits for whom is worked out once.

Which message a stage waits for next is fixed by the order, so all instructions can be put into one sequence in which
each comes after those that it needs. With other seconds the same sequence is gone through once, without any search:
several times faster than :func:`~dynpipe_ds.simulation.streams.run_order`, and the same to the bit.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain

import numpy as np

from dynpipe_ds.schedule import Op, Order
from dynpipe_ds.simulation.compiled import given, is_compiled
from dynpipe_ds.simulation.outcome import Counted, Held, Simulation, account
from dynpipe_ds.simulation.steps import (
    COMPUTE,
    NOTHING,
    RECEIVE,
    SEND,
    Steps,
    Streams,
    find_held,
    put_in_sequence,
    run_steps,
)
from dynpipe_ds.simulation.workload import FloatArray, IntArray, Workload

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
        self._steps = self._in_sequence()

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
        num_stages, links_s = workload.num_stages, _links_s(workload)
        clocks_s, wires_s, arrive_s = (
            given(np.zeros(size)) for size in (num_stages, 2 * (num_stages - 1), len(links_s))
        )
        steps = Steps(*self._steps) if is_compiled() else self._steps_as_lists
        return run_steps(steps, given(_seconds(workload)), given(links_s), clocks_s, wires_s, arrive_s)

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
        num_stages, links_s = workload.num_stages, _links_s(workload).tolist()
        seconds, arrive_s, depart_s = _seconds(workload).tolist(), [0.0] * len(links_s), [0.0] * len(links_s)
        clocks_s, busy_s, waiting_s, travelling_s, fills_s = ([0.0] * num_stages for _ in range(5))
        has_begun, wires_s = [False] * num_stages, [0.0] * (2 * (num_stages - 1))
        until_end = [(0.0, 0.0, 0.0)] * num_stages  # of the last computation: its waits, those for messages, its end
        for code, where, index, wire in zip(*self._steps_as_lists, strict=True):
            clock_s = clocks_s[where]
            if code == COMPUTE:
                if not has_begun[where]:
                    has_begun[where], fills_s[where] = True, clock_s
                    waiting_s[where] = travelling_s[where] = 0.0
                clocks_s[where] = clock_s = clock_s + seconds[index]
                busy_s[where] += seconds[index]
                until_end[where] = waiting_s[where], travelling_s[where], clock_s
            elif code == SEND:
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
        most = (self._held + np.arange(self._held.shape[1])).max(axis=1, where=self._held >= 0, initial=0).tolist()
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
        held, between = (np.array(sizes)[:, None] for sizes in (workload.activation_bytes, workload.weight_bytes))
        num_bytes = self._held * held + np.arange(self._held.shape[1]) * between
        return tuple(num_bytes.max(axis=1, where=self._held >= 0, initial=0).tolist())

    @cached_property
    def _held(self) -> IntArray:
        """How many micro-batches a stage holds before their backward, by how many it holds between its parts."""
        most = given(np.full((self.order.num_stages, self.order.num_micro_batches + 1), -1))
        find_held(self._streams(), most)
        return np.array(most)

    def _check(self, workload: Workload) -> None:
        order = self.order
        wanted = order.num_stages, order.num_micro_batches, self.frozen_boundaries
        given = workload.num_stages, workload.num_micro_batches, workload.frozen_boundaries
        if wanted != given:
            raise ValueError(
                "a timetable of {} stages, {} micro-batches and {} frozen boundaries for a workload of {}, {} and {}: "
                "make one for this workload".format(*wanted, *given)
            )

    def _in_sequence(self) -> IntArray:
        """As of :class:`~dynpipe_ds.simulation.steps.Steps`: ``(4, N)``."""
        streams, count, num_stages = self._streams(), self.order.num_micro_batches, self.order.num_stages
        num_messages = 2 * (num_stages - 1) * count
        positions = given(np.array(streams.starts[:-1]))
        steps = Steps(*(given(np.zeros(len(streams.ops), dtype=np.int64)) for _ in range(4)))
        is_sent, who_waits = given(np.zeros(num_messages, dtype=np.bool_)), given(np.full(num_messages, -1))
        num_steps = put_in_sequence(streams, positions, is_sent, who_waits, steps)
        for stage, (position, end) in enumerate(zip(positions, streams.starts[1:], strict=True)):
            if position < end:
                raise ValueError(f"stage {stage} waits for ever in {self.order.stages[stage][position - end]}")
        return np.ascontiguousarray(np.array(steps)[:, :num_steps])

    @cached_property
    def _steps_as_lists(self) -> Steps:
        return Steps(*self._steps.tolist())

    def _streams(self) -> Streams:
        order, count = self.order, self.order.num_micro_batches
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(order.stages)), dtype=np.int64).reshape(-1, 2)
        starts = np.cumsum([0, *map(len, order.stages)])
        is_split = np.zeros((order.num_stages, count), dtype=np.bool_)
        for stage in range(order.num_stages):
            is_split[stage, list(order.split(stage))] = True
        kinds = np.array([self._kinds(stage) for stage in range(order.num_stages)]).transpose(2, 0, 1)
        codes, numbers, wires = (given(np.ascontiguousarray(table)) for table in kinds)
        ops, micro_batches = (given(np.ascontiguousarray(column)) for column in flat.T)
        return Streams(
            ops, micro_batches, given(starts), given(is_split), (_INPUT - _WHOLE) * count, codes, numbers, wires
        )

    def _kinds(self, stage: int) -> list[tuple[int, int, int]]:
        """Of each kind of instruction what it does, the number of its first seconds or message, and its wire."""
        count, gradients = self.order.num_micro_batches, self.order.num_stages - 1
        tables = ((Op.FORWARD, _FORWARD), (Op.BACKWARD, _WHOLE), (Op.BACKWARD_WEIGHT, _WEIGHT))
        found = {op: (COMPUTE, (4 * stage + table) * count, 0) for op, table in tables}
        for op, code, boundary in (
            (Op.SEND_ACTIVATION, SEND, stage), (Op.RECV_ACTIVATION, RECEIVE, stage - 1),
            (Op.SEND_GRADIENT, SEND, stage - 1), (Op.RECV_GRADIENT, RECEIVE, stage),
        ):  # fmt: skip
            is_gradient = op in (Op.SEND_GRADIENT, Op.RECV_GRADIENT)
            wire = boundary + is_gradient * gradients
            is_sent = not is_gradient or boundary >= self.frozen_boundaries
            found[op] = (code if is_sent else NOTHING, wire * count, wire)
        return [found[op] for op in Op]


def _seconds(workload: Workload) -> FloatArray:
    """Of all computations, by stage, table and micro-batch."""
    input_s = workload.backward_s + workload.split_s - workload.weight_s
    return _flat((workload.forward_s, workload.backward_s, input_s, workload.weight_s), workload)


def _links_s(workload: Workload) -> FloatArray:
    """Of all messages, by wire and micro-batch."""
    return np.concatenate([
        np.broadcast_to(table, (len(table), workload.num_micro_batches)).ravel()
        for table in (workload.activation_link_s, workload.gradient_link_s)
    ])


def _flat(tables: tuple[FloatArray, ...], workload: Workload) -> FloatArray:
    shape = workload.num_stages, workload.num_micro_batches
    return np.stack([np.broadcast_to(table, shape) for table in tables], axis=1).ravel()
