"""Small changes of a partition, for local searches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from dynpipe_ds.partition.problem import Problem

MOST_AT_ONCE = 600
"""Partitions of one round, which are all where there are 24 stages: beyond, NumPy gains nothing by more at once."""

Cuts = tuple[int, ...]


def neighbours(problem: Problem, cuts: Cuts) -> Iterator[Cuts]:
    """Partitions with one cut, or a run of neighbouring cuts, one group further left or right.

    Where there are too many runs, those of some lengths: long ones matter, too, since a layer that goes from the first
    stage to the last moves all cuts.

    Args:
        problem: says which partitions are allowed.
        cuts: S + 1 indices of groups.

    Yields:
        At most :data:`MOST_AT_ONCE`, if there are so few with one cut moved.
    """
    inner = problem.num_stages - 1
    lengths = _lengths(inner)
    for first in range(1, inner + 1):
        for end in (first + length for length in lengths if first + length <= inner + 1):
            for shift in (-1, 1):
                moved = (*cuts[:first], *(cut + shift for cut in cuts[first:end]), *cuts[end:])
                # Only the stages at both ends of the run change their size; all may change their layers.
                if _allowed(problem, moved, first - 1, end):
                    yield moved


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
    sizes_fit = all(_allowed(problem, cuts, s, s + 1) for s in range(num_stages))
    return cuts if sizes_fit else None


def _allowed(problem: Problem, cuts: Cuts, first_stage: int, end_stage: int) -> bool:
    least = 0 if problem.allow_empty else 1
    return (
        cuts[first_stage + 1] - cuts[first_stage] >= least
        and cuts[end_stage] - cuts[end_stage - 1] >= least
        and all(problem.fits(s, cuts[s], cuts[s + 1]) for s in range(first_stage, end_stage))
    )
