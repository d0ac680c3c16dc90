"""Stages that pass boundary layers to less loaded neighbours, round by round."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from dynpipe_ds.partition.partitioner import Refined, cuts_of, partitioner
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.partition.repair import fill_empty_stages
from dynpipe_ds.partition.uniform import uniform

DEFAULT_GAMMA_SHARE = 0.01


@partitioner()
def diffusion(problem: Problem, *, gamma: float | None = None, max_rounds: int | None = None) -> Refined:
    """Improve a partition by local exchanges until nothing improves.

    The contiguous variant, ours, of the paper's diffusion (Wahib, Soyturk, Unat 2025, "Balanced and
    Elastic End-to-end Training of Dynamic LLMs", arXiv:2505.14864, section 3.3; Algorithm 2 of its
    DynPipe version). From there: iterative, from overloaded to less loaded, guarded by memory; the
    potential ``phi = sum over pairs of stages |x_u - x_v|`` of the loads ``x`` and the stop at
    ``phi <= gamma``, both from the proof of its Lemma 2.

    As printed, an overloaded worker offers its least loaded layer to the least loaded worker of all,
    for five rounds, if the variance falls; layers of a worker then need not follow each other, and no
    pipeline of ranges can run that (``benchmarks/paper`` simulates it beside this one). Here stages
    stay contiguous, and layers can't be divided: a stage counts as
    overloaded against a neighbour that has less; it passes the run of layers at that boundary
    that brings the two loads nearest to each other; it does so only if both ``phi`` and the larger
    of the two loads fall, so neither ``phi`` nor the bottleneck ever rises. In a round the stages
    act one after the other, the most loaded first, each towards its less loaded neighbour and if
    that fails towards the other one. A round without an exchange ends the search.

    The result is a local optimum: neighbours that differ by less than a layer pass nothing on, so
    a slope along the pipeline can remain. :func:`optimal` is never worse.

    It starts from the current partition; without one, or if that has another number of stages, from the
    uniform one. Cuts that are pinned first move to the nearest allowed ones, and empty stages that are not
    allowed are filled by the least shift. A stage takes no layers beyond its cap. The plan's rounds are
    those that exchanged something.

    Args:
        problem: The problem.
        gamma: Where to stop, in the unit of the costs. Default: 0.01 of the total cost; then,
            with equal speeds, the bottleneck is within 1% of the mean stage cost.
        max_rounds: Limit on the rounds. Default: :func:`round_bound`.
    """
    total = math.ldexp(problem.load[-1], -problem.scale_bits)
    gamma = _check_gamma(gamma, total)
    if max_rounds is None:
        max_rounds = round_bound(problem.num_stages, total, gamma)
    exchange = _Exchange(problem, _starting_cuts(problem))
    rounds = 0
    limit = math.ldexp(gamma, problem.scale_bits)
    while rounds < max_rounds and exchange.potential > limit and exchange.round():
        rounds += 1
    return Refined(exchange.cuts, rounds)


def potential(loads: Sequence[float]) -> float:
    """Sum over all pairs of stages of the difference of their loads."""
    ordered = np.sort(np.asarray(loads, dtype=np.float64))
    count = len(ordered)
    return float(ordered @ (2.0 * np.arange(count) - count + 1))


def round_bound(num_stages: int, total: float, gamma: float) -> int:
    """Bound on the rounds until ``phi <= gamma`` or nothing improves.

    Lemma 2 of the paper named in :func:`diffusion` (proof in B.3.2 of its DynPipe version):
    ``O(min(N^2 log(S N / gamma) log N, S N log(N) / gamma))`` for ``N`` workers. The statement calls
    ``S`` the number of stages; the proof uses it to bound the largest gap of two loads at the start,
    ``s_max(0) <= S``, so it is the total load, and that makes the bound free of units. The proof is
    about random pairs of workers that average loads which can be divided, in rounds of which one in
    ``N`` is good; neither the paper's algorithm nor ours is that. We take 1 for the constant and add
    one round. Tests hold our scheme to it.

    Args:
        num_stages: ``N``.
        total: Total cost.
        gamma: Where the iteration stops, in the unit of the total.

    Returns:
        Number of rounds; a very large one for ``gamma = 0``.
    """
    if num_stages == 1 or total == 0:
        return 1
    if gamma == 0:
        # No bound from the lemma. The iteration ends all the same: phi falls in every round and
        # there are finitely many partitions.
        return 2**62
    log_stages = math.log(num_stages)
    slow = max(total * num_stages / gamma, math.e)
    squared = num_stages**2 * math.log(slow) * log_stages
    return math.ceil(min(squared, slow * log_stages)) + 1


def _check_gamma(gamma: float | None, total: float) -> float:
    if gamma is None:
        return DEFAULT_GAMMA_SHARE * total
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"gamma is {gamma}; it must be finite and >= 0, in the unit of the costs")
    return float(gamma)


def _starting_cuts(problem: Problem) -> list[int]:
    if problem.current is None or len(problem.current) != problem.num_stages + 1:
        return cuts_of(uniform, problem)
    cuts = problem.snap(problem.current)
    return cuts if problem.allow_empty else fill_empty_stages(cuts, problem.num_groups)


class _Exchange:
    """A partition of the groups that changes by exchanges between neighbours."""

    def __init__(self, problem: Problem, cuts: list[int]) -> None:
        self._problem = problem
        self.cuts = cuts
        self._loads = problem.stage_loads(cuts)
        self.potential = potential(self._loads)

    def round(self) -> bool:
        """Let every stage act once; say whether anything was exchanged."""
        loads = self._loads
        order = sorted(range(len(loads)), key=lambda stage: -loads[stage])
        given = [self._give(stage) for stage in order]
        return any(given)

    def _give(self, stage: int) -> bool:
        neighbours = [n for n in (stage - 1, stage + 1) if 0 <= n < len(self._loads)]
        neighbours.sort(key=lambda neighbour: self._loads[neighbour])
        return any(self._give_to(stage, neighbour) for neighbour in neighbours)

    def _give_to(self, giver: int, taker: int) -> bool:
        """Pass on the run of groups that levels the two stages best, if that is an improvement."""
        if self._loads[giver] <= self._loads[taker]:
            return False
        boundary = max(giver, taker)
        options = [(self._pair_loads(boundary, cut), cut) for cut in self._options(giver, taker)]
        if not options:
            return False
        pair, cut = min(options, key=lambda option: max(option[0]))
        loads = list(self._loads)
        loads[boundary - 1], loads[boundary] = pair
        phi = potential(loads)
        if max(pair) >= self._loads[giver] or phi >= self.potential:
            return False
        self.cuts[boundary] = cut
        self._loads, self.potential = loads, phi
        return True

    def _pair_loads(self, boundary: int, cut: int) -> tuple[float, float]:
        load, speeds = self._problem.load, self._problem.speeds
        first, end = self.cuts[boundary - 1], self.cuts[boundary + 1]
        return (
            (load[cut] - load[first]) / speeds[boundary - 1],
            (load[end] - load[cut]) / speeds[boundary],
        )

    def _options(self, giver: int, taker: int) -> set[int]:
        """The two cuts around the one that would level the stages, within what is allowed."""
        problem, load = self._problem, self._problem.load
        boundary = max(giver, taker)
        cut = self.cuts[boundary]
        first, end = self.cuts[boundary - 1], self.cuts[boundary + 1]
        keep = 0 if problem.allow_empty else 1
        if giver < taker:
            low, high = first + keep, cut - 1
            if problem.caps and low <= high:
                low = max(low, problem.earliest_start(taker, low, end))
        else:
            low, high = cut + 1, end - keep
            if problem.caps and low <= high:
                high = min(high, problem.furthest_end(taker, first, high))
        if high < low:
            return set()
        left, right = problem.speeds[boundary - 1], problem.speeds[boundary]
        target = load[first] + (load[end] - load[first]) * left / (left + right)
        level = bisect_left(load, target, low, high)
        return {level, max(level - 1, low)}
