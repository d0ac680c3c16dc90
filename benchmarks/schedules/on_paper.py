"""A load model's run, simulated under each kind of cut and order: what each part of the change brings by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.replay.case import METHODS, WARM_UP, Case, first_boundaries
from benchmarks.replay.clocks import Costs
from benchmarks.schedules.waited import Waited, waited_for
from benchmarks.traces.trace import as_profile
from dynpipe_ds import PipelineProfile
from dynpipe_ds.partition import optimal, simulated
from dynpipe_ds.planning import activation_caps, plan_batch, plan_order, worker_bytes_of_1f1b
from dynpipe_ds.schedule import Order, order_of, split_at_once
from dynpipe_ds.simulation import Simulation, Timetable, Workload

UNIFORM = "uniform cut, 1F1B, messages waited for"
TODAY = "best cut, 1F1B, messages waited for"
CHARGED = f"{TODAY}, charged as whole runs are"
MESSAGES = "best cut, 1F1B, messages nobody waits for"
SPLIT = "the same, backwards split"
ORDER = "the same, planned order of whole backwards"
PLANNED = "best cut, planned order of split backwards"
TOGETHER = "cut and order planned together"
LEAST = "total work / stages"
ROWS = (UNIFORM, TODAY, CHARGED, MESSAGES, SPLIT, ORDER, PLANNED, TOGETHER, LEAST)


@dataclass(frozen=True)
class OnPaper:
    """One way to run the timed batches of a case.

    Args:
        seconds: of all of them.
        bubble_ratio: mean of batches and stages.
    """

    seconds: float
    bubble_ratio: float


def on_paper(case: Case, rows: Collection[str] = ROWS, *, most_batches: int | None = None) -> dict[str, OnPaper]:
    """Simulate a run in every way; each batch has the best cut and order for it, chosen with hindsight.

    Args:
        case: the run; its messages take what they are known to take, everything else but the layers nothing. Only what
            is :data:`CHARGED` also takes what DeepSpeed does for every pass, step and batch.
        rows: the ways.
        most_batches: to simulate, at equal distances, for all others; ``None``: every one.

    Returns:
        By row.
    """
    found: dict[str, list[OnPaper]] = {row: [] for row in ROWS if row in rows}
    moments: dict[int, tuple[_Ways, dict[str, OnPaper]]] = {}  # and what they gave the last time
    timed = range(WARM_UP, case.num_batches)
    sample = timed[:: math.ceil(len(timed) / (most_batches or len(timed)))]
    for batch in sample:
        moment = case.load_trace().at(batch, case.num_batches)
        if moment.batch not in moments:
            ways = {row: _timed(way) for row, way in _plans(case, batch, rows)}
            moments[moment.batch] = ways, dict(_ran(case, ways, batch, rows))
        elif case.varies_in(moment):
            ways = moments[moment.batch][0]
            moments[moment.batch] = ways, dict(_ran(case, ways, batch, rows))
        for row, one in moments[moment.batch][1].items():
            found[row].append(one)
    return {
        row: OnPaper(
            math.fsum(one.seconds for one in each) * (len(timed) / len(each)), fmean(one.bubble_ratio for one in each)
        )
        for row, each in found.items()
    }


_Way = tuple[Sequence[int], Order | None]
"""A cut and an order; ``None``: 1F1B whose messages are waited for."""
_Ways = dict[str, tuple[Sequence[int], Callable[[Workload], Simulation | Waited]]]


def _timed(way: _Way) -> tuple[Sequence[int], Callable[[Workload], Simulation | Waited]]:
    """The cut, and what times its batches."""
    cuts, order = way
    if order is None:
        return cuts, waited_for
    timetables: dict[int, Timetable] = {}

    def timed(workload: Workload) -> Simulation:
        frozen = workload.frozen_boundaries
        if frozen not in timetables:
            timetables[frozen] = Timetable(order, frozen)
        return timetables[frozen].simulation(workload)

    return cuts, timed


def _ran(case: Case, ways: _Ways, batch: int, rows: Collection[str]) -> Iterator[tuple[str, OnPaper]]:
    """A batch in every way."""
    free = Costs(message_s=case.known_costs().message_s)
    for row, (cuts, timed) in ways.items():
        costs = case.known_costs() if row == CHARGED else free
        told = timed(_workload(case, cuts, batch, costs))
        yield row, OnPaper(told.makespan_s + costs.step_s + costs.batch_s, told.bubble_ratio)
    if LEAST in rows:
        start = first_boundaries(METHODS[case.method], case.load_trace(), case.num_stages)
        workload = _workload(case, start, batch, free)
        tables = (workload.forward_s, workload.backward_s)
        total_s = sum(float(table.mean(axis=1).sum()) for table in tables) * case.num_micro_batches
        yield LEAST, OnPaper(total_s / sum(case.stage_speeds), 0.0)


def _workload(case: Case, cuts: Sequence[int], batch: int, costs: Costs) -> Workload:
    return case.workload(case.load_trace().at(batch, case.num_batches), cuts, batch, costs=costs)


def profile_of(case: Case, batch: int) -> PipelineProfile:
    """What the engine would have measured of a batch, without noise.

    Args:
        case: the run.
        batch: number of the batch.
    """
    trace = case.load_trace()
    start = first_boundaries(METHODS[case.method], trace, case.num_stages)
    moment = trace.at(batch, case.num_batches)
    return as_profile(trace, moment, start, case.num_micro_batches, batch, case.weight_share)


def _plans(case: Case, batch: int, rows: Collection[str]) -> Iterator[tuple[str, _Way]]:
    """Cut and order of every row that is wanted but the last."""
    profile, count, num_stages = profile_of(case, batch), case.num_micro_batches, case.num_stages
    start = profile.boundaries
    usual = order_of("1f1b", count, num_stages)
    costs = profile.costs("time")
    best = simulated(costs, num_stages, profile=profile, speeds=case.stage_speeds).boundaries
    message_s = case.known_costs().message_s
    links = {"activation_link_s": message_s, "gradient_link_s": message_s}
    first = replace(profile_of(case, 0), boundaries=start)
    # The best cut under 1F1B may hold more than the fullest worker did at the start; it is let have that.
    most = max(worker_bytes_of_1f1b(first, start), worker_bytes_of_1f1b(profile, best))
    caps = activation_caps(profile, best, most)
    workload = Workload.from_profile(profile, best, speeds=case.stage_speeds, **links)

    def whole() -> Workload:
        layers = tuple(replace(layer, weight_s=0.0) for layer in profile.layers)
        return Workload.from_profile(replace(profile, layers=layers), best, speeds=case.stage_speeds, **links)

    def together() -> _Way:
        starts = [best, optimal(costs, num_stages, speeds=case.stage_speeds).boundaries]
        found = plan_batch(profile, starts, worker_bytes=most, speeds=case.stage_speeds, **links)
        return found.placement.boundaries, found.planned.order

    ways: dict[str, Callable[[], _Way]] = {
        UNIFORM: lambda: (start, None),
        TODAY: lambda: (best, None),
        CHARGED: lambda: (best, None),
        MESSAGES: lambda: (best, usual),
        SPLIT: lambda: (best, split_at_once(count, num_stages, workload.frozen_boundaries + 1)),
        ORDER: lambda: (best, plan_order(whole(), caps).order),
        PLANNED: lambda: (best, plan_order(workload, caps).order),
        TOGETHER: together,
    }
    yield from ((row, way()) for row, way in ways.items() if row in rows)
