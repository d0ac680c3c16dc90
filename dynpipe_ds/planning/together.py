"""The best partition and order together: an order is planned for each partition that a search looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from statistics import fmean
from typing import NamedTuple

import numpy as np

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition.neighbours import Cuts, IntArray, neighbours, own_cuts
from dynpipe_ds.partition.prepare import prepare
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.placement import Placement
from dynpipe_ds.planning.bounds import bounds, num_ahead, stage_bounds
from dynpipe_ds.planning.even import even_cuts, most_groups
from dynpipe_ds.planning.listing import SAME
from dynpipe_ds.planning.memory import activation_caps, late_layers, worker_bytes_of_1f1b
from dynpipe_ds.planning.planner import (
    EFFORT,
    QUICKEST,
    RULES,
    PlannedOrder,
    Rule,
    Tried,
    fits,
    num_computations,
    rules_within,
    seconds_of_1f1b,
)  # fmt: skip
from dynpipe_ds.planning.retimed import AS_LONG
from dynpipe_ds.simulation import Simulation, Workload, simulate
from dynpipe_ds.simulation.workload import FloatArray, Seconds, links_s, table

SEARCH_EFFORT = 2 * EFFORT
"""Computations that planning partition and order together may look at: half a second on 24 stages."""

_PATIENCE = 10  # trials in a row that find nothing shorter, at least: what is left is worth more in a later search
_SHARE_IN_VAIN = 0.1  # of the effort that trials in a row may take at most if they find nothing shorter
_SHARE_OF_WALK = 0.9  # of the effort, for finding a partition by runs that are not pushed
_MOST_RUNS = 7  # of one partition: one policy, which is pushed three times
_SHARE_WHERE_VARYING = 1 / 3  # of the effort: there a plan is soon out of date, and the next one knows more batches
_EVEN = ((0.0, 4), (1.0, 6), (2.0, 4))
"""How often the idle seconds of a stage count, since an order waits for longer than it must, and how many doublings."""
_BOUNDS_A_COMPUTATION = 5  # bounds of one batch on one partition that take as long as looking at a computation
_CELLS_A_COMPUTATION = 30  # choices of a stage's groups that take as long
_MOST_CELLS = 2_000_000  # of them: 0.2 seconds, and 16 MB for each number that is known of them


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
    The search starts from the best candidate, or from a partition whose stages take about as long, of which there are
    up to three (:func:`~dynpipe_ds.planning.even.even_cuts`). By turns it moves one boundary, or some neighbouring ones
    together, by one layer, and plans the best partition known by another rule; first by rules that take little, to come
    far. Partitions whose lower bound is above the best seconds known are passed over. The result is never slower than
    1F1B on a candidate, where that keeps the caps. Deterministic; of equally short ones the first.

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
    search = _Search(case, starts)
    search.go_on(effort * (_SHARE_WHERE_VARYING if varying else 1.0))
    present = search.compare_with(own_cuts(problem, starts[0]))
    plans = {partition: partition.planned() for partition in (search.best, present) if partition is not None}
    at_present = None if present is None else plans[present]
    placement = Placement.of(case.boundaries(search.best.cuts))
    return PlannedBatch(placement, plans[search.best], at_present, search.num_computations + case.num_aside)


class _Way(NamedTuple):
    """How an order is made: by which rule, and whether gradients of weights may wait only where there is room."""

    rule: Rule
    is_late: bool


class _Partition:
    """A partition that the search has met, and what was tried on it.

    Attributes:
        cuts: the partition.
        late: layers of each stage whose gradients of weights have room to wait; empty if all have.
        ways: that were tried.
        way: the one that gave the shortest batch.
    """

    def __init__(self, case: _Case, cuts: Cuts) -> None:
        self.cuts, self._case, self._caps = cuts, case, case.caps(cuts)
        self.late = case.late(cuts, self._caps)
        self.ways: set[_Way] = set()
        self.way = _Way(RULES[0], is_late=False)
        self._tried = {is_late: Tried() for is_late in (False, True)}
        self._workloads: dict[bool, list[Workload]] = {}
        self._usual: Simulation | None = None
        self._usual_s = inf

    @property
    def seconds(self) -> float:
        """The shortest batch known on it, as batches vary."""
        return min(self._usual_s, *(tried.best_s for tried in self._tried.values()))

    def workloads(self, *, is_late: bool) -> list[Workload]:
        """Of the profile, and of each batch that it is the mean of."""
        if is_late not in self._workloads:
            self._workloads[is_late] = self._case.workloads(self.cuts, self.late if is_late else ())
        return self._workloads[is_late]

    def run_1f1b(self) -> None:
        """Time it under 1F1B, if it may run that."""
        workload, *varying = self.workloads(is_late=False)
        usual = self._usual = simulate(workload, "1f1b")
        if fits(usual, self._caps) and (seconds := seconds_of_1f1b(usual, varying, inf)) is not None:
            self._usual_s = fmean(seconds) if seconds else usual.makespan_s

    def as_here(self, way: _Way) -> _Way:
        """A way of another partition's, as it can be gone on this one."""
        return way if self.late else way._replace(is_late=False)

    def go(self, way: _Way, limit_s: float) -> int:
        """Try a way; returns how many computations that looked at."""
        self.ways.add(way)
        before, before_s = self._tried[way.is_late], self.seconds
        workload, *varying = self.workloads(is_late=way.is_late)
        tried = self._tried[way.is_late] = before.under(way.rule, workload, self._caps, limit_s, varying=varying)
        if self.seconds < before_s:
            self.way = way
        return tried.num_computations - before.num_computations

    def planned(self) -> PlannedOrder:
        """Its shortest order."""
        is_late = self._tried[True].best_s < self._tried[False].best_s
        workload, *varying = self.workloads(is_late=is_late)
        usual = self._usual or simulate(workload, "1f1b")  # no backward is split in it, so it is the same in either way
        return self._tried[is_late].planned(
            workload, self._caps, usual, late=self.late if is_late else (), varying=varying
        )


