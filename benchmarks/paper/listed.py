"""Pages that need no run: the paper's figures with their places; its algorithms beside ours on the same costs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.paper import published
from benchmarks.paper.algorithms import diffuse, partition, repack
from benchmarks.paper.report import Report
from benchmarks.paper.scattered import chunks_of
from benchmarks.record import table
from benchmarks.traces.equations import EQUATIONS
from dynpipe_ds.measure import imbalance
from dynpipe_ds.partition import balanced, diffusion, optimal, uniform

MODELS = 30
"""Random models that a row of balancers is of."""


def all_published(report: Report) -> None:
    """Every figure of the paper that a table here stands beside.

    Args:
        report: to fill and save.
    """
    parts = [
        "## Speedups (DynMo, Figure 3 and section 5.1)\n\n" + table(
            ["scenario", "model", "factor", "over", "from"],
            [[f.scenario, str(f.model), f"{f.factor:.2f}x", f.baseline, f.source] for f in published.FACTORS],
        ),
        "## Largest, idleness, intervals, overheads\n\n" + table(
            ["scenario", "up to (abstract, 5.1)", "idleness under a static cut (Figure 1)",
             "iterations between decisions (Figure 4)", "overhead, 24 / 32 / 40 / 48 layers (Figure 4)"],
            [
                [name, f"{factor:.2f}x", published.idleness(name), _interval(name),
                 published.overhead(name) if name == "moe" else " / ".join(published.OVERHEAD[name])]
                for name, factor in published.LARGEST.items()
            ],
        ),
        "## Overhead in iterations (DynPipe, Table 1)\n\n" + table(
            ["layers", *published.BALANCERS],
            [[str(blocks), *map(str, row)] for blocks, row in published.ITERATIONS_BY_DEPTH.items()],
        ),
        "## One node, pruning to 90%, samples a second (DynPipe, Table 2)\n\n" + table(
            ["layers", "GPUs", "Megatron-LM", "diffusion by time", "partition by time", "speedup"],
            [
                [str(blocks), str(gpus), *(f"{v:g}" for v in (row.megatron, row.diffusion, row.partition, row.speedup))]
                for (blocks, gpus), row in published.ONE_NODE.items()
            ] + [[str(blocks), str(gpus), "out of memory", "", "", ""] for blocks, gpus in published.OUT_OF_MEMORY],
        ),
        "## Re-packing while pruning, from 8 GPUs (DynMo, Figure 4, left)\n\n" + table(
            ["layers", "iterations from which 8, 6, 4, 2 GPUs hold the model", "average GPUs"],
            [
                [str(blocks), " / ".join(f"{at:,}" for at in starts), str(published.AVERAGE_GPUS[blocks])]
                for blocks, starts in published.SHRINKS_AT.items()
            ],
        ),
        "## Where the paper contradicts itself\n\n" + "\n".join(f"- {line}" for line in published.CONTRADICTIONS),
    ]  # fmt: skip
    report.table = "\n\n".join(parts)
    report.text = (
        "Wahib, Soyturk, Unat, SC'25, arXiv:2505.14864 (DynMo) and the supplement of its earlier version (DynPipe). "
        "Measured there on H100 and A100 GPUs; nothing on this page is ours."
    )
    report.values = {"contradictions": list(published.CONTRADICTIONS)}
    report.save()


def _interval(name: str) -> str:
    low, high = published.INTERVALS[name]
    return str(low) if low == high else f"{low:,} to {high:,}"


def _costs() -> Iterator[tuple[str, list[list[float]], int]]:
    """Name, costs of several models, stages."""
    for blocks, stages in ((24, 8), (48, 8), (48, 24)):
        draw = random.Random(0)
        drawn = [[draw.lognormvariate(3.0, 0.5) for _ in range(blocks)] for _ in range(MODELS)]
        yield f"log-normal (sigma 0.5), {blocks} blocks", drawn, stages
        for name in ("pruning_cost", "pruning_equation", "freezing_cost", "early_exit_cost"):
            moment = EQUATIONS[name](blocks).batches[-1]
            yield f"{name}, {blocks} blocks, end of the run", [[1e3 * s for s in moment.seconds]], stages


def balancers(report: Report, quick: bool) -> None:
    """Algorithms on the same costs: how near the best, and what layers that scatter buy.

    Args:
        report: to fill and save.
        quick: whether the first rows are enough.
    """
    rows, values = [], []
    for name, models, stages in list(_costs())[: 2 if quick else None]:
        found = [_each(costs, stages) for costs in models]
        for label in found[0]:
            bottlenecks, imbalances, hops = zip(*(one[label] for one in found), strict=True)
            value = {
                "costs": name, "stages": stages, "algorithm": label, "bottleneck": fmean(bottlenecks),
                "worst": max(bottlenecks), "imbalance": fmean(imbalances), "messages": fmean(hops),
            }
            values.append(value)
            rows.append([
                name, str(stages), label, f"{value['bottleneck']:.3f}", f"{value['worst']:.3f}",
                f"{value['imbalance']:.2f}", f"{value['messages']:.1f}",
            ])
    report.table = table(
        ["costs", "stages", "algorithm", "largest load / best contiguous", "worst", "imbalance (Eq. 2)",
         "messages of a micro-batch"], rows,
    ) + f"\n\n## Re-packing\n\n{_packing()}"  # fmt: skip
    report.values = values
    report.text = (
        f"Means of {MODELS} random models, or the loads at the end of a run. *partition*: binary search with probes, "
        f"as DeepSpeed did it when the paper was written; *balanced*: DeepSpeed's of today, which minimises another "
        "objective; *diffusion as printed*: five rounds from the uniform cut, layers scatter; *contiguous diffusion* "
        "and *optimal*: ours. A value below 1 is possible for scattered layers only."
    )
    report.notes += [_ranges(values, label) for label in ("diffusion as printed", "contiguous diffusion", "balanced")]
    report.save()


def _ranges(values: Sequence[dict[str, Any]], label: str) -> str:
    """From the least to the greatest of an algorithm's rows."""
    own = [value for value in values if value["algorithm"] == label]
    least, most = min(own, key=lambda v: v["bottleneck"]), max(own, key=lambda v: v["bottleneck"])
    messages = max(v["messages"] / (v["stages"] - 1) for v in own)
    return (
        f"{label}: largest load {least['bottleneck']:.2f} ({least['costs']}) to {most['bottleneck']:.2f} times "
        f"({most['costs']}) that of the best contiguous cut; up to {messages:.1f} times the messages."
    )


