"""Filling empty stages with the least shift of the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush, heapreplace


def fill_empty_stages(cuts: Sequence[int], num_groups: int) -> list[int]:
    """Move the cuts as little as possible so that no stage is empty.

    Minimises the sum of the shifts ``|new - old|``. With ``y[s] = cut[s] - s`` the wanted cuts
    are a non-decreasing ``y`` nearest to the given one: isotonic regression in the L1 norm,
    solved exactly in ``O(S log S)`` by keeping a heap of medians.

    Args:
        cuts: ``S + 1`` non-decreasing positions from 0 to ``num_groups``.
        num_groups: Number of items to share out, at least ``S``.

    Returns:
        ``S + 1`` increasing positions.
    """
    num_stages = len(cuts) - 1
    heap: list[int] = []  # negated: the largest first
    peaks = []
    for stage, cut in enumerate(cuts):
        wanted = cut - stage
        heappush(heap, -wanted)
        if -heap[0] > wanted:
            heapreplace(heap, -wanted)
        peaks.append(-heap[0])
    filled = [num_groups] * (num_stages + 1)
    highest = num_groups - num_stages
    for stage in reversed(range(num_stages + 1)):
        highest = min(highest, peaks[stage])
        filled[stage] = max(highest, 0) + stage
    return filled
