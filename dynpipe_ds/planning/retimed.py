"""The same order with other seconds: how long would each of some batches have taken in it, and how long in 1F1B?"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dynpipe_ds.planning.listing import Listing, new_wires
from dynpipe_ds.planning.runs import Ran, Work, time_again
from dynpipe_ds.schedule import Op
from dynpipe_ds.simulation.compiled import given, is_compiled

AS_LONG = 5
"""Timings of a run that take as long as the run itself."""


def retimed_s(listing: Listing, work: Work) -> float:
    """Time what a run wrote down, without writing the order down.

    The makespan of a fixed order is a maximum of sums of seconds, and so convex in them: batches that vary take longer
    on average than the mean of them does. How much longer differs by partition and by order.

    Args:
        listing: that came to its end.
        work: of as many stages and micro-batches; what they may hold does not count.

    Returns:
        Seconds of all forwards and backwards; those of :func:`~dynpipe_ds.simulation.simulate` with the listing's
        order, to the bit.
    """
    return time_again(work, listing.table, listing.num_computations, new_wires(work))


def usual_s(work: Work) -> float:
    """Time a batch under 1F1B.

    Args:
        work: of all stages; what they may hold does not count.

    Returns:
        Seconds of all forwards and backwards; those of :func:`~dynpipe_ds.simulation.simulate`, to the bit.
    """
    ran = _usual(len(work.caps), work.num_micro_batches, is_compiled())
    return time_again(work, ran, len(ran.stages), new_wires(work))


@lru_cache(maxsize=8)
def _usual(num_stages: int, num_micro_batches: int, is_compiled: bool) -> Ran:
    """What runs under 1F1B: in step t, a forward where ``t - s`` is even, else a backward."""
    ops, stages = [list[int]() for _ in range(num_stages)], []
    for t in range(2 * (num_micro_batches + num_stages - 1)):
        for s in range(num_stages):
            is_forward = (t - s) % 2 == 0
            if 0 <= ((t - s) // 2 if is_forward else (t + s + 1) // 2 - num_stages) < num_micro_batches:
                ops[s].append(Op.FORWARD if is_forward else Op.BACKWARD)
                stages.append(s)
    num_ops = np.full(num_stages, 2 * num_micro_batches)
    whole = np.ones((num_stages, num_micro_batches), dtype=np.bool_)
    return Ran(given(np.array(ops, dtype=np.int64)), given(num_ops), given(whole), given(np.array(stages)))
