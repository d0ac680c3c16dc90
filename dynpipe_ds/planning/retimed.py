"""The same order with other seconds: how long would each of some batches have taken in it?"""

from __future__ import annotations

from dynpipe_ds.planning.listing import Listing
from dynpipe_ds.schedule import Op
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.workload import by_micro_batch

_FORWARD, _BACKWARD = Op.FORWARD, Op.BACKWARD

AS_LONG = 5
"""Timings of a run that take as long as the run itself."""


def retimed_s(listing: Listing, workload: Workload) -> float:
    """Time what a run wrote down, without writing the order down.

    The makespan of a fixed order is a maximum of sums of seconds, and so convex in them: batches that vary take longer
    on average than the mean of them does. How much longer differs by partition and by order.

    Args:
        listing: that came to its end.
        workload: of as many stages and micro-batches.

    Returns:
        Seconds of all forwards and backwards; those of :func:`~dynpipe_ds.simulation.simulate` with the listing's
        order, to the bit.
    """
    count, last = workload.num_micro_batches, workload.num_stages - 1
    stages = range(workload.num_stages)
    forward_s, whole_s, input_s, weight_s = zip(*map(workload.stage_seconds, stages), strict=True)
    links = (workload.activation_link_s, workload.gradient_link_s)
    activation_link_s, gradient_link_s = ([by_micro_batch(row, count) for row in table] for table in links)
    activations, gradients = ([[0.0] * count for _ in stages] for _ in range(2))  # when messages come
    activation_wires_s, gradient_wires_s, free_s = [0.0] * len(stages), [0.0] * len(stages), [0.0] * len(stages)
    forwards, backwards, weights = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    whole, frozen = listing.whole, workload.frozen_boundaries
    ran = list(map(iter, listing.ran))
    for s in listing.stages:
        op, now_s = next(ran[s]), free_s[s]
        if op is _FORWARD:
            m = forwards[s]
            forwards[s] = m + 1
            if activations[s][m] > now_s:
                now_s = activations[s][m]
            now_s += forward_s[s][m]
            if s < last:
                wire_s = activation_wires_s[s] if activation_wires_s[s] > now_s else now_s
                activation_wires_s[s] = activations[s + 1][m] = wire_s + activation_link_s[s][m]
        elif op is _BACKWARD:
            m = backwards[s]
            backwards[s] = m + 1
            if gradients[s][m] > now_s:
                now_s = gradients[s][m]
            if m in whole[s]:
                now_s += whole_s[s][m]
                weights[s] = m + 1
            else:
                now_s += input_s[s][m]
            if s > frozen:
                wire_s = gradient_wires_s[s] if gradient_wires_s[s] > now_s else now_s
                gradient_wires_s[s] = gradients[s - 1][m] = wire_s + gradient_link_s[s - 1][m]
        else:
            m = weights[s]
            weights[s] = m + 1
            now_s += weight_s[s][m]
        free_s[s] = now_s
    return max(free_s)
