"""Small changes of a partition, for local searches."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynpipe_ds.partition.problem import Problem

MOST_AT_ONCE = 600
"""Partitions of one round, which are all where there are 24 stages: beyond, NumPy gains nothing by more at once."""

Cuts = tuple[int, ...]
IntArray = npt.NDArray[np.int64]


def neighbours(problem: Problem, cuts: Cuts) -> IntArray:
    """Partitions with one cut, or a run of neighbouring cuts, one group further left or right.

    Where there are too many runs, those of some lengths: long ones matter, too, since a layer that goes from the first
    stage to the last moves all cuts.

    Args:
        problem: says which partitions are allowed.
        cuts: S + 1 indices of groups.

    Returns:
        ``(N, S + 1)`` indices of groups; at most :data:`MOST_AT_ONCE` partitions, if there are so few with one cut
        moved.
    """
    moved = np.array(cuts) + _shifts(problem.num_stages)
    is_allowed = (np.diff(moved) >= (0 if problem.allow_empty else 1)).all(axis=1)
    moved = moved[is_allowed]
    if problem.caps:
        held = np.diff(np.array(problem.state)[moved])
        held += np.array(problem.in_flight) * np.diff(np.array(problem.activation)[moved])
        moved = moved[(held <= np.array(problem.caps)).all(axis=1)]
    return moved


@cache
def _shifts(num_stages: int) -> IntArray:
    """What each run adds to the cuts of all stages, ``(N, S + 1)``."""
    inner, shifts = num_stages - 1, []
    for first in range(1, inner + 1):
        for end in (first + length for length in _lengths(inner) if first + length <= inner + 1):
            for shift in (-1, 1):
                shifts.append([shift * (first <= cut < end) for cut in range(num_stages + 1)])
    return np.array(shifts, dtype=np.int64).reshape(-1, num_stages + 1)


@cache
def _lengths(inner: int) -> tuple[int, ...]:
    """Lengths of runs: all, or as many as there may be, from 1 to S - 1 in equal ratios."""
    if inner * (inner + 1) <= MOST_AT_ONCE:
        return tuple(range(1, inner + 1))
    count = max(1, MOST_AT_ONCE // (2 * inner))
    return tuple(sorted({round(inner ** (i / max(1, count - 1))) for i in range(count)}))


def own_cuts(problem: Problem, boundaries: tuple[int, ...] | None) -> Cuts | None:
    """Boundaries as cuts between a problem's groups, if they are one of its partitions.

    Args:
        problem: the problem.
        boundaries: layer indices.

    Returns:
        S + 1 indices of groups; None when a boundary or the number of stages is another, or a stage is not allowed.
    """
    num_stages = problem.num_stages
    if boundaries is None or len(boundaries) != num_stages + 1 or not set(boundaries) <= set(problem.starts):
        return None
    cuts = tuple(problem.snap(boundaries))
    least = 0 if problem.allow_empty else 1
    sizes_fit = all(b - a >= least and problem.fits(s, a, b) for s, (a, b) in enumerate(pairwise(cuts)))
    return cuts if sizes_fit else None

