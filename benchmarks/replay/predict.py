"""The same training run on paper: the simulator for batches, the engine's own balancer for decisions.

No engine, no communication: for more replicas, more stages or longer runs than the machine can replay. What the
library's work costs is the case's own constants, as in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.replay.case import METHODS, WARM_UP, Case, Move, Result, first_boundaries
from benchmarks.replay.clocks import Costs
from benchmarks.traces import TraceBatch
from benchmarks.traces.trace import as_profile
from dynpipe_ds import LayerProfile, PipelineProfile, StageProfile
from dynpipe_ds.decide import Balancer
from dynpipe_ds.partition import Placement, Plan, optimal, simulated
from dynpipe_ds.planning import agree_on_pace, compile_planning, is_worth_compiling, pace
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Simulation, Timetable, Workload, simulate

Table = Any  # of numbers: layer x micro-batch


def predict(case: Case, start: Sequence[int] | None = None, until: int | None = None) -> Result:
    """Simulate a run.

    Args:
        case: the run; its clock does not matter. A batch of several replicas ends with the slowest.
        start: the first partition; ``None``: the method's.
        until: how many of its batches to run; ``None``: all.

    Returns:
        Its result, of kind ``"simulation"``.

    Raises:
        ValueError: if workers drop out.
    """
    if case.leaves:
        raise ValueError(f"leaves = {case.leaves}: workers that drop out can be replayed, not simulated")
    run = _Run(case, start)
    for batch in range(until or case.num_batches):
        run.train_batch(batch)
    return run.result


def ideal_s(case: Case) -> float:
    """Least seconds of the timed batches: every batch on the best partition known for it, and no overhead at all.

    Args:
        case: the run; its method does not matter.

    Returns:
        Simulated seconds, links as the case says, all else free.
    """
    return math.fsum(ideal_batches_s(case)[WARM_UP:])


def ideal_batches_s(case: Case) -> list[float]:
    """The same for every batch.

    Args:
        case: the run; its method does not matter.
    """
    trace, found = case.load_trace(), []
    known: dict[int, float] = {}
    anything = first_boundaries(METHODS[case.method], trace, case.num_stages)
    for batch in range(case.num_batches):
        moment = trace.at(batch, case.num_batches)
        if moment.batch in known:
            found.append(known[moment.batch])
            continue
        at_unit_speed = replace(case, speeds=(1.0,) * case.num_stages)
        profile = measured(at_unit_speed, moment, anything, batch, None, Costs())
        costs = profile.costs("time")
        partitions = {
            tuple(optimal(costs, case.num_stages, speeds=case.stage_speeds).boundaries),
            tuple(simulated(costs, case.num_stages, speeds=case.stage_speeds, profile=profile).boundaries),
        }
        seconds = min(
            max(
                simulate(case.workload(moment, parts, batch, replica=r, costs=Costs())).batch_s
                for r in range(case.replicas)
            )
            for parts in partitions
        )
        found.append(seconds)
        if not case.varies_in(moment):
            known[moment.batch] = seconds
    return found


class _Simulated:
    """A case's batches; what is the same in the next batch, too, is not worked out again."""

    def __init__(self, case: Case) -> None:
        self.case, self.costs = case, (case.known_costs(), case.told_costs())
        self._ran: tuple[tuple[object, ...], list[list[Simulation]]] | None = None
        self._profile: tuple[tuple[object, ...], PipelineProfile] | None = None
        self._timetable: Timetable | None = None

    def batch(
        self, moment: TraceBatch, boundaries: tuple[int, ...], batch: int, order: Order | None
    ) -> list[list[Simulation]]:
        """What ran, and what the simulator would say of it; all replicas of each.

        Args:
            moment: the trace's batch.
            boundaries: S + 1 layer indices.
            batch: number of the batch.
            order: that it runs; ``None``: 1F1B.
        """
        key = self._key(moment, boundaries, batch, order)
        if self._ran is None or self._ran[0] != key:
            self._ran = key, [
                [
                    self._simulate(
                        self.case.workload(moment, boundaries, batch, replica=r, costs=costs, order=order), order
                    )
                    for r in range(self.case.replicas)
                ]
                for costs in self.costs
            ]
        return self._ran[1]

    def profile(
        self, moment: TraceBatch, boundaries: tuple[int, ...], batch: int, order: Order | None
    ) -> PipelineProfile:
        """What the engine would have profiled, see :func:`measured`.

        Args:
            moment: the trace's batch.
            boundaries: S + 1 layer indices.
            batch: number of the batch.
            order: that it ran; ``None``: 1F1B.
        """
        key = self._key(moment, boundaries, batch, order)
        if self._profile is None or self._profile[0] != key:
            self._profile = key, measured(self.case, moment, boundaries, batch, order, self.costs[0])
        return replace(self._profile[1], batch=batch)

    def _key(
        self, moment: TraceBatch, boundaries: tuple[int, ...], batch: int, order: Order | None
    ) -> tuple[object, ...]:
        varying = batch if self.case.varies_in(moment) else None
        return moment.batch, boundaries, varying, id(order)

    def _simulate(self, workload: Workload, order: Order | None) -> Simulation:
        if order is None:
            return simulate(workload)
        kept = self._timetable
        if kept is None or kept.order is not order or kept.frozen_boundaries != workload.frozen_boundaries:
            self._timetable = kept = Timetable(order, workload.frozen_boundaries)
        return kept.simulation(workload)


