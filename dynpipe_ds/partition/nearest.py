"""Among all partitions within a limit, the one that keeps most where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynpipe_ds.partition.problem import Problem

Ints = npt.NDArray[np.int64]

_UNREACHED = -(2**61)  # below every sum of weights (< 2**60), far from overflow


def nearest_cuts(problem: Problem, thresholds: list[int]) -> list[int]:
    """Partition that moves the fewest bytes from the current one, then the fewest layers.

    Dynamic program over the stages. What stage ``s`` keeps when it holds the groups from ``i`` to
    ``j`` is ``clip(j) - clip(i)``, where ``clip(x)`` limits the bytes before ``x`` to the range of
    the layers that the stage holds now. So the best start for each end ``j`` maximises
    ``kept(i) - clip(i)`` over the window of starts from which the stage can hold everything up to
    ``j``. ``O(S K W)`` for windows of ``W`` groups; ``W`` is about ``K / S``.

    Args:
        problem: The problem, with ``current``.
        thresholds: Largest integer cost of every stage; some partition must keep them.

    Returns:
        ``S + 1`` group indices.
    """
    windows = _windows(problem, thresholds)
    kept = np.full(problem.num_groups + 1, _UNREACHED)
    kept[0] = 0
    scores = []
    for window, clip in zip(windows, _clipped_weights(problem), strict=True):
        scores.append(kept - clip)
        kept = window.maximum(scores[-1]) + clip
    cuts = [problem.num_groups]
    for window, score in zip(reversed(windows), reversed(scores), strict=True):
        first, end = window.first[cuts[-1]], window.end[cuts[-1]]
        cuts.append(int(first + score[first:end].argmax()))
    return cuts[::-1]


def _clipped_weights(problem: Problem) -> Iterator[Ints]:
    """For every stage, the weight before each group limited to the layers the stage has now."""
    assert problem.current is not None
    num_layers = problem.starts[-1]
    layer_bytes = problem.layer_bytes or [0] * (num_layers + 1)
    # Bytes first, then layers: a layer weighs less than any byte even if all of them move.
    weight = np.array(layer_bytes) * (num_layers + 1) + np.arange(num_layers + 1)
    at_group = weight[list(problem.starts)]
    for stage in range(problem.num_stages):
        # A stage that does not exist yet holds nothing.
        first, end = (*problem.current[stage : stage + 2], num_layers, num_layers)[:2]
        yield np.minimum(np.maximum(at_group, weight[first]), weight[end])


class _Window(NamedTuple):
    """The starts ``first[j] <= i < end[j]`` that a stage can have for each end ``j``."""

    first: Ints
    end: Ints

    def maximum(self, score: Ints) -> Ints:
        """Largest score of the starts of each end."""
        edges = np.stack((self.first, self.end), axis=1).ravel()
        best: Ints = np.maximum.reduceat(np.append(score, _UNREACHED), edges)[::2]
        best[self.first >= self.end] = _UNREACHED
        return best


def _windows(problem: Problem, thresholds: list[int]) -> list[_Window]:
    """The window of every stage."""
    load = np.array(problem.load)
    first_by_cost = {threshold: load.searchsorted(load - threshold) for threshold in set(thresholds)}
    firsts = [first_by_cost[threshold] for threshold in thresholds]
    if problem.caps:
        state, activation = np.array(problem.state), np.array(problem.activation)
        for stage, (in_flight, cap) in enumerate(zip(problem.in_flight, problem.caps, strict=True)):
            held = state + in_flight * activation
            firsts[stage] = np.maximum(firsts[stage], held.searchsorted(held - cap))
    end = np.arange(problem.num_groups + 1) + (1 if problem.allow_empty else 0)
    return [_Window(first, end) for first in firsts]
