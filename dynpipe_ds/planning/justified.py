"""A run is pushed to its end, and back to its beginning: that makes most of them shorter.

List scheduling decides in the sequence of time, so it can't see what a choice costs later. Seen from the end of the
batch it can: the same computations are run backwards in time, and each stage prefers what came last before. What a
stage did earlier than anybody needed it, it then does later, and the others close the gaps. The sequence that comes of
it guides a run forwards. Li and Willis 1992, "An iterative scheduling technique for resource-constrained project
scheduling"; Valls et al. 2005, "Justification and RCPSP: A technique that pays".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop
from math import inf

from dynpipe_ds.planning.listing import Listing, Paper
from dynpipe_ds.schedule import Op
from dynpipe_ds.simulation import Workload

_FORWARD, _BACKWARD, _WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT
_Places = list[list[int]]
"""Of each stage and micro-batch, the place in the stage's sequence."""


@dataclass(frozen=True, eq=False)
class _Guide:
    """In which sequence stages would rather compute; what is not possible yet is overtaken.

    Args:
        places: of forwards, backwards and weight gradients.
        patience: how long a stage waits for what comes before in the sequence, as a share of the seconds of what it
            could do instead.
    """

    places: tuple[_Places, _Places, _Places]
    patience: float

    @classmethod
    def of(cls, ran: Sequence[Sequence[Op]], whole: Sequence[frozenset[int]], count: int, patience: float) -> _Guide:
        """Guide by what ran.

        Args:
            ran: as in a :class:`~dynpipe_ds.planning.listing.Listing`.
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


def justified(listing: Listing, workload: Workload, caps: Sequence[int], patience: float) -> Listing | None:
    """Push a run to its end and back.

    Args:
        listing: that came to its end.
        workload: that it is of.
        caps: as for the listing.
        patience: how long a stage waits for what it would rather do, as a share of the seconds of what it could do
            instead.

    Returns:
        What ran then, most often shorter; ``None`` where stages could not go on backwards for lack of memory.
    """
    count = workload.num_micro_batches
    paper = Paper(workload, caps)
    ran = _backwards(paper, _Guide.of(listing.ran, listing.whole, count, patience))
    if ran is None:
        return None
    return _forwards(paper, _Guide.of(ran, (frozenset[int](),) * len(ran), count, patience))


def _backwards(paper: Paper, guide: _Guide) -> list[list[Op]] | None:
    """What stages run, each from the first to the last, when every one begins as late as it can."""
    last, count = paper.num_stages - 1, paper.count
    forward_s, weight_s = paper.forward_s, paper.weight_s
    splits = [paper.splits[s] and paper.weight_bytes[s] <= paper.caps[s] for s in range(last + 1)]
    backward_s = [paper.input_s[s] if splits[s] else paper.whole_s[s] for s in range(last + 1)]
    held_between = [paper.weight_bytes[s] if splits[s] else 0 for s in range(last + 1)]
    activation_bytes, patience = paper.activation_bytes, guide.patience
    forward_at, backward_at, weight_at = guide.places
    room = list(paper.caps)
    # Seconds are those until the end of the batch. When what comes after in time is over, and the message has room.
    gradients, activations = ([[inf] * count for _ in room] for _ in range(2))
    gradients[0] = [0.0] * count
    gradient_wires_s, activation_wires_s = [0.0] * len(room), [0.0] * len(room)
    forwards, backwards = [count - 1] * len(room), [count - 1] * len(room)  # the next one
    weights = [count - 1 if split else -1 for split in splits]
    free_s = [0.0] * len(room)
    ran: list[list[Op]] = [[] for _ in room]
    events = [(0.0, s) for s in range(last + 1)]
    while events:
        now_s, s = heappop(events)
        if free_s[s] > now_s:
            continue
        f, b, w = forwards[s], backwards[s], weights[s]
        at, next_s, next_at, op, seconds = -1, inf, -1, _FORWARD, 0.0
        if w >= 0 and room[s] >= held_between[s]:
            at, op, seconds = weight_at[s][w], _WEIGHT, weight_s[s][w]
        if b >= 0 and (not splits[s] or w < b) and room[s] >= activation_bytes[s] - held_between[s]:
            there_s, here = gradients[s][b], backward_at[s][b]
            if there_s > now_s:
                next_s, next_at = there_s, here
            elif here > at:
                at, op, seconds = here, _BACKWARD, backward_s[s][b]
        if f > b:
            there_s, here = activations[s][f] if s < last else now_s, forward_at[s][f]
            if there_s > now_s:
                if there_s < next_s:
                    next_s, next_at = there_s, here
            elif here > at:
                at, op, seconds = here, _FORWARD, forward_s[s][f]
        if at < 0 or (next_at > at and next_s - now_s < patience * seconds):
            if next_s < inf:
                heappush(events, (next_s, s))
            continue
        ran[s].append(op)
        done_s = free_s[s] = now_s + seconds
        if op is _FORWARD:
            forwards[s] = f - 1
            room[s] += activation_bytes[s]
            if s:
                to = s - 1
                arrive_s = max(activation_wires_s[to], done_s) + paper.activation_link_s[to][f]
                activation_wires_s[to] = activations[to][f] = arrive_s
                heappush(events, (max(arrive_s, free_s[to]), to))
        elif op is _WEIGHT:
            weights[s] = w - 1
            room[s] -= held_between[s]
        else:
            backwards[s] = b - 1
            room[s] -= activation_bytes[s] - held_between[s]
            if s < last:
                to = s + 1
                link_s = paper.gradient_link_s[s][b] if to > paper.frozen_boundaries else 0.0
                arrive_s = max(gradient_wires_s[to], done_s) + link_s
                gradient_wires_s[to] = gradients[to][b] = arrive_s
                heappush(events, (max(arrive_s, free_s[to]), to))
        heappush(events, (done_s, s))
    if any(n >= 0 for left in (forwards, backwards, weights) for n in left):
        return None
    return [sequence[::-1] for sequence in ran]


def _forwards(paper: Paper, guide: _Guide) -> Listing:
    """What stages run when every one begins as soon as it can."""
    last, count, frozen = paper.num_stages - 1, paper.count, paper.frozen_boundaries
    forward_s, whole_s, input_s, weight_s = paper.forward_s, paper.whole_s, paper.input_s, paper.weight_s
    activation_link_s, gradient_link_s = paper.activation_link_s, paper.gradient_link_s
    activation_bytes, weight_bytes, splits = paper.activation_bytes, paper.weight_bytes, paper.splits
    forward_at, backward_at, weight_at = guide.places
    patience, room = guide.patience, list(paper.caps)
    activations, gradients = ([[inf] * (count + 1) for _ in room] for _ in range(2))  # when messages come
    activations[0] = [*[0.0] * count, inf]
    activation_wires_s, gradient_wires_s = [0.0] * len(room), [0.0] * len(room)
    forwards, backwards, weights = [0] * len(room), [0] * len(room), [0] * len(room)  # begun
    free_s, end_s = [0.0] * len(room), 0.0
    ran: list[list[Op]] = [[] for _ in room]
    whole: list[set[int]] = [set() for _ in room]
    stages: list[int] = []
    events = [(inf, 0)]  # when to look at which stage; one that never comes
    now_s, s = 0.0, 0
    while now_s < inf:
        if free_s[s] > now_s:
            now_s, s = heappop(events)
            continue
        f, b, w = forwards[s], backwards[s], weights[s]
        can_split = splits[s] and room[s] >= weight_bytes[s] - activation_bytes[s]
        at = next_at = count * 4
        next_s, op, seconds = inf, _FORWARD, 0.0
        if w < b:
            at, op, seconds = weight_at[s][w], _WEIGHT, weight_s[s][w]
        if can_split or w == b:
            there_s, here = gradients[s][b], backward_at[s][b]
            if there_s > now_s:
                next_s, next_at = there_s, here
            elif here < at:
                at, op, seconds = here, _BACKWARD, input_s[s][b] if can_split else whole_s[s][b]
        if room[s] >= activation_bytes[s]:
            there_s, here = activations[s][f], forward_at[s][f]
            if there_s > now_s:
                if there_s < next_s:
                    next_s, next_at = there_s, here
            elif here < at:
                at, op, seconds = here, _FORWARD, forward_s[s][f]
        if at == count * 4 or (next_at < at and next_s - now_s < patience * seconds):
            now_s, s = heappushpop(events, (next_s, s))
            continue
        ran[s].append(op)
        stages.append(s)
        done_s = free_s[s] = now_s + seconds
        if done_s > end_s:
            end_s = done_s
        if op is _FORWARD:
            forwards[s] = f + 1
            room[s] -= activation_bytes[s]
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
            weights[s] = w + 1
            room[s] += weight_bytes[s]
        else:
            backwards[s] = b + 1
            room[s] += activation_bytes[s]
            if can_split:
                room[s] -= weight_bytes[s]
            else:
                whole[s].add(b)
                weights[s] = b + 1
            if s:
                to = s - 1
                wire_s = gradient_wires_s[to]
                link_s = gradient_link_s[to][b] if s > frozen else 0.0
                arrive_s = (done_s if wire_s < done_s else wire_s) + link_s
                gradient_wires_s[to] = gradients[to][b] = arrive_s
                if free_s[to] <= arrive_s:
                    heappush(events, (arrive_s, to))
        now_s, s = heappushpop(events, (done_s, s))
    return Listing(end_s, tuple(ran), tuple(map(frozenset, whole)), stages)