def _each(costs: Sequence[float], stages: int) -> dict[str, tuple[float, float, int]]:
    """Largest load over that of the best contiguous cut, imbalance and messages, by algorithm."""
    best = optimal(costs, stages).bottleneck
    start = uniform(costs, stages).placement.layer_stages
    scattered = diffuse(start, costs, stages).holders
    cuts = {
        "uniform": uniform(costs, stages).boundaries, "partition": partition(costs, stages),
        "balanced": balanced(costs, stages).boundaries,
        "contiguous diffusion": diffusion(costs, stages).boundaries, "optimal": optimal(costs, stages).boundaries,
    }
    loads = {label: [math.fsum(costs[a:b]) for a, b in pairwise(cut)] for label, cut in cuts.items()}
    by_rank = [0.0] * stages
    for cost, rank in zip(costs, scattered, strict=True):
        by_rank[rank] += cost
    hops = dict.fromkeys(cuts, stages - 1) | {"diffusion as printed": len(chunks_of(scattered)) - 1}
    loads["diffusion as printed"] = by_rank
    return {label: (max(each) / best, imbalance(each), hops[label]) for label, each in loads.items()}


def _packing() -> str:
    """The paper's first fit and its printed form on a few memories."""
    rows = []
    for held, limit in (((30, 30, 30, 30, 30, 30, 30, 30), 80), ((10, 60, 10, 60, 10, 60, 10, 60), 80),
                        ((40, 40, 40, 40), 80), ((10, 20, 30, 40, 30, 20, 10, 10), 80)):  # fmt: skip
        packed, printed = repack(held, limit), repack(held, limit, as_printed=True)
        merged = ", ".join(f"{source} into {target}" for source, target in packed.transfers) or "none"
        rows.append([
            " ".join(map(str, held)), str(limit), merged, str(sum(packed.active)), str(len(_neighbours(held, limit))),
            f"{len(printed.transfers)} ({len({source for source, _ in printed.transfers})} workers)",
        ])
    return table(
        ["GB of the workers", "limit", "first fit (Algorithm 2, stopping at the first)", "workers left",
         "left if only neighbours merge (ours)", "transfers as printed"], rows,
    )  # fmt: skip


def _neighbours(held: Sequence[int], limit: int) -> list[int]:
    """What workers hold when each takes over the next ones while they fit: stages stay contiguous."""
    found = [held[0]]
    for size in held[1:]:
        if found[-1] + size <= limit:
            found[-1] += size
        else:
            found.append(size)
    return found
