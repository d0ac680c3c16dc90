"""The shortest batch, by local search with the simulator as objective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition.neighbours import MOST_AT_ONCE, Cuts, IntArray, neighbours, own_cuts
from dynpipe_ds.partition.optimal import optimal
from dynpipe_ds.partition.partitioner import Refined, cuts_of, partitioner
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.simulation.waves import makespans
from dynpipe_ds.simulation.workload import FloatArray, Seconds, frozen_boundaries, table

FORWARD_SHARE = 1 / 3
"""Of a layer's cost, where no times tell: a backward takes about two forwards."""

_SAME = 1e-9  # makespans that differ by less, relatively, are the same: sums round
_MOST_CELLS = 10**8  # stages x waves x partitions that one search simulates, about a second


@partitioner()
def simulated(
    problem: Problem,
    *,
    profile: PipelineProfile | None = None,
    activation_link_s: Seconds = 0.0,
    gradient_link_s: Seconds = 0.0,
) -> Refined:
    """Refine the partition with the smallest bottleneck until no small change shortens the batch.

    The bottleneck decides a batch of many micro-batches; of few, filling and draining count as well, and
    so do slow links: a light first or last stage, or a boundary elsewhere, may then be better than the
    smallest bottleneck. Objective: the simulated makespan of 1F1B. Steepest descent from the better of the
    ``optimal`` and the current partition; a step shifts one cut, or some neighbouring ones together, by one
    layer. It ends in a local optimum, which is never worse than ``optimal``. Deterministic; of equally
    short batches, the partition that moves the fewest bytes.

    With links that take time, costs must be seconds (``cost = "time"``).

    Args:
        problem: The problem.
        profile: Tells the number of micro-batches and which share of a layer's cost is forward; None: as
            many micro-batches as stages, and :data:`FORWARD_SHARE`.
        activation_link_s: Seconds of a micro-batch's activations over every boundary.
        gradient_link_s: The same for the gradients.
    """
    costs, num_stages = problem.costs, problem.num_stages
    if profile is not None and len(profile.layers) != len(costs):
        raise ValueError(f"the profile has {len(profile.layers)} layers, the costs {len(costs)}")
    num_micro_batches = num_stages if profile is None else profile.num_micro_batches
    batch = _Batch(problem, _split(costs, profile), num_micro_batches, activation_link_s, gradient_link_s)
    present = own_cuts(problem, problem.current)
    starts = [tuple(cuts_of(optimal, problem))] if present is None else [present, tuple(cuts_of(optimal, problem))]
    return Refined(*_descend(batch, starts))


def _descend(batch: _Batch, starts: list[Cuts]) -> tuple[Cuts, int]:
    """The partition where the descent ends, and the number of its steps."""
    best_s, best = batch.best_of(np.array(starts))
    most_steps = max(1, batch.rounds_within(_MOST_CELLS))
    for steps in range(most_steps):
        around = neighbours(batch.problem, best)
        if not len(around):
            return best, steps
        next_s, nearest = batch.best_of(around)
        if next_s >= best_s * (1 - _SAME):
            return best, steps
        best_s, best = next_s, nearest
    return best, most_steps


def _split(costs: Sequence[float], profile: PipelineProfile | None) -> tuple[list[float], list[float]]:
    """Forward and backward part of every layer's cost."""
    if profile is not None and list(costs) == profile.costs("time"):
        return [layer.forward_s for layer in profile.layers], [layer.backward_s for layer in profile.layers]
    shares = [FORWARD_SHARE] * len(costs)
    if profile is not None:
        shares = [y.forward_s / y.seconds if y.seconds else FORWARD_SHARE for y in profile.layers]
    forward = [float(cost) * share for cost, share in zip(costs, shares, strict=True)]
    return forward, [float(cost) - part for cost, part in zip(costs, forward, strict=True)]


class _Batch:
    """Makespans of partitions of one problem.

    Args:
        problem: the groups, speeds and bytes.
        costs: forward and backward cost of every layer.
        num_micro_batches: M.
        activation_link_s: of a micro-batch over every boundary.
        gradient_link_s: the same for the gradients.
    """

    def __init__(
        self, problem: Problem, costs: tuple[list[float], list[float]], num_micro_batches: int,
        activation_link_s: Seconds, gradient_link_s: Seconds,
    ) -> None:
        starts, (forward, backward) = list(problem.starts), costs
        self.problem, self.num_micro_batches = problem, num_micro_batches
        self.forward_until = np.array(list(accumulate(forward, initial=0.0)))[starts]
        self.backward_until = np.array(list(accumulate(backward, initial=0.0)))[starts]
        self.trains_until = np.array(list(accumulate((b > 0 for b in backward), initial=0)))[starts]
        self.speeds = np.array(problem.speeds)
        rows = problem.num_stages - 1
        self.activation_link_s = table("activation_link_s", activation_link_s, rows, num_micro_batches)
        self.gradient_link_s = table("gradient_link_s", gradient_link_s, rows, num_micro_batches)

    def rounds_within(self, num_cells: int) -> int:
        waves = 2 * (self.num_micro_batches + self.problem.num_stages)
        return num_cells // (MOST_AT_ONCE * waves * self.problem.num_stages)

    def best_of(self, candidates: IntArray) -> tuple[float, Cuts]:
        """The shortest, then the one that moves the fewest bytes, then the first."""
        seconds = self.makespans(candidates)
        least_s = float(seconds.min())
        shortest = map(tuple, candidates[seconds <= least_s * (1 + _SAME)].tolist())
        return least_s, min(shortest, key=lambda cuts: self.problem.plan(cuts).bytes_to_move)

    def makespans(self, cuts: IntArray) -> FloatArray:
        forward, backward = (np.diff(u[cuts], axis=1) / self.speeds for u in (self.forward_until, self.backward_until))
        trains = np.diff(self.trains_until[cuts], axis=1) > 0  # counted, as differences of sums may round
        backward[~trains] = 0.0
        frozen = [frozen_boundaries(row) for row in trains.astype(float).tolist()]
        return makespans(
            np.maximum(forward, 0.0), np.maximum(backward, 0.0), self.num_micro_batches,
            activation_link_s=self.activation_link_s, gradient_link_s=self.gradient_link_s, frozen_boundaries=frozen,
        )
