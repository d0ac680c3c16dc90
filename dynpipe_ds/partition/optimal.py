"""The smallest bottleneck, exactly."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

from dynpipe_ds.partition.infeasible import explain
from dynpipe_ds.partition.nearest import nearest_cuts
from dynpipe_ds.partition.partitioner import partitioner
from dynpipe_ds.partition.plan import InfeasiblePartitionError
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.partition.reach import Range, Reach, ReachSearch


@partitioner()
def optimal(problem: Problem) -> list[int]:
    """Partition with the smallest bottleneck, and among those the nearest to the current one.

    Objective: over all contiguous partitions that keep the memory caps, the pinned cuts and the
    rule on empty stages, the smallest ``max_s cost(s) / speed(s)``. The result is exact. Among
    all partitions that reach it, with ``current`` given, the one that moves the fewest bytes, then
    the fewest layers; otherwise one that spreads the layers evenly.

    The bottleneck is found by bisection in which a failed probe moves the lower end to the next
    limit that could succeed, and a successful one moves the upper end to the bottleneck that it
    found (exact bisection: Pinar & Aykanat 2004, "Fast optimal load balancing algorithms for 1D
    partitioning"). The extension to caps and speeds that differ by stage, and the search for the
    nearest partition, are ours. ``O(S log L)`` a probe, about 20 probes, and ``O(S L W)``
    for the nearest partition, where ``W`` layers fit into one stage within the bottleneck.

    Costs are summed exactly, in a fixed point of 52 bits.
    """
    bottleneck, cuts = _smallest_bottleneck(problem)
    if problem.current is not None:
        return nearest_cuts(problem, problem.thresholds(bottleneck))
    return cuts


def _smallest_bottleneck(problem: Problem) -> tuple[float, list[int]]:
    """The smallest feasible limit on the stage times, and a partition that keeps it."""
    search = ReachSearch(problem)
    reach = search(math.inf)
    if not reach.complete:
        raise InfeasiblePartitionError(explain(problem))
    shares = _even_shares(problem)
    cuts = _even_cuts(problem, reach, shares)
    high = max(problem.stage_loads(cuts))
    low = min(_lower_bound(problem), high)
    limit = low  # often the answer: one layer or an even share is the bottleneck
    while low < high:
        probe = search(limit)
        if probe.complete:
            cuts = _even_cuts(problem, probe, shares)
            high = max(problem.stage_loads(cuts))
        else:
            low = probe.next_limit
        limit = low + (high - low) / 2
        if limit >= high:  # neighbouring floats: nothing lies between
            limit = low
    return high, cuts


def _lower_bound(problem: Problem) -> float:
    largest = max(problem.group_costs)
    # Just below the even share: its division rounds.
    share = problem.load[-1] / math.fsum(problem.speeds) * (1 - 1e-12)
    return max(share, largest / max(problem.speeds))


def _even_shares(problem: Problem) -> list[float]:
    """Prefix sums of the costs by which the layers spread evenly.

    A group above the even share of the rest fills a stage whatever the others do, so it counts
    as that share; else one huge layer would draw all cuts to itself.
    """
    costs = problem.group_costs
    rest, stages = problem.load[-1], problem.num_stages
    for cost in sorted(costs, reverse=True):
        if stages == 1 or cost * stages <= rest:
            break
        rest, stages = rest - cost, stages - 1
    share = rest / stages
    if not share:
        return list(range(problem.num_groups + 1))
    return list(accumulate((min(cost, share) for cost in costs), initial=0.0))


def _even_cuts(problem: Problem, reach: Reach, shares: list[float]) -> list[int]:
    """One partition within the limit: from the end, every cut nearest to an even share."""
    load = problem.load
    power = list(accumulate(problem.speeds, initial=0.0))
    end = problem.num_groups
    cuts = [end]
    for stage in reversed(range(problem.num_stages)):
        earliest = bisect_left(load, load[end] - reach.thresholds[stage], 0, end)
        if problem.caps:
            earliest = problem.earliest_start(stage, earliest, end)
        latest = end if problem.allow_empty else end - 1
        target = shares[end] * power[stage] / power[stage + 1]
        end = _nearest_in(reach.ranges[stage], earliest, latest, target, shares)
        cuts.append(end)
    return cuts[::-1]


def _nearest_in(
    ranges: list[Range], earliest: int, latest: int, target: float, shares: list[float]
) -> int:
    """Reachable position from ``earliest`` to ``latest`` whose share is nearest to the target."""
    best = -1
    for first, last in ranges:
        first, last = max(first, earliest), min(last, latest)
        if last < first:
            continue
        cut = bisect_left(shares, target, first, last)
        if cut > first and target - shares[cut - 1] < shares[cut] - target:
            cut -= 1
        if best < 0 or abs(shares[cut] - target) < abs(shares[best] - target):
            best = cut
    return best
