"""The least time that a batch could have taken: the best partition of the measured layer times, on paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import comb, fsum

import numpy as np
from numpy.typing import NDArray

from dynpipe_ds import LayerProfile, PipelineProfile
from dynpipe_ds.partition import optimal, simulated
from dynpipe_ds.simulation import Workload, simulate

MOST_PARTITIONS = 2000  # as many are tried one by one; beyond, the partitioners' best is taken

FloatArray = NDArray[np.float64]
Layers = Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]] | FloatArray
"""Forward and backward seconds of every layer: of any micro-batch, or a list of each micro-batch's."""


def _table(layers_s: Layers) -> FloatArray:
    """``(L, 2, M)``, or ``(L, 2, 1)`` if all micro-batches take alike."""
    table = np.asarray(layers_s, dtype=np.float64)
    return table[..., None] if table.ndim == 2 else table


def batch_s(layers_s: Layers, boundaries: Sequence[int], num_micro_batches: int, step_s: Sequence[float]) -> float:
    """Seconds of a batch on paper: the simulator's fill, drain and waiting, links that take no time.

    Args:
        layers_s: forward and backward seconds of every layer.
        boundaries: S + 1 layer indices.
        num_micro_batches: M.
        step_s: seconds of the optimizer step of every stage.
    """
    layers = _table(layers_s)
    stages_s = np.stack([layers[low:high].sum(axis=0) for low, high in pairwise(boundaries)])
    trains = stages_s[:, 1].any(axis=1).tolist()
    frozen = trains.index(True) if any(trains) else 0
    load = Workload(stages_s[:, 0], stages_s[:, 1], num_micro_batches, step_s=step_s, frozen_boundaries=frozen)
    return simulate(load).batch_s


def partitions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All partitions without an empty stage."""
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield (0, *cuts, num_layers)


def best(batches: Sequence[Layers], num_micro_batches: int, num_stages: int) -> tuple[int, ...]:
    """The partition that would have been best for some batches together, chosen when they are over.

    Args:
        batches: layer seconds of each batch.
        num_micro_batches: M.
        num_stages: S.

    Returns:
        Its boundaries.
    """
    tables = [_table(batch) for batch in batches]
    no_step = [0.0] * num_stages
    num_layers = len(tables[0])
    if comb(num_layers - 1, num_stages - 1) <= MOST_PARTITIONS:
        candidates = list(partitions(num_layers, num_stages))
    else:
        mean = np.mean([table.mean(axis=2) for table in tables], axis=0).tolist()
        costs = [fsum(layer) for layer in mean]
        layers = tuple(LayerProfile(f"layer {i}", f, b, 0, 0, 0, 0, 0) for i, (f, b) in enumerate(mean))
        first = optimal(costs, num_stages).boundaries
        profile = PipelineProfile(0, first, num_micro_batches, layers, ())
        candidates = [first, simulated(costs, num_stages, profile=profile).boundaries]
    return min(candidates, key=lambda parts: sum(batch_s(table, parts, num_micro_batches, no_step) for table in tables))


def ideal_s(
    batches: Sequence[Layers], steps_s: Sequence[Sequence[float]], hooks_s: Sequence[float], num_micro_batches: int
) -> tuple[float, tuple[int, ...]]:
    """Least seconds of a window of batches, without any overhead, and the partition that would have reached them.

    The scenario's own work between batches counts, since training needs it whatever the partition.

    Args:
        batches: layer seconds of each batch, as measured.
        steps_s: seconds of the optimizer step by batch and stage; the least counts, since the others contain
            waiting for the norm of the gradients.
        hooks_s: seconds of the scenario's own work around each batch.
        num_micro_batches: M.
    """
    num_stages = len(steps_s[0])
    boundaries = best(batches, num_micro_batches, num_stages)
    return window_s(batches, [boundaries] * len(batches), steps_s, hooks_s, num_micro_batches), boundaries


def window_s(
    batches: Sequence[Layers], boundaries: Sequence[Sequence[int]], steps_s: Sequence[Sequence[float]],
    hooks_s: Sequence[float], num_micro_batches: int,
) -> float:
    """Seconds of a window of batches on paper, cut in a given way, without any overhead.

    Args:
        batches: layer seconds of each batch, as measured.
        boundaries: of each batch.
        steps_s: as for :func:`ideal_s`.
        hooks_s: as for :func:`ideal_s`.
        num_micro_batches: M.
    """
    return fsum(
        batch_s(layers, parts, num_micro_batches, [min(step)] * len(step)) + hook_s
        for layers, parts, step, hook_s in zip(batches, boundaries, steps_s, hooks_s, strict=True)
    )