class _Run:
    """One run, batch after batch, as :meth:`dynpipe_ds.training.Training.train_batch` goes through it."""

    def __init__(self, case: Case, start: Sequence[int] | None) -> None:
        self.case, self.trace, method = case, case.load_trace(), METHODS[case.method]
        self.costs = case.known_costs()
        is_worth_it = is_worth_compiling(case.num_stages, case.num_micro_batches)
        agree_on_pace(is_compiled=is_worth_it and compile_planning())
        self.balancer = Balancer.from_section(method.section(case.every, case.stage_speeds))
        self.boundaries = tuple(start or first_boundaries(method, self.trace, case.num_stages))
        self.result = Result(case, "simulation", 0.0, [], [], [], [], 0.0, 0.0, 0.0, 1.0, list(self.boundaries))
        self._told = self.trace.at(0, case.num_batches)
        self._simulated = _Simulated(case)
        self._orders: set[Order | None] = set()
        self._own_s = self._move_s = 0.0

    def train_batch(self, batch: int) -> None:
        case, result = self.case, self.result
        moment = self.trace.at(batch, case.num_batches)
        batch_s = self._notice_change(moment)
        is_profiled = self.balancer.wants_profile(batch)
        order = self.balancer.ordering.next(is_profiled=is_profiled)
        self._orders.add(order)
        result.num_orders = len(self._orders)
        ran, told = self._simulated.batch(moment, self.boundaries, batch, order)
        result.told_s.append(max(run.batch_s for run in told))
        result.engine_s.append(max(run.batch_s for run in ran))
        result.bubbles.append(fmean(run.bubble_ratio for run in ran))
        result.stages_s.append([fmean(s) for s in zip(*([t.busy_s for t in r.stages] for r in ran), strict=True)])
        batch_s += result.engine_s[-1] + self.costs.batch_s
        if is_profiled:
            profile = self._simulated.profile(moment, self.boundaries, batch, order)
            batch_s += self._balance(batch, replace(profile, stages=_stages(ran)))
        result.batches_s.append(batch_s)
        result.wall_s += batch_s * (batch >= WARM_UP)

    def _notice_change(self, moment: TraceBatch) -> float:
        """Tell the balancer that layers were frozen or have other parameters; returns what that took."""
        kinds = []
        if moment.parameter_bytes != self._told.parameter_bytes:
            kinds.append("replace")
        if moment.frozen_layers != self._told.frozen_layers:
            kinds.append("freeze")
            if moment.frozen_layers < self._told.frozen_layers:
                self.balancer.ordering.adopt(None, self.boundaries)
        self._told = moment
        for _ in kinds:
            self.balancer.expect_change()
        return sum(self._work_s(kind) for kind in kinds)

    def _work_s(self, kind: str) -> float:
        return self.costs.work_s.get(kind, 0.0)

    def _balance(self, batch: int, profile: PipelineProfile) -> float:
        """Observe, decide, move; returns what that took."""
        balancer, result, is_timed = self.balancer, self.result, batch >= WARM_UP
        profile_s, observe_s, decide_s = map(self._work_s, ("profile", "observe", "decide"))
        if self._move_s:
            balancer.record_cost(self._move_s)
        balancer.observe(profile, profile_s + self._own_s)
        decided = balancer.decide(batch, self.boundaries)
        moves = decided is not None and decided[1].rebalance and tuple(decided[0].boundaries) != self.boundaries
        there = decided[0].boundaries if decided is not None and moves else self.boundaries
        order = balancer.ordering.choose(balancer.smoothed(), there)
        decide_s += balancer.ordering.num_looked_at / (pace().computations_per_s * self.costs.planning_speed)
        self._own_s, self._move_s = observe_s + decide_s * (not moves), 0.0
        seconds = profile_s + observe_s + decide_s
        result.profiling_s += is_timed * (profile_s + observe_s)
        result.planning_s += is_timed * decide_s
        if decided is not None and moves:
            seconds += self._move(batch, decided[0], profile, decide_s)
        balancer.ordering.adopt(order, self.boundaries)
        return seconds

    def _move(self, batch: int, plan: Plan, profile: PipelineProfile, decide_s: float) -> float:
        most_bytes = _most_bytes(profile.moved_bytes(), self.boundaries, plan.boundaries)
        seconds = self._work_s("move") + most_bytes / self.costs.bytes_per_s
        self._move_s = decide_s + seconds
        self.boundaries = tuple(plan.boundaries)
        self.balancer.ordering.adopt(None, self.boundaries)
        self.balancer.moved(batch, plan.bytes_to_move)
        result = self.result
        result.moves.append(Move(batch + 1, list(self.boundaries), decide_s, seconds, plan.bytes_to_move))
        result.migrating_s += seconds * (batch >= WARM_UP)
        return seconds


