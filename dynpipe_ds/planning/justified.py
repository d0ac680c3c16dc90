"""A run is pushed to its end, and back to its beginning: that makes most of them shorter.

List scheduling decides in the sequence of time, so it can't see what a choice costs later. Seen from the end of the
batch it can: the same computations are run backwards in time, and each stage prefers what came last before. What a
stage did earlier than anybody needed it, it then does later, and the others close the gaps. The sequence that comes of
it guides a run forwards. Li and Willis 1992, "An iterative scheduling technique for resource-constrained project
scheduling"; Valls et al. 2005, "Justification and RCPSP: A technique that pays".
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from dynpipe_ds.planning.listing import Guide, Listing, Work, list_order
from dynpipe_ds.schedule import Op
from dynpipe_ds.simulation import Workload

_FORWARD, _BACKWARD, _WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT


def justified(listing: Listing, workload: Workload, caps: Sequence[int], patience: float) -> Listing:
    """Push a run to its end and back.

    Args:
        listing: that came to its end.
        workload: that it is of.
        caps: as for the listing.
        patience: how long a stage waits for what it would rather do, as a share of the seconds of what it could do
            instead.

    Returns:
        What ran then, most often shorter.
    """
    count = workload.num_micro_batches
    ran = _backwards(Work(workload, caps), Guide.of(listing.ran, listing.whole, count, patience))
    return list_order(workload, caps, Guide.of(ran, (frozenset[int](),) * len(ran), count, patience))


def _backwards(work: Work, guide: Guide) -> list[list[Op]]:
    """What stages run, each from the first to the last, when every one begins as late as it can."""
    last, count = work.num_stages - 1, work.count
    forward_s, weight_s = work.forward_s, work.weight_s
    splits = [work.splits[s] and work.weight_bytes[s] <= work.caps[s] for s in range(last + 1)]
    backward_s = [work.input_s[s] if splits[s] else work.whole_s[s] for s in range(last + 1)]
    held_between = [work.weight_bytes[s] if splits[s] else 0 for s in range(last + 1)]
    activation_bytes, patience = work.activation_bytes, guide.patience
    forward_at, backward_at, weight_at = guide.places
    # Weight gradients leave room for the backward before them, or a stage that is full of them would wait for ever.
    needed = [max(each) for each in zip(held_between, activation_bytes, strict=True)]
    room = list(work.caps)
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
        if w >= 0 and room[s] >= needed[s]:
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
                arrive_s = max(activation_wires_s[to], done_s) + work.activation_link_s[to][f]
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
                link_s = work.gradient_link_s[s][b] if to > work.frozen_boundaries else 0.0
                arrive_s = max(gradient_wires_s[to], done_s) + link_s
                gradient_wires_s[to] = gradients[to][b] = arrive_s
                heappush(events, (max(arrive_s, free_s[to]), to))
        heappush(events, (done_s, s))
    return [sequence[::-1] for sequence in ran]
