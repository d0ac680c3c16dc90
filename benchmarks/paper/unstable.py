"""Does balancing gain more where the network is unstable (DynPipe, section D.2)? On paper.

The paper delays messages up to four times by a normal distribution and lets diffusion count what a message takes as
load. Here every boundary's messages take a share of a dense stage's forward: steadily, or drawn anew for each message
from N(1, 1) cut off at 0 and 4. All contenders meet the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from benchmarks.paper.algorithms import diffuse, probed
from benchmarks.paper.contenders import UNIFORM, case_of
from benchmarks.paper.report import Report
from benchmarks.paper.scattered import Passes, makespan_s
from benchmarks.record import table
from benchmarks.replay.case import METHODS, Case, first_boundaries
from benchmarks.traces.trace import TraceBatch, as_profile
from dynpipe_ds.partition import Placement, optimal, simulated
from dynpipe_ds.planning import plan_batch, worker_bytes_of_1f1b
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import simulate

STATIC, PARTITION, PRINTED, COUNTED = "static", "partition:time", "diffusion:time", "diffusion:time, delays counted"
CUT, CUT_LINKS, ORDER = "ours: cut", "ours: cut, delays counted", "ours: planned order"
CONTENDERS = (STATIC, PARTITION, PRINTED, COUNTED, CUT, CUT_LINKS, ORDER)
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Mean delay of a message as a share of a dense stage's forward."""
BATCHES = 10
"""That every mean is of."""


@dataclass(frozen=True)
class Condition:
    """A network.

    Args:
        share: mean delay of a message, of a dense stage's forward.
        varies: whether delays are drawn anew for every message.
    """

    share: float
    varies: bool = False

    @property
    def text(self) -> str:
        """For tables."""
        if not self.share:
            return "no delays"
        return f"{self.share:.0%}, {'N(1, 1) for every message' if self.varies else 'steady'}"

    def links_s(self, case: Case, batch: int) -> np.ndarray:
        """``(2, L - 1, M)`` seconds behind every layer, there and back.

        Args:
            case: the run.
            batch: number of the batch.
        """
        shape = (2, len(case.load_trace().layers) - 1, case.num_micro_batches)
        draws = np.ones(shape)
        if self.varies:
            draws = np.random.default_rng((case.seed, batch)).normal(1.0, 1.0, shape).clip(0.0, 4.0)
        return self.mean_s(case) * draws

    def mean_s(self, case: Case) -> float:
        """Seconds of a message before it is drawn.

        Args:
            case: the run.
        """
        blocks = len(case.load_trace().layers) - 2
        return self.share * case.layer_ms / 3e3 * blocks / case.num_stages


CONDITIONS = (Condition(0.0), *(Condition(share, varies) for share in SHARES[1:] for varies in (False, True)))
CASES = (("pruning", "cost", 48, 8), ("early_exit", "cost", 48, 8), ("freezing", "cost", 24, 8))


def seconds_of(case: Case, condition: Condition) -> dict[str, float]:
    """Mean seconds of a batch at the end of a run, by contender.

    Args:
        case: the run.
        condition: the network.
    """
    trace = case.load_trace()
    moment = trace.at(case.num_batches - 1, case.num_batches)
    start = tuple(first_boundaries(METHODS[UNIFORM], trace, case.num_stages))
    mean_s = float(condition.links_s(case, 0).mean())
    profile = as_profile(trace, moment, start, case.num_micro_batches, weight_share=case.weight_share)
    costs = profile.costs("time")
    links = {"activation_link_s": mean_s, "gradient_link_s": mean_s}
    cut = tuple(optimal(costs, case.num_stages).boundaries)
    with_links = tuple(simulated(costs, case.num_stages, profile=profile, **links).boundaries)
    first = as_profile(trace, trace.at(0), start, case.num_micro_batches)
    most = max(worker_bytes_of_1f1b(first, start), worker_bytes_of_1f1b(profile, cut))
    planned = plan_batch(profile, [start, cut], worker_bytes=most, **links)
    cuts: dict[str, tuple[Sequence[int], Order | str]] = {
        STATIC: (start, "1f1b"), PARTITION: (probed(costs, case.num_stages), "1f1b"), CUT: (cut, "1f1b"),
        CUT_LINKS: (with_links, "1f1b"), ORDER: (planned.placement.boundaries, planned.planned.order),
    }
    found = {
        label: fmean(_batch_s(case, moment, there, order, condition, batch) for batch in range(BATCHES))
        for label, (there, order) in cuts.items()
    }
    holders = Placement.from_boundaries(start).layer_stages
    for label, waits in ((PRINTED, ()), (COUNTED, _waits(case, mean_s))):
        there = diffuse(holders, costs, case.num_stages, waits=waits).holders
        found[label] = fmean(_scattered_s(case, moment, there, condition, batch) for batch in range(BATCHES))
    return {label: found[label] for label in CONTENDERS}


