"""A run under the paper's diffusion as it is printed, on paper: layers end up where no pipeline of ranges can run them.

Everything else is as in ``benchmarks/replay/predict.py``: one profiled batch, a decision at a fixed interval, any gain;
the library's own costs for profiling, deciding and moving.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.paper.algorithms import diffuse
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.scattered import Passes, chunks_of, makespan_s
from benchmarks.replay.case import METHODS, Case, first_boundaries
from benchmarks.traces import TraceBatch
from benchmarks.traces.trace import as_profile
from dynpipe_ds.measure import imbalance
from dynpipe_ds.partition import Placement


def run_diffusion(case: Case, cost: str) -> Outcome:
    """Train on paper.

    Args:
        case: the run; its method does not matter.
        cost: what is balanced, ``"time"`` or ``"parameters"``.

    Returns:
        What it took.
    """
    trace, costs = case.load_trace(), case.known_costs()
    start = first_boundaries(METHODS["static uniform"], trace, case.num_stages)
    holders = Placement.from_boundaries(start).layer_stages
    told, known = trace.at(0, case.num_batches), dict[tuple[int, tuple[int, ...]], float]()
    batches_s: list[float] = []
    overhead_s, moves, loads = 0.0, 0, [0.0] * case.num_stages
    for batch in range(case.num_batches):
        moment = trace.at(batch, case.num_batches)
        own_s = costs.work_s.get("profile", 0.0) + costs.work_s.get("observe", 0.0)
        own_s += costs.work_s.get("replace", 0.0) * (moment.parameter_bytes != told.parameter_bytes)
        own_s += costs.work_s.get("freeze", 0.0) * (moment.frozen_layers != told.frozen_layers)
        told = moment
        key = (moment.batch, holders)
        if key not in known or case.varies_in(moment):
            known[key] = makespan_s(holders, _passes(case, moment, batch))
        loads = _loads(moment.seconds, holders, case.num_stages)
        seconds = known[key] + costs.step_s + costs.batch_s
        if (batch + 1) % case.every == 0:
            profile = as_profile(trace, moment, start, case.num_micro_batches, batch)
            found = diffuse(holders, profile.costs("time" if cost == "time" else "parameters"), case.num_stages)
            own_s += costs.work_s.get("decide", 0.0)
            if found.transfers:
                own_s += costs.work_s.get("move", 0.0)
                own_s += _most_bytes(profile.moved_bytes(), holders, found.holders) / costs.bytes_per_s
                moves, holders = moves + 1, found.holders
        overhead_s += own_s
        batches_s.append(seconds + own_s)
    hops = len(chunks_of(holders)) - 1
    return Outcome(f"diffusion:{cost}", tuple(batches_s), overhead_s, moves, imbalance(loads), hops=hops)


def _passes(case: Case, moment: TraceBatch, batch: int) -> Passes:
    costs, factors = case.known_costs(), case.micro_batch_factors(moment, batch)
    return Passes(
        np.array(moment.forward_s)[:, None] * factors, np.array(moment.backward_s)[:, None] * factors,
        moment.frozen_layers, costs.forward_s, costs.backward_s, costs.message_s + case.link_ms / 1e3,
    )


def _loads(seconds: Sequence[float], holders: Sequence[int], num_ranks: int) -> list[float]:
    sums = [0.0] * num_ranks
    for layer_s, rank in zip(seconds, holders, strict=True):
        sums[rank] += layer_s
    return sums


def _most_bytes(layer_bytes: Sequence[int], before: Sequence[int], after: Sequence[int]) -> int:
    """What the rank sends or receives that does most of either."""
    sent, received = dict[int, int](), dict[int, int]()
    for num_bytes, source, target in zip(layer_bytes, before, after, strict=True):
        if source != target:
            sent[source] = sent.get(source, 0) + num_bytes
            received[target] = received.get(target, 0) + num_bytes
    return max(*sent.values(), *received.values())
