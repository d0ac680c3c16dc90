"""List scheduling: a batch runs on paper, and whenever a stage is free it chooses what to do next.

Forwards, backwards and weight gradients of a stage each go from the first micro-batch to the last; only how they
alternate is chosen. Sends are over at once, as in the engine. The run is an execution, so the order that it wrote down
can't deadlock, and takes no longer than the run did; less only where a stage had waited for what then did not help.

Nor can it where a stage trains after all that was thought to be frozen, since layers skipped all that was measured or
were thawed: a frozen stage ends a micro-batch, at no cost, after the next stage has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from dynpipe_ds.planning.runs import Places, Ran, Wires, Work, find_places, run_forwards
from dynpipe_ds.schedule import Instruction, Op, Order
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.compiled import given
from dynpipe_ds.simulation.workload import FloatArray


@dataclass(frozen=True)
class Policy:
    """What a stage prefers when it could do several things.

    Args:
        prefers_forwards: to backwards, or the reverse.
        patience: work that nobody waits for begins only if nothing else is known to come within this share of its
            seconds.
        depth: forwards that a stage may be ahead of its backwards, as a multiple of what it is under 1F1B. A stage that
            is far ahead is often in the middle of a forward when a gradient comes, which then comes late to all stages
            before it.
    """

    prefers_forwards: bool
    patience: float
    depth: float = inf


@dataclass(frozen=True, eq=False)
class Guide:
    """In which sequence stages would rather compute; what is not possible yet is overtaken.

    Args:
        places: of their computations.
        patience: how long a stage waits for what comes before in the sequence, as a share of the seconds of what it
            could do instead.
    """

    places: Places
    patience: float

    @classmethod
    def of(cls, ran: Ran, patience: float) -> Guide:
        """Guide by what ran.

        Args:
            ran: of all stages.
            patience: see the class.
        """
        num_stages, count = len(ran.num_ops), len(ran.whole[0])
        places = Places(*(given(np.zeros((num_stages, count + 1), dtype=np.int64)) for _ in range(3)))
        find_places(ran, count, places)
        return cls(places, patience)


@dataclass(frozen=True, eq=False)
class Listing:
    """What a run wrote down.

    Args:
        seconds: of the batch; infinite when the run was given up.
        table: what ran; the sequence of all computations has each after what it needs.
        num_computations: how many ran, of all stages.
    """

    seconds: float
    table: Ran
    num_computations: int

    @cached_property
    def ran(self) -> tuple[list[Op], ...]:
        """For every stage its forwards, backwards and weight gradients in sequence, each from the first micro-batch."""
        kinds = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT)
        return tuple(
            [kinds[op] for op in ops[:num_ops]] for ops, num_ops in zip(self.table.ops, self.table.num_ops, strict=True)
        )

    @cached_property
    def whole(self) -> tuple[frozenset[int], ...]:
        """For every stage the micro-batches with a backward in one part."""
        return tuple(frozenset(np.flatnonzero(row).tolist()) for row in self.table.whole)

    def is_as(self, other: Listing) -> bool:
        """Whether all stages ran the same in the same sequence.

        Args:
            other: of the same batch.
        """
        return np.array_equal(self.table.ops, other.table.ops) and np.array_equal(
            self.table.num_ops, other.table.num_ops
        )

    def order(self, num_micro_batches: int) -> Order:
        """The order as a value, with its messages: each leaves at once, and is received where it is needed.

        Args:
            num_micro_batches: M.
        """
        made = _instructions(num_micro_batches)
        last = len(self.ran) - 1
        streams = []
        for stage, (ran, whole) in enumerate(zip(self.ran, self.whole, strict=True)):
            around = _messages(is_first=stage == 0, is_last=stage == last)
            parts = {op: list(zip(*(made[each] for each in ops), strict=True)) for op, ops in around.items()}
            parts[Op.BACKWARD_WEIGHT] = [each for m, each in enumerate(parts[Op.BACKWARD_WEIGHT]) if m not in whole]
            counters = {op: iter(each) for op, each in parts.items()}
            streams.append(tuple(chain.from_iterable(map(next, map(counters.__getitem__, ran)))))
        return Order(num_micro_batches, tuple(streams))


def list_order(work: Work, preference: Policy | Guide, *, limit_s: float = inf) -> Listing:
    """Run one batch.

    Args:
        work: of all stages; each may hold at least what one micro-batch holds.
        preference: what stages prefer.
        limit_s: seconds beyond which the run is given up.

    Returns:
        What ran.
    """
    ran, patience = new_ran(work), float(preference.patience)
    if isinstance(preference, Guide):
        seconds, num_ran = run_forwards(
            work, True, preference.places, patience, False, inf, float(limit_s), ran, new_wires(work)
        )
    else:
        depth = float(preference.depth)
        seconds, num_ran = run_forwards(
            work, False, _no_places(), patience, preference.prefers_forwards, depth, float(limit_s), ran,
            new_wires(work),
        )
    return Listing(seconds, ran, num_ran)


_MOST_BYTES = 2**62  # machine code counts with 64 bits


@lru_cache(maxsize=4)
def _instructions(num_micro_batches: int) -> dict[Op, list[Instruction]]:
    return {op: [Instruction(op, m) for m in range(num_micro_batches)] for op in Op}


def _messages(*, is_first: bool, is_last: bool) -> dict[Op, tuple[Op, ...]]:
    """Each computation with the messages around it."""
    receive, send = (Op.RECV_ACTIVATION,) * (not is_first), (Op.SEND_ACTIVATION,) * (not is_last)
    receive_back, send_back = (Op.RECV_GRADIENT,) * (not is_last), (Op.SEND_GRADIENT,) * (not is_first)
    return {
        Op.FORWARD: (*receive, Op.FORWARD, *send),
        Op.BACKWARD: (*receive_back, Op.BACKWARD, *send_back),
        Op.BACKWARD_WEIGHT: (Op.BACKWARD_WEIGHT,),
    }


def work_of(workload: Workload, caps: Sequence[int]) -> Work:
    """What all stages of a batch have to do and may hold.

    Args:
        workload: seconds and bytes.
        caps: S most bytes of activations.
    """
    count, num_stages = workload.num_micro_batches, workload.num_stages
    tables = (workload.forward_s, workload.backward_s, workload.split_s, workload.weight_s)
    seconds = np.stack([np.broadcast_to(table, (num_stages, count)) for table in tables])
    links = link_tables(workload.activation_link_s, workload.gradient_link_s, count)
    return new_works(
        seconds[:, None], links, [workload.frozen_boundaries], workload.activation_bytes, workload.weight_bytes, caps,
    )[0]  # fmt: skip


def link_tables(activation_link_s: FloatArray, gradient_link_s: FloatArray, num_micro_batches: int) -> tuple[Any, Any]:
    """Seconds of messages as a :class:`~dynpipe_ds.planning.runs.Work` has them.

    Args:
        activation_link_s: ``(S - 1, 1 or M)``.
        gradient_link_s: the same.
        num_micro_batches: M.
    """
    there, back = (
        given(np.array(np.broadcast_to(table, (len(table), num_micro_batches))))
        for table in (activation_link_s, gradient_link_s)
    )
    return there, back


def new_works(
    seconds: FloatArray, links: tuple[Any, Any], frozen_boundaries: Sequence[int], activation_bytes: Sequence[int],
    weight_bytes: Sequence[int], caps: Sequence[int],
) -> list[Work]:
    """What all stages have to do in each of some batches.

    Args:
        seconds: of forwards, backwards, what splitting adds, and gradients of weights; ``(4, B, S, M)``.
        links: see :func:`link_tables`.
        frozen_boundaries: of each batch, over how many boundaries no gradients go.
        activation_bytes: S numbers.
        weight_bytes: the same.
        caps: S most bytes of activations.
    """
    forward_s, backward_s, split_s, weight_s = seconds
    input_s, count = backward_s + split_s - weight_s, seconds.shape[-1]
    has_backward: npt.NDArray[np.bool_] = np.any(backward_s, axis=-1)
    # Nobody waits for a stage that sends no gradient: its backward may be late as a whole, unless it takes no time.
    sends = np.arange(len(caps)) > np.array(frozen_boundaries)[:, None]
    of_flags = zip(has_backward, sends | ~has_backward, sends & np.any(weight_s, axis=-1), strict=True)
    of_tables = zip(forward_s, backward_s, input_s, weight_s, strict=True)
    works_s = forward_s.sum(axis=-1) + backward_s.sum(axis=-1)
    room = {}
    for frozen in set(frozen_boundaries):
        most, needed = [min(cap, _MOST_BYTES) for cap in caps], list(activation_bytes)
        _limit_frozen(most, needed, frozen, count)
        room[frozen] = [given(np.array(num_bytes)) for num_bytes in (needed, weight_bytes, most)]
    return [
        Work._make((count, frozen, *map(given, tables), *links, given(work_s), *room[frozen], *map(given, flags)))
        for frozen, tables, work_s, flags in zip(frozen_boundaries, of_tables, works_s, of_flags, strict=True)
    ]


def _limit_frozen(caps: list[int], activation_bytes: list[int], first: int, count: int) -> None:
    """Let frozen stages be no further ahead than the first one that trains has room for.

    Where layers are frozen they hold nothing, so what they may hold is counted in micro-batches.
    """
    ahead = first + _most(caps[first], activation_bytes[first], count)
    for stage in range(first):
        caps[stage] = _most(caps[stage], activation_bytes[stage], ahead - stage)
        activation_bytes[stage] = 1


def _most(cap: int, activation_bytes: int, otherwise: int) -> int:
    """Micro-batches for which there is room, but no more than otherwise."""
    return min(otherwise, cap // activation_bytes) if activation_bytes else otherwise


def new_ran(work: Work) -> Ran:
    """A table that nothing is written in yet.

    Args:
        work: of all stages.
    """
    num_stages, count = len(work.caps), work.num_micro_batches
    ops, num_ops, stages = (
        given(np.zeros(shape, dtype=np.int64))
        for shape in ((num_stages, 3 * count), (num_stages,), (3 * num_stages * count,))
    )
    return Ran(ops, num_ops, given(np.zeros((num_stages, count), dtype=np.bool_)), stages)


def new_wires(work: Work) -> Wires:
    """No message has come yet.

    Args:
        work: of all stages.
    """
    tables = np.empty((2, len(work.caps), work.num_micro_batches + 1))
    tables.fill(inf)
    return Wires(given(tables[0]), given(tables[1]))


def _no_places() -> Places:
    return Places(*(given(np.zeros((0, 0), dtype=np.int64)),) * 3)
