"""Everything that a run is compared with, on paper: statics, one re-cut by hand, the paper's balancers, ours, bounds.

The simulator computes batches and the engine's own balancer decides (``benchmarks/replay/predict.py``); nothing runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.paper.outcome import Outcome
from benchmarks.paper.published import CHANGING_EVERY_BATCH, interval
from benchmarks.paper.verbatim import run_diffusion
from benchmarks.replay.case import METHODS, OURS, STATIC, Case, Result, first_boundaries
from benchmarks.replay.predict import ideal_batches_s, predict
from benchmarks.traces.equations import ITERATIONS
from dynpipe_ds.measure import imbalance
from dynpipe_ds.partition import optimal
from dynpipe_ds.simulation import simulate

DENSE, BEST_STATIC, RECUT = "dense model", "best static", "best single re-cut"
PARTITION_P, PARTITION_T = "partition:parameters", "partition:time"
DIFFUSION_P, DIFFUSION_T = "diffusion:parameters", "diffusion:time"
CUT, ORDER, SPLIT = "ours: cut", "ours: planned order", "ours: split blocks"
IDEAL, LEAST = "ideal cut", "total work / stages"
PAPERS = (PARTITION_P, PARTITION_T, DIFFUSION_P, DIFFUSION_T)
OURS_OF = (CUT, ORDER, SPLIT)
ALL = (DENSE, BEST_STATIC, RECUT, *PAPERS, *OURS_OF, IDEAL, LEAST)

AUTO = OURS[1].label
AUTO_ORDER = f"{AUTO}, auto order"
UNIFORM = STATIC[0].label
COUNTINGS = ("equation", "cost")
"""What a load model counts: what the paper's equations say, or what the same states cost (ours)."""
CANDIDATES = 8
"""Moments at which a single re-cut is tried."""


def case_of(scenario: str, counting: str, blocks: int, num_stages: int, layer_ms: float = 30.0) -> Case:
    """A run with the paper's setting: M = 4S, phases and interval in proportion to its 10,000 iterations.

    Runs whose model changes in every iteration have 40 batches, others 100: there, most batches are alike.

    Args:
        scenario: one of the six.
        counting: one of :data:`COUNTINGS`.
        blocks: of the model.
        num_stages: S.
        layer_ms: forward and backward of a dense block.
    """
    batches = 40 if scenario in CHANGING_EVERY_BATCH else 100
    every = max(1, round(interval(scenario) * batches / ITERATIONS))
    trace = f"model:{scenario}_{counting}:{blocks}"
    return Case(trace, UNIFORM, num_stages, 4 * num_stages, batches, layer_ms, every)


def outcomes(case: Case, labels: Sequence[str] = ALL) -> dict[str, Outcome]:
    """Run the contenders.

    Args:
        case: what they have in common; its method does not matter.
        labels: which of :data:`ALL`.

    Returns:
        By label.
    """
    return {label: outcome(case, label) for label in labels}


def outcome(case: Case, label: str) -> Outcome:
    """Run one contender.

    Args:
        case: the run; its method does not matter.
        label: one of :data:`ALL`.

    Raises:
        ValueError: for another label.
    """
    if label == DENSE:
        blocks = len(case.load_trace().layers) - 2
        return _told(label, predict(replace(case, trace=f"model:dense:{blocks}", method=UNIFORM)))
    if label == BEST_STATIC:
        return min((_told(label, run) for run in _statics(case)), key=lambda found: found.whole_s)
    if label == RECUT:
        return best_recut(case)
    if label in (PARTITION_P, PARTITION_T):
        return _told(label, predict(replace(case, method=label)))
    if label in (DIFFUSION_P, DIFFUSION_T):
        return run_diffusion(case, label.partition(":")[2])
    if label in OURS_OF:
        trace = f"{case.trace}:halves" if label == SPLIT else case.trace
        method = AUTO if label == CUT else AUTO_ORDER
        return _told(label, predict(replace(case, trace=trace, method=method)))
    if label == IDEAL:
        return Outcome(label, tuple(ideal_batches_s(case)))
    if label == LEAST:
        return Outcome(label, tuple(_least_s(case, batch) for batch in range(case.num_batches)))
    raise ValueError(f"label = {label!r}: must be one of {', '.join(ALL)}")


def _statics(case: Case) -> list[Result]:
    """Megatron-LM's cut and DeepSpeed's, once if they are the same."""
    trace = case.load_trace()
    cuts = {tuple(first_boundaries(method, trace, case.num_stages)): method.label for method in reversed(STATIC)}
    return [predict(replace(case, method=label)) for label in cuts.values()]


def _told(label: str, result: Result) -> Outcome:
    overhead_s = result.profiling_s + result.planning_s + result.migrating_s
    return Outcome(
        label, tuple(result.batches_s), overhead_s, len(result.moves), imbalance(result.stages_s[-1]),
        result.bubbles[-1], result.case.num_stages - 1,
    )


def best_recut(case: Case) -> Outcome:
    """Static, and cut anew once by somebody who knows what comes: the best moment, and the best cut from there on.

    The cut is the best one for the mean of all layer times that follow; tried are the start and up to
    :data:`CANDIDATES` changes of the model, evenly spread. One move is charged, and no profiling.

    Args:
        case: the run.
    """
    trace, costs = case.load_trace(), case.known_costs()
    moments = [trace.at(batch, case.num_batches) for batch in range(case.num_batches)]
    before = tuple(first_boundaries(METHODS[UNIFORM], trace, case.num_stages))
    changes = [b for b in range(1, case.num_batches) if moments[b].batch != moments[b - 1].batch]
    step = max(1, math.ceil(len(changes) / CANDIDATES))
    known: dict[tuple[int, tuple[int, ...]], float] = {}

    def batch_s(batch: int, cuts: tuple[int, ...]) -> float:
        key = (moments[batch].batch, cuts)
        if key not in known or case.varies_in(moments[batch]):
            known[key] = simulate(case.workload(moments[batch], cuts, batch)).batch_s + costs.batch_s
        return known[key]

    hops, found = case.num_stages - 1, []
    for at in (0, *changes[::step]):
        sums = [math.fsum(layer) for layer in zip(*(moment.seconds for moment in moments[at:]), strict=True)]
        cuts = tuple(optimal(sums, case.num_stages).boundaries)
        seconds = [batch_s(batch, before if batch < at else cuts) for batch in range(case.num_batches)]
        loads = [math.fsum(moments[-1].seconds[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        seconds[at] += costs.work_s.get("move", 0.0) * (at > 0)
        found.append(Outcome(RECUT, tuple(seconds), 0.0, int(at > 0), imbalance(loads), hops=hops))
    return min(found, key=lambda one: one.whole_s)


def _least_s(case: Case, batch: int) -> float:
    """All stages busy all the time, without messages or overhead; a batch of its mean micro-batch."""
    seconds = math.fsum(case.load_trace().at(batch, case.num_batches).seconds)
    return seconds * case.num_micro_batches / sum(case.stage_speeds)