_Trial = tuple[_Partition, _Way]


class _Search:
    """Local search over partitions and ways.

    Attributes:
        best: the partition of the shortest batch.
        num_computations: that it looked at.
    """

    def __init__(self, case: _Case, starts: Sequence[tuple[int, ...]]) -> None:
        self._case = case
        self._met: dict[Cuts, _Partition] = {}
        self.num_computations = 0
        self._rules: tuple[Rule, ...] = RULES[:1]
        given = [self._meet(cuts) for cuts in _allowed(case, starts)]
        self._starts = list(dict.fromkeys([*given, *map(self._meet, case.even())]))
        for start in given:
            start.run_1f1b()
        self.best = min(given, key=lambda start: start.seconds)
        self._try(given[0], given[0].way)

    def go_on(self, effort: float) -> None:
        """Search until so much was looked at, or enough was tried in vain.

        A run that was pushed is seldom beaten by one of another partition that was not, so there the search would stay.
        """
        self._begin(effort)
        self._until_stuck(_SHARE_OF_WALK * effort, self._around)
        size = self._case.num_computations * (1 + len(self._case.varying) / AS_LONG)
        self._rules = rules_within(min(_MOST_RUNS, (effort - self.num_computations) / size), QUICKEST)
        if effort and not self._is_shortest():
            self._try(self.best, self.best.way._replace(rule=self._rules[0]))
        self._until_stuck(effort, self._on_starts, self._around)

    def _begin(self, effort: float) -> None:
        """Try what it starts from, that of the smallest bound in any case."""
        for i, (cuts, least_s) in enumerate(self._by_bound([start.cuts for start in self._starts[1:]])):
            if least_s >= self.best.seconds * (1 - SAME) or (i and self.num_computations >= effort):
                return
            start = self._met[cuts]
            self._try(start, start.as_here(self.best.way))

    def _until_stuck(self, effort: float, *partitions: Callable[[], Iterator[_Trial]]) -> None:
        trials, num_failed = self._by_turns(*partitions, self._ways), 0
        patience = max(_PATIENCE, _SHARE_IN_VAIN * effort / self._case.num_computations)
        while num_failed < patience and self.num_computations < effort:
            before, trial = self.best, next(trials, None)
            if trial is None:
                return
            num_failed += 1
            if self._try(*trial):  # then the other kind has its turn
                turns = (*partitions, self._ways) if self.best is before else (self._ways, *partitions)
                trials, num_failed = self._by_turns(*turns), 0

    def compare_with(self, cuts: Cuts | None) -> _Partition | None:
        """Try the best way on another partition, which has been a start, to compare it on equal terms.

        Returns:
            That partition; ``None`` if it is not allowed.
        """
        partition = None if cuts is None else self._met.get(cuts)
        if partition is not None and partition is not self.best:
            way = partition.as_here(self.best.way)
            if way not in partition.ways:
                self.num_computations += partition.go(way, partition.seconds)
            if partition.seconds <= self.best.seconds:
                self.best = partition
        return partition

    def _meet(self, cuts: Cuts) -> _Partition:
        if cuts not in self._met:
            self._met[cuts] = _Partition(self._case, cuts)
        return self._met[cuts]

    def _try(self, partition: _Partition, way: _Way) -> bool:
        """Whether a way on a partition is shorter than all before."""
        before_s = self.best.seconds
        self.num_computations += partition.go(way, before_s)
        is_shorter = partition.seconds <= before_s * (1 - SAME)
        if is_shorter:
            self.best = partition
        return is_shorter

    @staticmethod
    def _by_turns(*kinds: Callable[[], Iterator[_Trial]]) -> Iterator[_Trial]:
        return (trial for turn in zip_longest(*(kind() for kind in kinds)) for trial in turn if trial is not None)

    def _is_shortest(self) -> bool:
        """Whether no order is shorter on the best partition."""
        return self.best.seconds <= float(self._case.least_s(np.array([self.best.cuts]))[0]) * (1 + SAME)

    def _on_starts(self) -> Iterator[_Trial]:
        """All rules on what the search started from: what they make of a partition differs by a percent or two."""
        if self._is_shortest():
            return
        for start in self._starts:
            ways = (start.as_here(self.best.way._replace(rule=rule)) for rule in self._rules)
            yield from ((start, way) for way in ways if way not in start.ways)

    def _around(self) -> Iterator[_Trial]:
        """The best way on partitions around the best one, those of small bounds first."""
        best, longest_s = self.best, self.best.seconds * (1 - SAME)
        for cuts, least_s in self._by_bound(neighbours(self._case.problem, best.cuts)):
            if least_s >= longest_s:
                return
            partition = self._meet(cuts)
            way = partition.as_here(best.way)
            if way not in partition.ways:
                yield partition, way

    def _by_bound(self, many: IntArray | Sequence[Cuts]) -> Iterator[tuple[Cuts, float]]:
        """Partitions and their bounds, small ones first; infinite where it does not fit."""
        cuts = np.array(many, dtype=np.int64).reshape(-1, self._case.problem.num_stages + 1)
        least_s = self._case.least_s(cuts)
        for i in np.argsort(least_s, kind="stable").tolist():
            yield tuple(cuts[i].tolist()), float(least_s[i])

    def _ways(self) -> Iterator[_Trial]:
        """Other ways on the best partition, unless none can be shorter there."""
        best = self.best
        if self._is_shortest():
            return
        kinds = (best.way.is_late, not best.way.is_late) if best.late else (False,)
        nearest = (_Way(best.way.rule, is_late) for is_late in kinds)
        for way in dict.fromkeys((*nearest, *(_Way(rule, is_late) for is_late in kinds for rule in self._rules))):
            if way not in best.ways:
                yield best, way


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
        self.varying, self.until = varying, self._until(varying or [profile])
        self.num_computations = num_computations(problem.num_stages, profile.num_micro_batches)  # of a batch
        self._there_s, self._back_s = (
            table(name, seconds, problem.num_stages - 1, profile.num_micro_batches).min(axis=1)
            for name, seconds in zip(("activation_link_s", "gradient_link_s"), links_s, strict=True)
        )
        self._num_bounded = self._num_cells = 0

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

    @property
    def num_aside(self) -> int:
        """Computations that could be looked at in the time that bounds and even partitions have taken."""
        return self._num_bounded // _BOUNDS_A_COMPUTATION + self._num_cells // _CELLS_A_COMPUTATION

    def boundaries(self, cuts: Cuts) -> tuple[int, ...]:
        return tuple(self.problem.starts[cut] for cut in cuts)

    def workloads(self, cuts: Cuts, late: Sequence[int]) -> list[Workload]:
        """Of the profile, and of each batch that it is the mean of."""
        return [
            Workload.from_profile(
                profile, self.boundaries(cuts), speeds=self.problem.speeds, weight_bytes=self.weight_bytes, late=late,
                activation_link_s=self.links_s[0], gradient_link_s=self.links_s[1],
            )
            for profile in (self.profile, *self.varying)
        ]  # fmt: skip

    def caps(self, cuts: Cuts) -> tuple[int, ...]:
        return activation_caps(self.profile, self.boundaries(cuts), self.worker_bytes)

    def late(self, cuts: Cuts, caps: Sequence[int]) -> tuple[int, ...]:
        return late_layers(self.profile, self.boundaries(cuts), caps, self.weight_bytes)

    def least_s(self, candidates: IntArray) -> FloatArray:
        """Lower bounds of many partitions, as batches vary; infinite for those that don't fit."""
        if not len(candidates):
            return np.zeros(0)
        self._num_bounded += len(candidates) * len(self.varying)
        sums = {name: np.diff(each[:, candidates], axis=2) for name, each in self.until.items()}
        forward_s, backward_s, weight_s = (
            np.maximum(sums[name], 0.0) / self.problem.speeds for name in ("forward", "backward", "weight")
        )
        input_s = np.maximum(backward_s - weight_s, 0.0)
        count = self.profile.num_micro_batches
        trains, activation_bytes = sums["trains"][0] > 0, sums["activation"][0].astype(np.int64)
        caps = (np.array(self.worker_bytes) - sums["state"][0]).astype(np.int64)
        found = bounds(
            forward_s, input_s, count * (forward_s + input_s), count * weight_s, self._there_s,
            np.where(trains.any(axis=1), trains.argmax(axis=1), 0), gradient_link_s=self._back_s,
            ahead_s=num_ahead(caps, activation_bytes, count) * forward_s,
        )
        return np.where((caps >= activation_bytes).all(axis=1), found.mean(axis=0), inf)

    def even(self) -> list[Cuts]:
        """Partitions whose stages take about as long, by what they compute and what they can't but be idle."""
        busy_s, idle_s = self._stage_seconds()
        self._num_cells += busy_s.size
        found = (even_cuts(busy_s + share * idle_s, num_doublings) for share, num_doublings in _EVEN)
        return [cuts for cuts in dict.fromkeys(found) if cuts is not None]

    def _stage_seconds(self) -> tuple[FloatArray, FloatArray]:
        """What stages compute, and how long they are idle at least, for :func:`even_cuts`."""
        num_stages, count = self.problem.num_stages, self.profile.num_micro_batches
        until = {name: each.mean(axis=0) for name, each in self.until.items()}
        input_s = until["backward"] - until["weight"]
        ends = np.arange(self.problem.num_groups + 1)[:, None]
        width = most_groups(until["forward"] + until["backward"], num_stages)
        starts = ends - np.arange(min(width, _MOST_CELLS // (num_stages * len(ends))) + 1)
        is_allowed = (starts >= 0) & ((starts < ends) | self.problem.allow_empty)
        starts = np.maximum(starts, 0)
        held = {name: each[ends] - each[starts] for name, each in until.items()}
        speeds = np.array(self.problem.speeds)[:, None, None]
        usual = float(np.mean(self.problem.speeds))
        forward_s, backward_s, weight_s = (np.maximum(held[n], 0.0) / speeds for n in ("forward", "backward", "weight"))
        awaited_s = count * (forward_s + np.maximum(backward_s - weight_s, 0.0))
        before_s, behind_s = (
            np.array(sums)[:, None, None]
            for sums in ([0.0, *np.cumsum(self._there_s)], [*np.cumsum((self._there_s + self._back_s)[::-1])[::-1], 0.0])
        )
        rest_s = (until["forward"][-1] + input_s[-1] - until["forward"][ends] - input_s[ends]) / usual
        worker_bytes = np.broadcast_to(np.array(self.worker_bytes), num_stages)[:, None, None]
        caps, activation_bytes = (worker_bytes - held["state"]).astype(np.int64), held["activation"].astype(np.int64)
        least_s = stage_bounds(
            until["forward"][starts] / usual + before_s, forward_s + rest_s + behind_s,
            num_ahead(caps, activation_bytes, count) * forward_s, awaited_s, count * weight_s,
            input_s[starts] / usual, until["trains"][ends] > 0,
        )
        busy_s = awaited_s + count * weight_s
        return np.where(is_allowed & (caps >= activation_bytes), busy_s, inf), least_s - busy_s
