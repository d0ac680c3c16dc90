"""Partitions whose stages take about as long."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from dynpipe_ds.planning.even import even_cuts, most_groups
from dynpipe_ds.simulation.workload import FloatArray


def table(layers_s: FloatArray, speeds: tuple[float, ...], num_widths: int) -> FloatArray:
    """Seconds of each stage by where it ends and how many layers it holds; at least one."""
    until = np.array([0.0, *np.cumsum(layers_s)])
    seconds = np.full((len(speeds), len(until), num_widths), np.inf)
    for stage, speed in enumerate(speeds):
        for end in range(len(until)):
            for width in range(1, min(end, num_widths - 1) + 1):
                seconds[stage, end, width] = (until[end] - until[end - width]) / speed
    return seconds


def cost(seconds: FloatArray, cuts: tuple[int, ...], num_doublings: int) -> float:
    return sum(
        float(seconds[stage, end, end - first]) ** 2**num_doublings if end - first < seconds.shape[2] else np.inf
        for stage, (first, end) in enumerate(pairwise(cuts))
    )


@pytest.mark.parametrize("num_doublings", [1, 4])
@pytest.mark.parametrize("num_widths", [4, 11])
def test_no_partition_has_a_smaller_sum_of_powers(num_doublings: int, num_widths: int) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        seconds = table(rng.lognormal(0, 0.7, 10), (1.0, 0.5, 1.0, 1.5), num_widths)
        seconds[rng.random(seconds.shape) < 0.1] = np.inf  # what does not fit
        every = [(0, *inner, 10) for inner in combinations(range(1, 10), 3)]
        least = min(cost(seconds, cuts, num_doublings) for cuts in every)
        found = even_cuts(seconds, num_doublings)
        if found is None:
            assert least == np.inf
        else:
            assert cost(seconds, found, num_doublings) <= least * (1 + 1e-9) < np.inf


def test_none_where_nothing_is_allowed() -> None:
    assert even_cuts(np.full((3, 7, 4), np.inf), 4) is None
    seconds = table(np.ones(6), (1.0, 1.0, 1.0), 4)
    seconds[1] = np.inf
    assert even_cuts(seconds, 4) is None


def test_stages_beside_the_longest_are_even_too() -> None:
    """The dear layer is a stage of its own; of the other six, each of two stages has three."""
    assert even_cuts(table(np.array([1.0] * 6 + [9.0]), (1.0,) * 3, 8), 4) == (0, 3, 6, 7)
    assert even_cuts(table(np.array([0.0] * 4 + [1.0] * 4), (1.0,) * 4, 9), 4) is not None, "layers that take no time"


def test_groups_within_twice_the_share() -> None:
    assert most_groups(np.array([0.0, 1, 2, 3, 4, 5, 6, 7, 8]), 4) == 4
    assert most_groups(np.array([0.0, 5, 6, 7, 8, 9]), 3) == 5, "a group above the share is what a stage must take"
    assert most_groups(np.array([0.0, 0, 0, 1, 2, 3, 4]), 2) == 6, "layers that take no time cost nothing"