def measured(
    case: Case, moment: TraceBatch, boundaries: Sequence[int], batch: int, order: Order | None, costs: Costs
) -> PipelineProfile:
    """What the engine would have profiled: means over micro-batches and replicas, on workers of their speed.

    Args:
        case: the run.
        moment: the trace's batch.
        boundaries: S + 1 layer indices.
        batch: number of the batch.
        order: that it ran; ``None``: 1F1B.
        costs: of passes; the layer that a pass begins with has them.

    Returns:
        The profile, without stages.
    """
    trace, count = case.load_trace(), case.num_micro_batches
    spans = list(pairwise(boundaries))
    slow = np.repeat(1.0 / case.worker_speeds, [high - low for low, high in spans], axis=0)
    factors = np.mean([
        slow[:, r, None] * case.micro_batch_factors(moment, batch, r) for r in range(case.replicas)
    ], axis=0)  # fmt: skip
    forward_s, backward_s = (np.array(s)[:, None] * factors for s in (moment.forward_s, moment.backward_s))
    weight_s = case.weight_share * backward_s
    input_s = backward_s - weight_s
    split = np.zeros((len(trace.layers), count), dtype=bool)
    for stage, (low, high) in enumerate(spans):
        if low < high:
            forward_s[low] += costs.forward_s
            if high > moment.frozen_layers:
                first_half_s = costs.backward_s * (low > moment.frozen_layers)  # no gradient is sent: nothing is done
                for table, added_s in ((backward_s, costs.backward_s), (input_s, first_half_s),
                                       (weight_s, costs.weight_s)):  # fmt: skip
                    table[high - 1] += added_s
        if order is not None:
            split[low:high, list(order.split(stage))] = True
    whole_s, both_s = _means(backward_s, ~split), _means(input_s + weight_s, split)
    here = replace(moment, forward_s=tuple(forward_s.mean(1).tolist()), backward_s=tuple(np.where(
        whole_s > 0, whole_s, both_s).tolist()))  # fmt: skip
    profile = as_profile(trace, here, boundaries, count, batch)
    there_s, back_s = case.links_s(batch)
    trips_s = (there_s + back_s)[:, 0] / 2 + costs.message_s  # the first micro-batch
    ends = [high for _, high in spans[:-1]]
    link_s = [s if high > moment.frozen_layers else None for high, s in zip(ends, trips_s.tolist(), strict=True)]
    layers = _with_halves(profile.layers, whole_s, both_s, _means(weight_s, split))
    return replace(profile, link_s=tuple(link_s), layers=tuple(layers))


def _means(seconds: Table, counts: Table) -> Table:
    """Of each layer the mean over some micro-batches; 0 where there is none."""
    return (seconds * counts).sum(1) / np.maximum(1, counts.sum(1))


def _with_halves(
    layers: Sequence[LayerProfile], wholes_s: Table, boths_s: Table, weights_s: Table
) -> list[LayerProfile]:
    """As ``gather_profile`` puts layers together."""
    compared = (wholes_s > 0) & (weights_s > 0)
    added = max(0.0, float(boths_s[compared].sum() / wholes_s[compared].sum() - 1.0)) if compared.any() else 0.0
    found = []
    for layer, whole_s, both_s, weight_s in zip(
        layers, wholes_s.tolist(), boths_s.tolist(), weights_s.tolist(), strict=True
    ):
        split_s = added * whole_s if weight_s else 0.0
        later_s = weight_s / both_s * (layer.backward_s + split_s) if both_s else 0.0
        found.append(replace(layer, weight_s=later_s, split_s=split_s))
    return found


def _stages(runs: Sequence[Simulation]) -> tuple[StageProfile, ...]:
    """Means over replicas."""
    batch_s = fmean(run.batch_s for run in runs)
    rows = zip(*(run.stages for run in runs), strict=True)
    return tuple(
        StageProfile(
            busy_s=fmean(one.busy_s for one in row), fill_drain_s=fmean(one.fill_s + one.drain_s for one in row),
            waiting_s=fmean(one.waiting_s + one.transfer_s for one in row), step_s=fmean(one.step_s for one in row),
            batch_s=batch_s, peak_memory_bytes=0,
            replicas_busy_s=tuple(one.busy_s for one in row) if len(row) > 1 else (),
        )
        for row in rows
    )


def _most_bytes(layer_bytes: Sequence[int], before: Sequence[int], after: Sequence[int]) -> int:
    """What the worker sends or receives that does most of either."""
    sent, received = [0] * (len(before) - 1), [0] * (len(before) - 1)
    pairs = zip(*(Placement.from_boundaries(cuts).layer_stages for cuts in (before, after)), strict=True)
    for num_bytes, (source, target) in zip(layer_bytes, pairs, strict=True):
        if source != target:
            sent[source] += num_bytes
            received[target] += num_bytes
    return max(*sent, *received)