def _waits(case: Case, mean_s: float) -> list[float]:
    """What a rank sends, activations onward and gradients back."""
    last = case.num_stages - 1
    return [mean_s * ((rank < last) + (rank > 0)) for rank in range(case.num_stages)]


def _batch_s(
    case: Case, moment: TraceBatch, cuts: Sequence[int], order: Order | str, condition: Condition, batch: int
) -> float:
    behind = [cut - 1 for cut in cuts[1:-1]]
    there_s, back_s = condition.links_s(case, batch)[:, behind]
    workload = case.workload(moment, cuts, batch)
    return simulate(replace(workload, activation_link_s=there_s, gradient_link_s=back_s), order).batch_s


def _scattered_s(case: Case, moment: TraceBatch, holders: Sequence[int], condition: Condition, batch: int) -> float:
    factors = case.micro_batch_factors(moment, batch)
    return makespan_s(holders, Passes(
        np.array(moment.forward_s)[:, None] * factors, np.array(moment.backward_s)[:, None] * factors,
        moment.frozen_layers, links_s=condition.links_s(case, batch),
    ))  # fmt: skip


def unstable(report: Report, quick: bool) -> None:
    """The table of gains by network.

    Args:
        report: to fill and save.
        quick: whether one scenario under three networks is enough.
    """
    rows, values = [], []
    conditions = CONDITIONS[:3] if quick else CONDITIONS
    for scenario, counting, blocks, num_stages in CASES[:1] if quick else CASES:
        case = replace(case_of(scenario, counting, blocks, num_stages), costs="none")
        for condition in conditions:
            found = seconds_of(case, condition)
            gains = {label: found[STATIC] / found[label] for label in CONTENDERS[1:]}
            cells = [f"{gain:.3f}" for gain in gains.values()]
            rows.append([scenario, str(blocks), condition.text, f"{found[STATIC]:.2f}", *cells])
            values.append({
                "scenario": scenario, "blocks": blocks, "stages": num_stages, "share": condition.share,
                "varies": condition.varies, "static_s": found[STATIC], "gains": gains,
            })
    report.table = table(
        ["scenario", "blocks", "delay of a message, of a dense stage's forward", "static, s a batch", *CONTENDERS[1:]],
        rows,
    )
    report.values = values
    report.text = (
        f"Throughput over the static cut at the end of a run, 8 stages, M = 32, mean of {BATCHES} batches; nothing but "
        "layers and links takes time. *Delays counted*: what a rank's messages take is part of its load, as the paper "
        "does it (diffusion), or of the simulated batch (ours). The planned order knows the mean delay, and has the "
        "memory of the fullest worker under 1F1B."
    )
    report.notes += conclusions(values)
    report.save()


def conclusions(values: Sequence[dict[str, object]]) -> list[str]:
    """Whether gains grow with delays, and with their varying.

    Args:
        values: of the table.
    """
    lines = []
    for label in CONTENDERS[1:]:
        grew = {True: 0, False: 0}
        compared = {True: 0, False: 0}
        changes: list[float] = []
        for value in values:
            if not value["share"]:
                continue
            calm = next(v for v in values if v["scenario"] == value["scenario"] and not v["share"])
            gain, before = value["gains"][label], calm["gains"][label]  # type: ignore[index]
            compared[bool(value["varies"])] += 1
            grew[bool(value["varies"])] += gain > before + 0.005
            changes.append(gain / before)
        total, more = sum(compared.values()), sum(grew.values())
        if total:
            lines.append(
                f"{label}: the gain is larger than without delays in {more} of {total} networks ({grew[True]} of "
                f"{compared[True]} that vary); it changes by {min(changes) - 1:+.1%} to {max(changes) - 1:+.1%}, "
                f"geometric mean {math.exp(fmean(math.log(change) for change in changes)) - 1:+.1%}."
            )
    return lines
