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
from dynpipe_ds.placement import Placement
from dynpipe_ds.planning.partitions import Partitions
from dynpipe_ds.planning.planner import (
    EFFORT,
    QUICKEST,
    RULES,
    PlannedOrder,
    Rule,
    Tried,
    fits_1f1b,
    rules_within,
)  # fmt: skip
from dynpipe_ds.planning.retimed import AS_LONG, usual_s
from dynpipe_ds.planning.runs import SAME, Work
from dynpipe_ds.simulation.workload import Seconds, links_s

SEARCH_EFFORT = 2 * EFFORT
"""Computations that planning partition and order together may look at: half a second on 24 stages."""

_PATIENCE = 10  # trials in a row that find nothing shorter, at least: what is left is worth more in a later search
_SHARE_IN_VAIN = 0.1  # of the effort that trials in a row may take at most if they find nothing shorter
_SHARE_OF_WALK = 0.9  # of the effort, for finding a partition by runs that are not pushed
_MOST_RUNS = 7  # of one partition: one policy, which is pushed three times
_SHARE_WHERE_VARYING = 1 / 3  # of the effort: there a plan is soon out of date, and the next one knows more batches


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
        effort: how many computations to look at; 400,000 a second or so, compiled 4 million.
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
    partitions = Partitions(profile, problem, worker_bytes, starts[0], weight_bytes, (links[0], links[1]), varying)
    search = _Search(partitions, starts)
    search.go_on(effort * (_SHARE_WHERE_VARYING if varying else 1.0))
    present = search.compare_with(own_cuts(problem, starts[0]))
    plans = {partition: partition.planned() for partition in (search.best, present) if partition is not None}
    at_present = None if present is None else plans[present]
    num_computations = search.num_computations + partitions.num_aside
    return PlannedBatch(partitions.placement(search.best.cuts), plans[search.best], at_present, num_computations)


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

    def __init__(self, partitions: Partitions, cuts: Cuts) -> None:
        self.cuts, self._partitions, self._caps = cuts, partitions, partitions.caps(cuts)
        self.late = partitions.late(cuts, self._caps)
        self.ways: set[_Way] = set()
        self.way = _Way(RULES[0], is_late=False)
        self._tried = {is_late: Tried() for is_late in (False, True)}
        self._works: dict[bool, list[Work]] = {}
        self._usual_s = inf

    @property
    def seconds(self) -> float:
        """The shortest batch known on it, as batches vary."""
        return min(self._usual_s, *(tried.best_s for tried in self._tried.values()))

    def works(self, *, is_late: bool) -> list[Work]:
        """Of the profile, and of each batch that it is the mean of."""
        if is_late not in self._works:
            self._works[is_late] = self._partitions.works(self.cuts, self.late if is_late else (), self._caps)
        return self._works[is_late]

    def run_1f1b(self) -> None:
        """Time it under 1F1B, if it may run that."""
        work, *varying = self.works(is_late=False)
        partitions = self._partitions
        if fits_1f1b(partitions.activation_bytes(self.cuts), partitions.profile.num_micro_batches, self._caps):
            self._usual_s = fmean(map(usual_s, varying or [work]))

    def as_here(self, way: _Way) -> _Way:
        """A way of another partition's, as it can be gone on this one."""
        return way if self.late else way._replace(is_late=False)

    def go(self, way: _Way, limit_s: float) -> int:
        """Try a way; returns how many computations that looked at."""
        self.ways.add(way)
        before, before_s = self._tried[way.is_late], self.seconds
        work, *varying = self.works(is_late=way.is_late)
        tried = self._tried[way.is_late] = before.under(way.rule, work, limit_s, varying=varying)
        if self.seconds < before_s:
            self.way = way
        return tried.num_computations - before.num_computations

    def planned(self) -> PlannedOrder:
        """Its shortest order."""
        is_late = self._tried[True].best_s < self._tried[False].best_s
        late = self.late if is_late else ()
        workload = self._partitions.workload(self.cuts, late)
        return self._tried[is_late].planned(workload, self._caps, self.works(is_late=is_late), late=late)


_Trial = tuple[_Partition, _Way]


class _Search:
    """Local search over partitions and ways.

    Attributes:
        best: the partition of the shortest batch.
        num_computations: that it looked at.
    """

    def __init__(self, partitions: Partitions, starts: Sequence[tuple[int, ...]]) -> None:
        self._partitions = partitions
        self._met: dict[Cuts, _Partition] = {}
        self.num_computations = 0
        self._rules: tuple[Rule, ...] = RULES[:1]
        given = [self._meet(cuts) for cuts in _allowed(partitions, starts)]
        self._starts = list(dict.fromkeys([*given, *map(self._meet, partitions.even())]))
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
        size = self._partitions.num_computations * (1 + len(self._partitions.varying) / AS_LONG)
        self._rules = rules_within(min(_MOST_RUNS, (effort - self.num_computations) / size), QUICKEST)
        if effort and not self._is_shortest():
            self._try(self.best, self.best.way._replace(rule=self._rules[0]))
        self._until_stuck(effort, self._on_starts, self._around)

    def _begin(self, effort: float) -> None:
        """Try what it starts from, that of the smallest bound in any partitions."""
        for i, (cuts, least_s) in enumerate(self._by_bound([start.cuts for start in self._starts[1:]])):
            if least_s >= self.best.seconds * (1 - SAME) or (i and self.num_computations >= effort):
                return
            start = self._met[cuts]
            self._try(start, start.as_here(self.best.way))

    def _until_stuck(self, effort: float, *partitions: Callable[[], Iterator[_Trial]]) -> None:
        trials, num_failed = self._by_turns(*partitions, self._ways), 0
        patience = max(_PATIENCE, _SHARE_IN_VAIN * effort / self._partitions.num_computations)
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
            self._met[cuts] = _Partition(self._partitions, cuts)
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
        return self.best.seconds <= float(self._partitions.least_s(np.array([self.best.cuts]))[0]) * (1 + SAME)

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
        for cuts, least_s in self._by_bound(neighbours(self._partitions.problem, best.cuts)):
            if least_s >= longest_s:
                return
            partition = self._meet(cuts)
            way = partition.as_here(best.way)
            if way not in partition.ways:
                yield partition, way

    def _by_bound(self, many: IntArray | Sequence[Cuts]) -> Iterator[tuple[Cuts, float]]:
        """Partitions and their bounds, small ones first; infinite where it does not fit."""
        cuts = np.array(many, dtype=np.int64).reshape(-1, self._partitions.problem.num_stages + 1)
        least_s = self._partitions.least_s(cuts)
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


def _allowed(partitions: Partitions, starts: Sequence[tuple[int, ...]]) -> list[Cuts]:
    """The starts that are partitions of the problem and fit.

    Raises:
        ValueError: when there is none.
    """
    allowed = [cuts for start in starts if (cuts := own_cuts(partitions.problem, start)) is not None]
    bounds_s = partitions.least_s(np.array(allowed))
    fitting = [cuts for cuts, least_s in zip(allowed, bounds_s, strict=True) if least_s < inf]
    if not fitting:
        raise ValueError(
            f"candidates = {[list(start) for start in starts]}: none is allowed by pinned cuts and empty stages, with "
            f"its state and one micro-batch within worker_bytes = {partitions.worker_bytes}; give another partition or "
            "raise the cap"
        )
    return fitting
