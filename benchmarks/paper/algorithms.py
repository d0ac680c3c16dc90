"""The paper's algorithms as they are printed, to stand beside ours. Pure; none of them is used by the library.

Wahib, Soyturk, Unat, "Balanced and Elastic End-to-end Training of Dynamic LLMs" (SC'25, arXiv:2505.14864; "DynMo"), and
the supplement of its earlier version ("DynPipe"). Written anew from the pseudo-code and the text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, pvariance

from dynpipe_ds.partition import uniform

MAX_ROUNDS = 5
"""Of diffusion, in the paper's experiments (DynPipe, section D.1)."""
TOLERANCE = 1e-3


def partition(costs: Sequence[float], num_stages: int, *, tolerance: float = TOLERANCE) -> list[int]:
    """Cut as the paper's *partition* balancers do: binary search for the bottleneck, probing whether it suffices.

    Section 5 of DynMo says binary search and linear probing on top of DeepSpeed's functions, which is what DeepSpeed's
    ``partition_balanced`` did until it was replaced by the dynamic program of today. A probe fills stage after stage
    until the next layer would reach the bottleneck. The search ends within the tolerance, so for costs that are small
    against it the bottleneck is not the smallest; stages behind may come out empty.

    Args:
        costs: L costs >= 0.
        num_stages: S.
        tolerance: in the unit of the costs; DeepSpeed's is 0.001.

    Returns:
        S + 1 boundaries.
    """
    sums = list(accumulate(costs))
    if len(sums) <= num_stages:
        return [min(stage, len(sums)) for stage in range(num_stages + 1)]
    low, high = sums[-1] / num_stages, sums[-1]
    while high > low + tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if _probe(sums, num_stages, middle)[1] else (middle + tolerance, high)
    return _probe(sums, num_stages, high)[0]


def _probe(sums: Sequence[float], num_stages: int, bottleneck: float) -> tuple[list[int], bool]:
    """Boundaries of stages that stay below a bottleneck, the last one excepted, and whether that one does, too."""
    cuts, until = [0], bottleneck
    while len(cuts) < num_stages and cuts[-1] < len(sums):
        cut = bisect_left(sums, until)
        cuts.append(cut)
        until = (sums[cut - 1] if cut else 0.0) + bottleneck
    fits = cuts[-1] == len(sums) or until >= sums[-1]
    return cuts + [len(sums)] * (num_stages + 1 - len(cuts)), fits


def probed(costs: Sequence[float], num_stages: int, *, allow_empty: bool = False) -> Sequence[int]:
    """:func:`partition` for a pipeline that runs: costs are seconds, told in milliseconds; empty stages get a layer.

    Args:
        costs: L costs, seconds or parameters.
        num_stages: S.
        allow_empty: whether stages may hold nothing.

    Returns:
        S + 1 boundaries.
    """
    if not sum(costs):
        return uniform(costs, num_stages).boundaries
    cuts = partition([1e3 * cost for cost in costs], num_stages)
    if allow_empty:
        return cuts
    for stage in range(num_stages - 1, 0, -1):
        cuts[stage] = min(cuts[stage], cuts[stage + 1] - 1)
    for stage in range(1, num_stages):
        cuts[stage] = max(cuts[stage], cuts[stage - 1] + 1)
    return cuts


@dataclass(frozen=True)
class Diffused:
    """Where diffusion ended.

    Args:
        holders: rank of every layer; layers of a rank need not follow each other.
        transfers: source, destination and layer of every accepted one, in order.
        rounds: in which something was transferred.
    """

    holders: tuple[int, ...]
    transfers: tuple[tuple[int, int, int], ...]
    rounds: int


def diffuse(
    holders: Sequence[int], costs: Sequence[float], num_ranks: int, *, layer_bytes: Sequence[int] = (),
    max_bytes: float = math.inf, max_rounds: int = MAX_ROUNDS, waits: Sequence[float] = (),
) -> Diffused:
    """Balance by diffusion as it is printed (DynPipe, Algorithm 2).

    In each round, ranks above the mean load at its start act in the order of their numbers. Each offers its *least
    loaded layer* to the *least loaded rank of all*; it goes there if the variance of the ranks' loads falls and the
    memory there suffices. Nothing keeps layers of a rank together. There is no stop but the number of rounds; the
    potential and its bound belong to the proof of Lemma 2.

    Args:
        holders: rank of every layer at the start.
        costs: of every layer, seconds or parameters.
        num_ranks: N.
        layer_bytes: memory of every layer; left out: none.
        max_bytes: of a rank, to stay below.
        max_rounds: how many rounds.
        waits: of every rank, what its messages take, counted as load (DynPipe, D.2); left out: none.

    Returns:
        The placement and the way there.
    """
    held = [[layer for layer, holder in enumerate(holders) if holder == rank] for rank in range(num_ranks)]
    sizes = list(layer_bytes) or [0] * len(costs)
    transfers: list[tuple[int, int, int]] = []
    rounds = 0
    for _ in range(max_rounds):
        loads = [math.fsum(costs[layer] for layer in layers) for layers in held]
        loads = [load + wait for load, wait in zip(loads, waits or [0.0] * num_ranks, strict=True)]
        mean, variance, before = fmean(loads), pvariance(loads), len(transfers)
        overloaded = [rank for rank, load in enumerate(loads) if load > mean]
        for source in overloaded:
            target = min(range(num_ranks), key=loads.__getitem__)
            if not held[source] or source == target:
                continue
            layer = min(held[source], key=costs.__getitem__)
            after = list(loads)
            after[source] -= costs[layer]
            after[target] += costs[layer]
            needed = sum(sizes[other] for other in held[target]) + sizes[layer]
            if pvariance(after) < variance and needed < max_bytes:
                loads, variance = after, pvariance(after)
                held[source].remove(layer)
                held[target].append(layer)
                transfers.append((source, target, layer))
        rounds += len(transfers) > before
    found = {layer: rank for rank, layers in enumerate(held) for layer in layers}
    return Diffused(tuple(found[layer] for layer in range(len(costs))), tuple(transfers), rounds)


@dataclass(frozen=True)
class Packed:
    """Workers that were merged.

    Args:
        active: whether each worker still holds layers.
        transfers: source and destination of every merge, all layers of the source; in order.
        worker_bytes: of every worker afterwards, as the algorithm counts.
    """

    active: tuple[bool, ...]
    transfers: tuple[tuple[int, int], ...]
    worker_bytes: tuple[int, ...]


def repack(worker_bytes: Sequence[int], max_bytes: int, target: int = 1, *, as_printed: bool = False) -> Packed:
    """Pack workers by first fit (DynMo, Algorithm 2): the lower worker empties into the first higher one that fits.

    The sum must stay strictly below the limit. As printed, a worker that has found its place goes on looking, and is
    given away again to every later one that fits, so that layers would be counted twice; without that it stops.

    Args:
        worker_bytes: measured memory of every active worker.
        max_bytes: of a worker.
        target: workers at which to stop.
        as_printed: whether a worker that was emptied is tried again.

    Returns:
        Who is left, and who went where.
    """
    held, active = list(worker_bytes), [True] * len(worker_bytes)
    transfers: list[tuple[int, int]] = []
    for source in range(len(held)):
        for target_worker in range(source + 1, len(held)):
            if held[source] + held[target_worker] < max_bytes and sum(active) > target:
                active[source] = False
                transfers.append((source, target_worker))
                held[target_worker] += held[source]
                if not as_printed:
                    held[source] = 0
                    break
    return Packed(tuple(active), tuple(transfers), tuple(held))
