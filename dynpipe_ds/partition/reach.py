"""Which cuts can be reached within a limit on the stage times.

``ranges[s]`` holds the positions that the cut in front of stage ``s`` can take: the first ``s``
stages hold the groups before it, each within the limit and its memory cap. Without caps and with
equal speeds this is one range whose end is the greedy fill (the PROBE function of Pinar & Aykanat
2004, "Fast optimal load balancing algorithms for 1D partitioning"). A group that fits on some
stages only, because activations in flight or speeds differ, makes holes: hence lists of ranges.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from dynpipe_ds.partition.problem import Problem

Range = tuple[int, int]  # first and last position, both included


@dataclass(frozen=True)
class Reach:
    """Reachable cuts under one limit.

    Attributes:
        thresholds: Largest integer cost of every stage.
        ranges: For every stage, and for the end: ascending, disjoint ranges of positions.
        next_limit: A partition that exceeds the limit reaches at least this; infinity if none.
        complete: Whether the last stage reaches the end: a partition exists.
    """

    thresholds: list[int]
    ranges: list[list[Range]]
    next_limit: float
    complete: bool


class ReachSearch:
    """Reachability for one problem, to be asked for many limits.

    One call takes ``O(S log K)`` as long as every group fits on every stage.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._costs = problem.group_costs
        self._largest = max(self._costs)
        self._over_cap = _groups_over_cap(problem)

    def __call__(self, limit: float) -> Reach:
        """Find what can be reached within a limit on the stage times, integer cost divided by speed."""
        problem = self._problem
        thresholds = problem.thresholds(limit)
        shift = 0 if problem.allow_empty else 1
        # Further than `last` would leave a later stage without a group.
        last = problem.num_groups - shift * problem.num_stages
        ranges: list[list[Range]] = [[(0, 0)]]
        next_limit = math.inf
        for stage, threshold in enumerate(thresholds):
            last += shift
            reached, next_load = self._advance(stage, threshold, ranges[-1], last)
            next_limit = min(next_limit, next_load / problem.speeds[stage])
            ranges.append(reached)
        complete = bool(ranges[-1]) and ranges[-1][-1][1] == problem.num_groups
        return Reach(thresholds, ranges, next_limit, complete)

    def _advance(
        self, stage: int, threshold: int, starts: list[Range], last: int
    ) -> tuple[list[Range], float]:
        """Ends that a stage reaches, and the smallest load that would let it reach more."""
        problem, load = self._problem, self._problem.load
        next_load = math.inf
        shift = 0
        if not problem.allow_empty:
            shift = 1
            if threshold < self._largest or self._over_cap[stage]:
                starts, next_load = self._without_blocked(stage, threshold, starts)
        reached: list[Range] = []
        for first, final in starts:
            # Ends grow with the start, so a run of starts reaches what its last one reaches.
            end = min(bisect_right(load, load[final] + threshold, final) - 1, last)
            if end < last:
                next_load = min(next_load, load[end + 1] - load[final])
            if problem.caps:
                end = problem.furthest_end(stage, final, end)
            if reached and first + shift <= reached[-1][1] + 1:
                reached[-1] = (reached[-1][0], end)
            else:
                reached.append((first + shift, end))
        return reached, next_load

    def _without_blocked(
        self, stage: int, threshold: int, starts: list[Range]
    ) -> tuple[list[Range], float]:
        """Starts whose group the stage can hold, and the least cost of those it can't."""
        over_cap = self._over_cap[stage]
        too_slow = [k for k, cost in enumerate(self._costs) if cost > threshold]
        blocked = sorted({*over_cap, *too_slow})
        next_load = math.inf
        runs: list[Range] = []
        for first, final in starts:
            for k in blocked[bisect_left(blocked, first) : bisect_right(blocked, final)]:
                if self._costs[k] > threshold:
                    next_load = min(next_load, self._costs[k])
                if first < k:
                    runs.append((first, k - 1))
                first = k + 1
            if first <= final:
                runs.append((first, final))
        return runs, next_load


def _groups_over_cap(problem: Problem) -> list[list[int]]:
    """For every stage, the groups that exceed its cap even alone."""
    if not problem.caps:
        return [[]] * problem.num_stages
    state, activation = np.diff(problem.state), np.diff(problem.activation)
    return [
        (state + in_flight * activation > cap).nonzero()[0].tolist()
        for in_flight, cap in zip(problem.in_flight, problem.caps, strict=False)
    ]
