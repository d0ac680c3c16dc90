"""The best partition and order together: an order is planned for each partition that a search looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from statistics import fmean

import numpy as np

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition.neighbours import Cuts, IntArray, neighbours, own_cuts
from dynpipe_ds.partition.prepare import prepare
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.placement import Placement
from dynpipe_ds.planning.bounds import bounds, num_ahead
from dynpipe_ds.planning.listing import SAME
from dynpipe_ds.planning.memory import activation_caps, worker_bytes_of_1f1b
from dynpipe_ds.planning.on_partition import go_on_planning_on
from dynpipe_ds.planning.planner import (
    EFFORT,
    QUICK,
    PlannedOrder,
    Tried,
    first_policies,
    fits,
    num_computations,
    seconds_of_1f1b,
)  # fmt: skip
from dynpipe_ds.simulation import Workload, simulate
from dynpipe_ds.simulation.workload import FloatArray, Seconds, links_s, table

SEARCH_EFFORT = 2 * EFFORT
"""Computations that planning partition and order together may look at: half a second on 24 stages."""

_SHORTLIST = 3  # partitions that get all policies
_PLAN = 4  # times the computations of a batch that planning one takes at least
_SHARE_OF_SEARCH = 2 / 3  # of the effort
_BOUNDS_A_COMPUTATION = 5  # bounds of one batch on one partition that take as long as looking at a computation


@dataclass(frozen=True)
class PlannedBatch:
    """A partition and the order to run it in.

    Args:
        placement: the partition.
        planned: the order, with its predicted seconds and bytes.
        present: the same for the first candidate; ``None`` where it is not allowed.
        num_computations: that the search looked at.
    """

    placement: Placement
    planned: PlannedOrder
    present: PlannedOrder | None
    num_computations: int = 0

    @property
    def seconds(self) -> float:
        """Predicted seconds of all forwards and backwards."""
        return self.planned.seconds


def plan_batch(
    profile: PipelineProfile,
    candidates: Sequence[Placement | Sequence[int]],
    *,
    worker_bytes: int | Sequence[int] | None = None,
    weight_bytes: Sequence[int] | None = None,
    activation_link_s: Seconds | None = None,
    gradient_link_s: Seconds | None = None,
    speeds: Sequence[float] | None = None,
    pinned: Sequence[int] = (),
    allow_empty: bool = False,
    effort: int = SEARCH_EFFORT,
    varying: Sequence[PipelineProfile] = (),
) -> PlannedBatch:
    """Choose a partition and an order so that a batch takes the fewest seconds.

    The best cut under a planned order is another than under 1F1B: what a stage waits for and what it may hold differ.
    The search starts from the best candidate, and from the one that a lower bound of the seconds leads to; it moves
    one boundary, or some neighbouring ones together, by one layer. Partitions whose lower bound is above the best
    seconds known are passed over. The result is never slower than 1F1B on a candidate, where that keeps the caps.
    Deterministic; of equally short ones the first.

    Args:
        profile: seconds and bytes of every layer, and M.
        candidates: partitions of the same number of stages, the present one first.
        worker_bytes: state and activations that a worker may hold, for all or for each; None: what the fullest
            worker holds under 1F1B on the first candidate.
        weight_bytes: as for :meth:`~dynpipe_ds.simulation.Workload.from_profile`.
        activation_link_s: seconds of a micro-batch's activations over every boundary; None: as the profile has them.
        gradient_link_s: the same for gradients.
        speeds: S relative speeds to divide by, when layer times are at unit speed.
        pinned: cuts that no partition may have.
        allow_empty: whether a stage may hold no layer.
        effort: how many computations to look at; 300,000 to 500,000 a second.
        varying: batches that the profile is the mean of. The slowest stage is now this one and now that one, so they
            take longer than their mean does, on some partitions more than on others. Each order is timed with all of
            them.

    Returns:
        The best partition found, and its order.

    Raises:
        ValueError: when there is no candidate, or none that is allowed and keeps the memory of the workers.
    """
    if not candidates:
        raise ValueError("candidates = []: need at least one partition to start from")
    starts = [Placement.of(candidate, num_layers=len(profile.layers)).boundaries for candidate in candidates]
    num_stages = len(starts[0]) - 1
    problem = prepare(
        profile.costs("time"), num_stages, current=starts[0], pinned=pinned, speeds=speeds, allow_empty=allow_empty
    )
    links = tuple(links_s(profile, num_stages, given) for given in (activation_link_s, gradient_link_s))
    case = _Case(profile, problem, worker_bytes, starts[0], weight_bytes, (links[0], links[1]), varying)
    met, looked_at = _search(case, starts, int(effort * _SHARE_OF_SEARCH))
    size = num_computations(num_stages, profile.num_micro_batches)
    num_listed = min(_SHORTLIST, max(1, (effort - looked_at) // (_PLAN * size)))
    shortlist = dict.fromkeys(islice(sorted(met, key=lambda cuts: met[cuts].seconds), num_listed))
    present = own_cuts(problem, starts[0])
    if present is not None and present in met:
        shortlist[present] = None  # to be compared on equal terms
    share = (effort - looked_at) // len(shortlist)
    plans = {cuts: case.plan(cuts, met[cuts].tried, share) for cuts in shortlist}
    best = min(plans, key=lambda cuts: plans[cuts].seconds)
    looked_at += sum(plan.num_computations for plan in plans.values()) + case.num_bounded // _BOUNDS_A_COMPUTATION
    at_present = plans.get(present) if present is not None else None
    return PlannedBatch(Placement.of(case.boundaries(best)), plans[best], at_present, looked_at)


@dataclass(frozen=True)
class _Met:
    """A partition that the search has looked at.

    Args:
        seconds: of a batch under the first policies, or 1F1B, as batches vary; infinite when above the limit.
        tried: those policies.
    """

    seconds: float
    tried: Tried


def _search(case: _Case, starts: Sequence[tuple[int, ...]], effort: int) -> tuple[dict[Cuts, _Met], int]:
    """Local search; returns the partitions that it met, and what it looked at."""
    allowed = _allowed(case, starts)
    met = {cuts: case.meet(cuts) for cuts in dict.fromkeys([*allowed, _descend_bound(case, allowed)])}
    left = effort - sum(each.tried.num_computations for each in met.values())
    best = min(met, key=lambda cuts: met[cuts].seconds)
    while left > 0:
        better, left = _improve(case, best, met, left)
        if better is None:
            break
        best = better
    return met, effort - left


def _improve(case: _Case, best: Cuts, met: dict[Cuts, _Met], effort: int) -> tuple[Cuts | None, int]:
    """The first shorter partition around the best one, None if there is none, and what is left of the effort."""
    around = neighbours(case.problem, best)
    least_s = case.least_s(around)
    longest_s = met[best].seconds * (1 - SAME)
    for i in np.argsort(least_s, kind="stable").tolist():
        if effort <= 0 or least_s[i] >= longest_s:
            break
        cuts = tuple(around[i].tolist())
        found = case.meet(cuts, longest_s)
        effort -= found.tried.num_computations
        if found.seconds <= longest_s:
            met[cuts] = found
            return cuts, effort
    return None, effort


def _allowed(case: _Case, starts: Sequence[tuple[int, ...]]) -> list[Cuts]:
    """The starts that are partitions of the problem and fit.

    Raises:
        ValueError: when there is none.
    """
    allowed = [cuts for start in starts if (cuts := own_cuts(case.problem, start)) is not None]
    fitting = [cuts for cuts, least_s in zip(allowed, case.least_s(np.array(allowed)), strict=True) if least_s < inf]
    if not fitting:
        raise ValueError(
            f"candidates = {[list(start) for start in starts]}: none is allowed by pinned cuts and empty stages, with "
            f"its state and one micro-batch within worker_bytes = {case.worker_bytes}; give another partition or "
            "raise the cap"
        )
    return fitting


def _descend_bound(case: _Case, starts: Sequence[Cuts]) -> Cuts:
    """From the start with the smallest bound to a partition around which none is smaller."""
    least_s = case.least_s(np.array(starts))
    best, best_s = starts[int(least_s.argmin())], float(least_s.min())
    while len(around := neighbours(case.problem, best)):
        least_s = case.least_s(around)
        if least_s.min() >= best_s * (1 - SAME):
            break
        best, best_s = tuple(around[int(least_s.argmin())].tolist()), float(least_s.min())
    return best


class _Case:
    """One problem's partitions: what they have to do, may hold and take."""

    def __init__(
        self, profile: PipelineProfile, problem: Problem, worker_bytes: int | Sequence[int] | None,
        present: tuple[int, ...], weight_bytes: Sequence[int] | None, links_s: tuple[Seconds, Seconds],
        varying: Sequence[PipelineProfile],
    ) -> None:
        self.profile, self.problem, self.links_s = profile, problem, links_s
        self.weight_bytes = profile.activation_bytes() if weight_bytes is None else list(weight_bytes)
        self.worker_bytes = worker_bytes_of_1f1b(profile, present) if worker_bytes is None else worker_bytes
        self.policies = first_policies(problem.num_stages, QUICK)
        self.varying, self.until = varying, self._until(varying or [profile])
        self.num_bounded = 0

    def _until(self, profiles: Sequence[PipelineProfile]) -> dict[str, FloatArray]:
        """Of each batch the sums over the first groups of layers, by what is summed."""
        newest = self.profile
        rows: dict[str, Sequence[Sequence[float]]] = {
            "forward": [[layer.forward_s for layer in profile.layers] for profile in profiles],
            "backward": [[layer.backward_s for layer in profile.layers] for profile in profiles],
            "weight": [[min(layer.weight_s, layer.backward_s) for layer in profile.layers] for profile in profiles],
            "trains": [[layer.backward_s > 0 for layer in newest.layers]],
            "state": [newest.state_bytes()], "activation": [newest.activation_bytes()],
        }  # fmt: skip
        starts = list(self.problem.starts)
        return {
            name: np.array([[0, *np.cumsum(values)] for values in batches])[:, starts]
            for name, batches in rows.items()
        }  # fmt: skip

    def boundaries(self, cuts: Cuts) -> tuple[int, ...]:
        return tuple(self.problem.starts[cut] for cut in cuts)

    def workloads(self, cuts: Cuts) -> list[Workload]:
        """Of the profile, and of each batch that it is the mean of."""
        return [
            Workload.from_profile(
                profile, self.boundaries(cuts), speeds=self.problem.speeds,
                weight_bytes=self.weight_bytes, activation_link_s=self.links_s[0], gradient_link_s=self.links_s[1],
            )
            for profile in (self.profile, *self.varying)
        ]  # fmt: skip

    def plan(self, cuts: Cuts, tried: Tried, effort: int) -> PlannedOrder:
        return go_on_planning_on(
            tried, self.profile, self.boundaries(cuts), self.worker_bytes, speeds=self.problem.speeds,
            weight_bytes=self.weight_bytes, activation_link_s=self.links_s[0], gradient_link_s=self.links_s[1],
            effort=effort, varying=self.varying,
        )

    def caps(self, cuts: Cuts) -> tuple[int, ...]:
        return activation_caps(self.profile, self.boundaries(cuts), self.worker_bytes)

    def least_s(self, candidates: IntArray) -> FloatArray:
        """Lower bounds of many partitions, as batches vary; infinite for those that don't fit."""
        if not len(candidates):
            return np.zeros(0)
        self.num_bounded += len(candidates) * len(self.varying)
        sums = {name: np.diff(each[:, candidates], axis=2) for name, each in self.until.items()}
        forward_s, backward_s, weight_s = (
            np.maximum(sums[name], 0.0) / self.problem.speeds for name in ("forward", "backward", "weight")
        )
        input_s = np.maximum(backward_s - weight_s, 0.0)
        rows, count = self.problem.num_stages - 1, self.profile.num_micro_batches
        trains, activation_bytes = sums["trains"][0] > 0, sums["activation"][0].astype(np.int64)
        caps = (np.array(self.worker_bytes) - sums["state"][0]).astype(np.int64)
        there_s, back_s = (
            table(name, links_s, rows, count).min(axis=1)
            for name, links_s in zip(("activation_link_s", "gradient_link_s"), self.links_s, strict=True)
        )
        found = bounds(
            forward_s, input_s, count * (forward_s + input_s), count * weight_s, there_s,
            np.where(trains.any(axis=1), trains.argmax(axis=1), 0), gradient_link_s=back_s,
            ahead_s=num_ahead(caps, activation_bytes, count) * forward_s,
        )
        return np.where((caps >= activation_bytes).all(axis=1), found.mean(axis=0), inf)

    def meet(self, cuts: Cuts, limit_s: float | None = None) -> _Met:
        """Seconds of a batch under the first policies; without a limit, under 1F1B, too."""
        (workload, *batches), caps = self.workloads(cuts), self.caps(cuts)
        if limit_s is not None:
            tried = Tried().go_on(workload, caps, self.policies, 0.0, limit_s, varying=batches)
            return _Met(tried.best_s, tried)
        usual = simulate(workload, "1f1b")
        is_allowed = fits(usual, caps)
        tried = Tried(usual).go_on(
            workload, caps, self.policies, 0.0, usual.makespan_s if is_allowed and not batches else inf, varying=batches
        )
        usual_s = seconds_of_1f1b(usual, batches, tried.best_s) if is_allowed else None
        if usual_s is None:
            return _Met(tried.best_s, tried)
        return _Met(fmean(usual_s) if usual_s else usual.makespan_s, tried)
