"""The paper's algorithms as they are printed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from benchmarks.paper.algorithms import diffuse, partition, probed, repack
from dynpipe_ds.partition import optimal, run_partitioner


def costs_of(seed: int, count: int) -> list[float]:
    """Log-normal costs."""
    draw = random.Random(seed)
    return [draw.lognormvariate(3.0, 0.6) for _ in range(count)]


def bottleneck(costs: list[float], cuts: list[int]) -> float:
    """Largest sum of a stage."""
    return max(sum(costs[first:end]) for first, end in pairwise(cuts))


@pytest.mark.parametrize("seed", range(20))
def test_probing_finds_the_smallest_bottleneck_within_its_tolerance(seed: int) -> None:
    costs = costs_of(seed, 30)
    cuts = partition(costs, 6)
    assert cuts[0] == 0 and cuts[-1] == 30 and cuts == sorted(cuts)
    assert bottleneck(costs, cuts) == pytest.approx(optimal(costs, 6).bottleneck, abs=0.004)


def test_probing_fills_the_first_stages_and_may_leave_the_last_ones_empty() -> None:
    assert partition([5.0, 1.0, 1.0, 1.0, 0.0], 4) == [0, 1, 5, 5, 5]
    assert partition([1.0, 1.0], 4) == [0, 1, 2, 2, 2]
    assert partition([3.0, 1.0, 1.0, 1.0, 2.0, 4.0], 3, tolerance=1e-9) == [0, 2, 5, 6]


def test_a_coarse_tolerance_shows() -> None:
    """In seconds, DeepSpeed's 0.001 is more than a layer takes."""
    costs = [1e-4 * cost for cost in (9.0, 1.0, 1.0, 1.0, 1.0, 9.0)]
    assert bottleneck(costs, partition(costs, 3)) > 1.3 * optimal(costs, 3).bottleneck
    assert bottleneck(costs, list(probed(costs, 3))) == pytest.approx(optimal(costs, 3).bottleneck)


def test_a_pipeline_that_runs_has_no_empty_stages() -> None:
    assert list(run_partitioner(probed, [5.0, 1.0, 1.0, 1.0, 0.0], 4).boundaries) == [0, 1, 3, 4, 5]
    assert list(run_partitioner(probed, [0.0] * 8, 4).boundaries) == [0, 2, 4, 6, 8]


def test_diffusion_sends_the_least_layer_to_the_least_loaded_rank_of_all() -> None:
    """Rank 0 has 9, rank 1 5, rank 2 1: its smallest layer, the 2, goes past the neighbour."""
    found = diffuse([0, 0, 0, 1, 2], [3.0, 2.0, 4.0, 5.0, 1.0], 3, max_rounds=1)
    assert found.transfers == ((0, 2, 1),) and found.holders == (0, 2, 0, 1, 2) and found.rounds == 1
    assert not _is_contiguous(found.holders)


def _is_contiguous(holders: tuple[int, ...]) -> bool:
    return list(holders) == sorted(holders)


@pytest.mark.parametrize("seed", range(20))
def test_the_variance_falls_with_every_transfer(seed: int) -> None:
    costs, holders = costs_of(seed, 24), [layer // 4 for layer in range(24)]
    variances = []
    for rounds in range(7):
        found = diffuse(holders, costs, 6, max_rounds=rounds)
        loads = [sum(c for c, h in zip(costs, found.holders, strict=True) if h == rank) for rank in range(6)]
        mean = sum(loads) / 6
        variances.append(sum((load - mean) ** 2 for load in loads))
        assert sum(loads) == pytest.approx(sum(costs))
    assert all(a >= b for a, b in pairwise(variances)) and variances[-1] < variances[0]


def test_memory_stops_a_transfer_strictly() -> None:
    loads = {"holders": [0, 0, 1], "costs": [2.0, 2.0, 1.0], "num_ranks": 2, "layer_bytes": [4, 4, 4]}
    assert diffuse(**loads, max_bytes=9).transfers == ((0, 1, 0),)  # type: ignore[arg-type]
    assert diffuse(**loads, max_bytes=8).transfers == ()  # type: ignore[arg-type]


def test_equal_loads_are_left_alone() -> None:
    found = diffuse([0, 0, 1, 1], [1.0] * 4, 2)
    assert found.transfers == () and found.rounds == 0


def test_the_lower_worker_empties_into_the_higher_one() -> None:
    packed = repack([3, 3, 3, 3], 7)
    assert packed.transfers == ((0, 1), (2, 3)) and packed.active == (False, True, False, True)
    assert packed.worker_bytes == (0, 6, 0, 6)
    assert repack([3, 3, 3, 3], 6).transfers == (), "below the limit, not at it"
    assert repack([1, 1, 1, 1], 10, target=3).active == (False, True, True, True)


def test_as_printed_a_worker_is_given_away_twice() -> None:
    printed = repack([1, 5, 5], 7, as_printed=True)
    assert printed.transfers == ((0, 1), (0, 2)) and repack([1, 5, 5], 7).transfers == ((0, 1),)
    assert sum(printed.worker_bytes) > 11
