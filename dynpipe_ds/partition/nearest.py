"""Among all partitions within a limit, the one that keeps most where it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    ``j``: a sliding maximum, taken from a table of maxima over powers of two. ``O(S K log K)``.

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
        first, last = window.first[cuts[-1]], window.last[cuts[-1]]
        cuts.append(int(first + score[first : last + 1].argmax()))
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


@dataclass(frozen=True)
class _Window:
    """The starts ``first[j]`` to ``last[j]`` that a stage can have for each end ``j``.

    A maximum over a window is the larger of two overlapping maxima over ``2**level`` entries,
    found at ``left`` and ``right`` in the flattened table of maxima. An end without a start is
    listed in ``closed``; what its ``left`` and ``right`` point at is discarded.
    """

    first: Ints
    last: Ints
    closed: Ints
    levels: int
    left: Ints
    right: Ints

    def maximum(self, score: Ints) -> Ints:
        """Largest score of the starts of each end."""
        table = _table_of_maxima(score, self.levels)
        best: Ints = np.maximum(table.take(self.left), table.take(self.right))
        best[self.closed] = _UNREACHED
        return best


def _windows(problem: Problem, thresholds: list[int]) -> list[_Window]:
    """The window of every stage; stages whose caps don't narrow it share one."""
    make = _WindowMaker(problem)
    load = np.array(problem.load)
    by_cost = {
        threshold: make(load.searchsorted(load - threshold)) for threshold in set(thresholds)
    }
    windows = [by_cost[threshold] for threshold in thresholds]
    if not problem.caps:
        return windows
    state, activation = np.array(problem.state), np.array(problem.activation)
    for stage, (in_flight, cap) in enumerate(zip(problem.in_flight, problem.caps, strict=True)):
        held = state + in_flight * activation
        first = windows[stage].first
        if (held - held[first]).max() > cap:
            windows[stage] = make(np.maximum(first, held.searchsorted(held - cap)))
    return windows


class _WindowMaker:
    """Makes windows from the first starts, with what depends on the width alone looked up."""

    def __init__(self, problem: Problem) -> None:
        size = problem.num_groups + 1
        shift = 0 if problem.allow_empty else 1
        self._last = np.arange(-shift, size - shift)
        self._place = np.maximum(self._last, 0)
        # Level of a width: the largest power of two in it; widths start at 1.
        self._level = np.frexp(np.maximum(np.arange(size + 1), 1))[1].astype(np.int64) - 1
        self._row = self._level * size
        self._row_and_back = self._row + 1 - (1 << self._level)

    def __call__(self, first: Ints) -> _Window:
        """Make the window that starts at ``first[j]`` for each end ``j``."""
        closed = (first > self._last).nonzero()[0]
        left = np.minimum(first, self._place)
        width = self._place - left + 1
        return _Window(
            first=first,
            last=self._last,
            closed=closed,
            levels=int(self._level[width.max()]),
            left=left + self._row.take(width),
            right=self._place + self._row_and_back.take(width),
        )


def _table_of_maxima(score: Ints, levels: int) -> Ints:
    """Row ``k``, flattened: maxima over ``2**k`` entries from each place on."""
    table = np.empty((levels + 1, len(score)), dtype=np.int64)
    table[0] = score
    for level in range(levels):
        half = 1 << level
        count = len(score) - 2 * half + 1
        np.maximum(
            table[level, :count], table[level, half : half + count], out=table[level + 1, :count]
        )
    return table.ravel()
