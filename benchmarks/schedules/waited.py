"""1F1B as DeepSpeed's own engine runs it, on paper: a send is over when its message has been received.

The library's engine, and so its simulator, sends without waiting; this is what it is compared with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynpipe_ds.simulation import Workload


class Waited(NamedTuple):
    """One batch.

    Attributes:
        makespan_s: start of the first forward to the end of the last backward.
        bubble_ratio: idle share, mean of the stages.
    """

    makespan_s: float
    bubble_ratio: float


def waited_for(workload: Workload) -> Waited:
    """Simulate a batch in the steps of DeepSpeed's ``TrainSchedule``.

    In step t a stage computes a forward where ``t - s`` is even, else a backward. Before, the pairs (s, s + 1) with
    ``t - s`` odd exchange what both computed in the step before: first the gradient, then the activation.

    Args:
        workload: what every stage has to do.
    """
    count, num_stages = workload.num_micro_batches, workload.num_stages
    forward_s, backward_s, activation_s, gradient_s = (
        np.broadcast_to(table, (len(table), count)).tolist()
        for table in (workload.forward_s, workload.backward_s, workload.activation_link_s, workload.gradient_link_s)
    )
    clock_s, end_s = [0.0] * num_stages, 0.0
    for t in range(2 * (count + num_stages - 1)):
        for s in range((t + 1) % 2, num_stages - 1, 2):
            gradient, activation = (t + s + 1) // 2 - num_stages, (t - s - 1) // 2
            if 0 <= gradient < count and s >= workload.frozen_boundaries:
                clock_s[s] = clock_s[s + 1] = max(clock_s[s : s + 2]) + gradient_s[s][gradient]
            if 0 <= activation < count:
                clock_s[s] = clock_s[s + 1] = max(clock_s[s : s + 2]) + activation_s[s][activation]
        for s in range(num_stages):
            is_forward = (t - s) % 2 == 0
            m = (t - s) // 2 if is_forward else (t + s + 1) // 2 - num_stages
            if 0 <= m < count:
                clock_s[s] += (forward_s if is_forward else backward_s)[s][m]
                end_s = max(end_s, clock_s[s])
    busy_s = np.sum(forward_s, axis=1) + np.sum(backward_s, axis=1)
    return Waited(end_s, float(np.mean(1 - busy_s / end_s)))
