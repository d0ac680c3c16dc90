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
from heapq import heappop, heappush, heappushpop
from math import fsum, inf

from dynpipe_ds.schedule import Instruction, Op, Order
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.workload import by_micro_batch

SAME = 1e-9
"""Seconds that differ by a smaller share are the same: sums round."""

_FORWARD, _BACKWARD, _WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT
_Places = list[list[int]]
"""Of each stage and micro-batch, the place in the stage's sequence."""


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
        places: of forwards, backwards and weight gradients.
        patience: how long a stage waits for what comes before in the sequence, as a share of the seconds of what it
            could do instead.
    """

    places: tuple[_Places, _Places, _Places]
    patience: float

    @classmethod
    def of(cls, ran: Sequence[Sequence[Op]], whole: Sequence[frozenset[int]], count: int, patience: float) -> Guide:
        """Guide by what ran.

        Args:
            ran: as in a :class:`Listing`.
            whole: the same.
            count: M.
            patience: see the class.
        """
        places: tuple[_Places, _Places, _Places] = ([], [], [])
        for sequence, in_one in zip(ran, whole, strict=True):
            rows: tuple[list[int], list[int], list[int]] = ([], [], [])
            forwards, backwards, weights = rows
            for place, op in enumerate(sequence):
                if op is _FORWARD:
                    forwards.append(place)
                elif op is _WEIGHT:
                    weights.append(place)
                else:
                    if len(backwards) in in_one:
                        weights.append(place)
                    backwards.append(place)
            for row, found in zip(rows, places, strict=True):
                found.append(row + [len(sequence)] * (count + 1 - len(row)))
        return cls(places, patience)


@dataclass(frozen=True)
class Listing:
    """What a run wrote down.

    Args:
        seconds: of the batch; infinite when the run was given up.
        ran: for every stage its forwards, backwards and weight gradients in sequence, each kind in the order of
            micro-batches.
        whole: for every stage the micro-batches with a backward in one part.
        stages: of all computations, in the sequence in which they began: each comes after what it needs.
    """

    seconds: float
    ran: tuple[Sequence[Op], ...]
    whole: tuple[frozenset[int], ...]
    stages: Sequence[int]

    @property
    def num_computations(self) -> int:
        """How many ran, of all stages."""
        return len(self.stages)

    def order(self, num_micro_batches: int) -> Order:
        """The order as a value, with its messages: each leaves at once, and is received where it is needed.

        Args:
            num_micro_batches: M.
        """
        made = {op: [Instruction(op, m) for m in range(num_micro_batches)] for op in Op}
        last = len(self.ran) - 1
        streams = []
        for stage, ran in enumerate(self.ran):
            around = _messages(is_first=stage == 0, is_last=stage == last)
            weights = (m for m in range(num_micro_batches) if m not in self.whole[stage])
            counters = {
                Op.FORWARD: iter(range(num_micro_batches)), Op.BACKWARD: iter(range(num_micro_batches)),
                Op.BACKWARD_WEIGHT: weights,
            }  # fmt: skip
            numbered = ((op, next(counters[op])) for op in ran)
            streams.append(tuple(made[each][m] for op, m in numbered for each in around[op]))
        return Order(num_micro_batches, tuple(streams))


def list_order(
    workload: Workload, caps: Sequence[int], preference: Policy | Guide, *, limit_s: float = inf
) -> Listing:
    """Run one batch.

    Args:
        workload: seconds and bytes.
        caps: S most bytes of activations, each at least what one micro-batch holds.
        preference: what stages prefer.
        limit_s: seconds beyond which the run is given up.

    Returns:
        What ran.
    """
    run = _Run(workload, caps, preference)
    return Listing(run.to_the_end(limit_s), tuple(run.ran), tuple(map(frozenset, run.whole)), run.stages)


def _messages(*, is_first: bool, is_last: bool) -> dict[Op, tuple[Op, ...]]:
    """Each computation with the messages around it."""
    receive, send = (Op.RECV_ACTIVATION,) * (not is_first), (Op.SEND_ACTIVATION,) * (not is_last)
    receive_back, send_back = (Op.RECV_GRADIENT,) * (not is_last), (Op.SEND_GRADIENT,) * (not is_first)
    return {
        Op.FORWARD: (*receive, Op.FORWARD, *send),
        Op.BACKWARD: (*receive_back, Op.BACKWARD, *send_back),
        Op.BACKWARD_WEIGHT: (Op.BACKWARD_WEIGHT,),
    }


class Work:
    """What all stages of a batch have to do and may hold; plain lists, since planning runs thousands of batches.

    Args:
        workload: seconds and bytes.
        caps: S most bytes of activations.
    """

    def __init__(self, workload: Workload, caps: Sequence[int]) -> None:
        self.count, self.num_stages = workload.num_micro_batches, workload.num_stages
        rows = [workload.stage_seconds(stage) for stage in range(self.num_stages)]
        self.forward_s, self.whole_s, self.input_s, self.weight_s = map(list, zip(*rows, strict=True))
        self.activation_link_s, self.gradient_link_s = (
            [by_micro_batch(row, self.count) for row in links]
            for links in (workload.activation_link_s, workload.gradient_link_s)
        )
        self.activation_bytes, self.weight_bytes = list(workload.activation_bytes), workload.weight_bytes
        self.caps, self.frozen_boundaries = list(caps), workload.frozen_boundaries
        self._limit_frozen()
        first, self.has_backward = self.frozen_boundaries, list(map(any, self.whole_s))
        # Nobody waits for a stage that sends no gradient: its backward may be late as a whole, unless it takes no time.
        sends = [stage > first for stage in range(self.num_stages)]
        self.is_prompt = [sent or not works for sent, works in zip(sends, self.has_backward, strict=True)]
        self.splits = [sent and any(weight_s) for sent, weight_s in zip(sends, self.weight_s, strict=True)]

    def _limit_frozen(self) -> None:
        """Let frozen stages be no further ahead than the first one that trains has room for.

        Where layers are frozen they hold nothing, so what they may hold is counted in micro-batches.
        """
        first = self.frozen_boundaries
        ahead = first + _most(self.caps[first], self.activation_bytes[first], self.count)
        for stage in range(first):
            self.caps[stage] = _most(self.caps[stage], self.activation_bytes[stage], ahead - stage)
            self.activation_bytes[stage] = 1


class _Run(Work):
    """All stages of a batch, and the messages between them."""

    def __init__(self, workload: Workload, caps: Sequence[int], preference: Policy | Guide) -> None:
        super().__init__(workload, caps)
        self.patience, self.guide = preference.patience, preference if isinstance(preference, Guide) else None
        prefers_forwards, depth = False, inf
        if isinstance(preference, Policy):
            prefers_forwards, depth = preference.prefers_forwards, preference.depth
        self.forward_first = [works and prefers_forwards for works in self.has_backward]
        self.most_ahead = [depth * (self.num_stages - stage) for stage in range(self.num_stages)]
        self.ran: list[list[Op]] = [[] for _ in self.caps]
        self.whole: list[set[int]] = [set() for _ in self.caps]
        self.stages: list[int] = []

    def to_the_end(self, limit_s: float) -> float:
        """Run, and return the seconds; infinite when they are more than the limit.

        That is seen early on: no stage may be idle for longer than what the limit leaves beside its work.
        """
        forward_s, whole_s, input_s, weight_s = self.forward_s, self.whole_s, self.input_s, self.weight_s
        activation_link_s, gradient_link_s = self.activation_link_s, self.gradient_link_s
        activation_bytes, weight_bytes, caps = self.activation_bytes, self.weight_bytes, self.caps
        is_prompt, splits, forward_first = self.is_prompt, self.splits, self.forward_first
        patience, frozen, most_ahead = self.patience, self.frozen_boundaries, self.most_ahead
        last, count = self.num_stages - 1, self.count
        forward_at, backward_at, weight_at = ([], [], []) if self.guide is None else self.guide.places
        is_guided, nowhere = self.guide is not None, 3 * count
        # When messages come, by micro-batch, and of each wire when its newest does.
        activations, gradients = ([[inf] * (count + 1) for _ in caps] for _ in range(2))
        activations[0] = [*[0.0] * count, inf]
        activation_wires_s, gradient_wires_s = [0.0] * len(caps), [0.0] * len(caps)
        forwards, backwards, weights = [0] * len(caps), [0] * len(caps), [0] * len(caps)  # begun
        held, free_s, end_s = [0] * len(caps), [0.0] * len(caps), 0.0
        whole_work_s = [fsum(forward_s[s]) + fsum(whole_s[s]) for s in range(self.num_stages)]
        may_idle_s = [limit_s * (1 + SAME) - seconds for seconds in whole_work_s]
        events = [(inf, 0)]  # when to look at which stage; one that never comes
        now_s, s = 0.0, 0
        while now_s < inf:
            if free_s[s] > now_s:
                now_s, s = heappop(events)
                continue
            f, b, w = forwards[s], backwards[s], weights[s]
            activation_s, gradient_s = activations[s][f], gradients[s][b]
            room = caps[s] - held[s]
            has_room = room >= activation_bytes[s] and f - b < most_ahead[s]
            can_split = splits[s] and room >= weight_bytes[s] - activation_bytes[s]
            if is_guided:
                at = next_at = nowhere
                next_s, op, seconds = inf, _FORWARD, 0.0
                if w < b:
                    at, op, seconds = weight_at[s][w], _WEIGHT, weight_s[s][w]
                if can_split or w == b:
                    here = backward_at[s][b]
                    if gradient_s > now_s:
                        next_s, next_at = gradient_s, here
                    elif here < at:
                        at, op, seconds = here, _BACKWARD, input_s[s][b] if can_split else whole_s[s][b]
                if has_room:
                    here = forward_at[s][f]
                    if activation_s > now_s:
                        if activation_s < next_s:
                            next_s, next_at = activation_s, here
                    elif here < at:
                        at, op, seconds = here, _FORWARD, forward_s[s][f]
                if at == nowhere or (next_at < at and next_s - now_s < patience * seconds):
                    now_s, s = heappushpop(events, (next_s, s))
                    continue
            elif gradient_s <= now_s and is_prompt[s] and not (forward_first[s] and activation_s <= now_s and has_room):
                op = _WEIGHT if w < b and not can_split else _BACKWARD
            elif activation_s <= now_s and has_room:
                op = _FORWARD
            else:  # work that nobody waits for, if nothing else is known to come soon
                next_s = activation_s if has_room else inf
                if now_s < gradient_s < next_s:
                    next_s = gradient_s
                if w < b:
                    op, seconds = _WEIGHT, weight_s[s][w]
                elif gradient_s <= now_s and not is_prompt[s]:
                    op, seconds = _BACKWARD, whole_s[s][b]
                else:
                    now_s, s = heappushpop(events, (next_s, s))
                    continue
                if activation_s > now_s and next_s - now_s < patience * seconds:
                    now_s, s = heappushpop(events, (next_s, s))
                    continue
            self.ran[s].append(op)
            self.stages.append(s)
            if now_s > free_s[s]:
                may_idle_s[s] -= now_s - free_s[s]
                if may_idle_s[s] < 0:
                    return inf
            if op is _FORWARD:
                done_s = now_s + forward_s[s][f]
                forwards[s] = f + 1
                held[s] += activation_bytes[s]
                if s == last:
                    gradients[s][f] = done_s
                else:
                    to = s + 1
                    wire_s = activation_wires_s[to]
                    arrive_s = (done_s if wire_s < done_s else wire_s) + activation_link_s[s][f]
                    activation_wires_s[to] = activations[to][f] = arrive_s
                    if free_s[to] <= arrive_s:
                        heappush(events, (arrive_s, to))
            elif op is _WEIGHT:
                done_s = now_s + weight_s[s][w]
                weights[s] = w + 1
                held[s] -= weight_bytes[s]
            else:
                backwards[s] = b + 1
                held[s] -= activation_bytes[s]
                if can_split:
                    done_s = now_s + input_s[s][b]
                    held[s] += weight_bytes[s]
                else:
                    done_s = now_s + whole_s[s][b]
                    self.whole[s].add(b)
                    weights[s] = b + 1
                if s:  # the previous stage's backward, also where that is nothing and no gradient is sent
                    to = s - 1
                    wire_s = gradient_wires_s[to]
                    link_s = gradient_link_s[to][b] if s > frozen else 0.0
                    arrive_s = (done_s if wire_s < done_s else wire_s) + link_s
                    gradient_wires_s[to] = gradients[to][b] = arrive_s
                    if free_s[to] <= arrive_s:
                        heappush(events, (arrive_s, to))
            free_s[s] = done_s
            if done_s > end_s:
                end_s = done_s
                if end_s > limit_s:
                    return inf
            now_s, s = heappushpop(events, (done_s, s))
        return end_s


def _most(cap: int, activation_bytes: int, otherwise: int) -> int:
    """Micro-batches for which there is room, but no more than otherwise."""
    return min(otherwise, cap // activation_bytes) if activation_bytes else otherwise
