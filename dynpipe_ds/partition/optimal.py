"""The smallest bottleneck, exactly."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from dynpipe_ds.partition.infeasible import explain
from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.partition.nearest import nearest_cuts
from dynpipe_ds.partition.plan import InfeasiblePartitionError, Plan
from dynpipe_ds.partition.prepare import prepare
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.partition.reach import Range, Reach, ReachSearch


def optimal(
    costs: Sequence[float],
    num_stages: int,
    *,
    current: Sequence[int] | None = None,
    layer_bytes: Sequence[int] | None = None,
    memory: StageMemory | None = None,
    pinned: Sequence[int] = (),
    speeds: Sequence[float] | None = None,
    allow_empty: bool = False,
) -> Plan:
    """Partition with the smallest bottleneck, and among those the nearest to the current one.

    Objective: over all contiguous partitions that keep the memory caps, the pinned cuts and the
    rule on empty stages, the smallest ``max_s cost(s) / speed(s)``. The result is exact. Among
    all partitions that reach it, with ``current`` given, the one that moves the fewest bytes, then
    the fewest layers; otherwise one that spreads the layers evenly.

    The bottleneck is found by bisection in which a failed probe moves the lower end to the next
    limit that could succeed, and a successful one moves the upper end to the bottleneck that it
    found (exact bisection: Pinar & Aykanat 2004, "Fast optimal load balancing algorithms for 1D
    partitioning"). The extension to caps and speeds that differ by stage, and the search for the
    nearest partition, are ours. ``O(S log L)`` a probe, about 20 probes, and ``O(S L log L)``
    for the nearest partition.

    Args:
        costs: Cost of every layer, in any unit; finite and >= 0. Sums are exact in a fixed point
            of 52 bits.
        num_stages: ``S``.
        current: Boundaries now in use.
        layer_bytes: Bytes that moving each layer costs; None: only layers are counted.
        memory: Memory that layers need and stages have; None for no cap.
        pinned: Cut positions ``c`` that are forbidden: layers ``c - 1`` and ``c`` stay together.
        speeds: Relative speed of every stage, 1.0 normal, 0.5 half as fast.
        allow_empty: Whether a stage may hold no layer.

    Returns:
        The plan.

    Raises:
        InfeasiblePartitionError: Fewer layers than stages, or no partition keeps the caps.
        ValueError: An argument is wrong; the message has the value and the rule.
    """
    problem = prepare(
        costs,
        num_stages,
        current=current,
        layer_bytes=layer_bytes,
        memory=memory,
        pinned=pinned,
        speeds=speeds,
        allow_empty=allow_empty,
    )
    bottleneck, cuts = _smallest_bottleneck(problem)
    if problem.current is not None:
        cuts = nearest_cuts(problem, problem.thresholds(bottleneck))
    return problem.plan(cuts)


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
    load = problem.load
    largest = max(end - first for first, end in zip(load, load[1:], strict=False))
    # Just below the even share: its division rounds.
    share = load[-1] / math.fsum(problem.speeds) * (1 - 1e-12)
    return max(share, largest / max(problem.speeds))


def _even_shares(problem: Problem) -> list[float]:
    """Prefix sums of the costs by which the layers spread evenly.

    A group above the even share of the rest fills a stage whatever the others do, so it counts
    as that share; else one huge layer would draw all cuts to itself.
    """
    load = problem.load
    costs = [end - first for first, end in zip(load, load[1:], strict=False)]
    rest, stages = load[-1], problem.num_stages
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
