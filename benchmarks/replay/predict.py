"""The same training run on paper: the simulator for batches, the engine's own balancer for decisions.

No engine, no communication: for more replicas or longer runs than the machine can replay. What a move and a profile
cost is not known here and left out; link times are the case's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from benchmarks.replay.case import METHODS, WARM_UP, Case, Move, Result, first_boundaries
from benchmarks.replay.clocks import Costs
from benchmarks.traces import Trace, TraceBatch
from benchmarks.traces.trace import as_profile
from dynpipe_ds import PipelineProfile
from dynpipe_ds.decide import Balancer
from dynpipe_ds.partition import optimal, simulated
from dynpipe_ds.simulation import simulate


def predict(case: Case) -> Result:
    """Simulate a run.

    Args:
        case: the run; its clock does not matter. A batch of several replicas ends with the slowest.

    Returns:
        Its result, of kind ``"simulation"``; ``wall_s`` has neither profiling nor moving in it.

    Raises:
        ValueError: if workers drop out.
    """
    if case.leaves:
        raise ValueError(f"leaves = {case.leaves}: workers that drop out can be replayed, not simulated")
    trace, method = case.load_trace(), METHODS[case.method]
    balancer = Balancer.from_section(method.section(case.every, case.speeds))
    boundaries = first_boundaries(method, trace, case.num_stages)
    result = Result(case, "simulation", 0.0, [], [], [], [], 0.0, 0.0, 0.0, 1.0, list(boundaries))
    for batch in range(case.num_batches):
        moment = trace.at(batch, case.num_batches)
        runs = [
            simulate(case.workload(moment, boundaries, batch, replica=replica)) for replica in range(case.replicas)
        ]
        result.batches_s.append(max(run.batch_s for run in runs))
        result.bubbles.append(fmean(run.bubble_ratio for run in runs))
        result.stages_s.append([fmean(s) for s in zip(*([t.busy_s for t in r.stages] for r in runs), strict=True)])
        if not balancer.wants_profile(batch):
            continue
        profile = _measured(case, trace, moment, boundaries, batch)
        balancer.observe(profile)
        boundaries = _decide(balancer, boundaries, batch, result)
    result.wall_s = sum(result.batches_s[WARM_UP:])
    return result


def ideal_s(case: Case) -> float:
    """Least seconds of the timed batches: every batch on the best partition known for it, and no overhead at all.

    Args:
        case: the run; its method does not matter.

    Returns:
        Simulated seconds, links as the case says, all else free.
    """
    trace, seconds = case.load_trace(), 0.0
    anything = first_boundaries(METHODS[case.method], trace, case.num_stages)
    for batch in range(WARM_UP, case.num_batches):
        moment = trace.at(batch, case.num_batches)
        at_unit_speed = replace(case, speeds=(1.0,) * case.num_stages)
        profile = _measured(at_unit_speed, trace, moment, anything, batch)
        costs = profile.costs("time")
        partitions = {
            tuple(optimal(costs, case.num_stages, speeds=case.speeds).boundaries),
            tuple(simulated(costs, case.num_stages, speeds=case.speeds, profile=profile).boundaries),
        }
        seconds += min(
            max(
                simulate(case.workload(moment, parts, batch, replica=r, costs=Costs())).batch_s
                for r in range(case.replicas)
            )
            for parts in partitions
        )
    return seconds


def _measured(
    case: Case, trace: Trace, moment: TraceBatch, boundaries: Sequence[int], batch: int
) -> PipelineProfile:
    """What the engine would have profiled: means over micro-batches and replicas, on workers of their speed."""
    factors = np.mean([case.micro_batch_factors(moment, batch, r).mean(1) for r in range(case.replicas)], axis=0)
    stage_of = np.searchsorted(np.array(boundaries[1:-1]), np.arange(len(trace.layers)), side="right")
    slow = factors / np.array(case.speeds)[stage_of]
    here = replace(
        moment, forward_s=tuple((slow * moment.forward_s).tolist()),
        backward_s=tuple((slow * moment.backward_s).tolist()),
    )
    return as_profile(trace, here, boundaries, case.num_micro_batches, batch)


def _decide(balancer: Balancer, boundaries: Sequence[int], batch: int, result: Result) -> list[int]:
    """Decide as the engine does; note a move."""
    began = time.perf_counter()
    decided = balancer.decide(batch, boundaries)
    plan_s = time.perf_counter() - began
    if decided is None:
        return list(boundaries)
    if batch >= WARM_UP:
        result.planning_s += plan_s
    plan, decision = decided
    if not decision.rebalance or list(plan.boundaries) == list(boundaries):
        return list(boundaries)
    balancer.record_cost(0.0)
    balancer.moved(batch)
    result.moves.append(Move(batch + 1, list(plan.boundaries), plan_s, 0.0, plan.bytes_to_move))
    return list(plan.boundaries)
