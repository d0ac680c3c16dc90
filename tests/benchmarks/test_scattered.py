"""Batches of stages that hold what does not follow each other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.paper.scattered import Chunk, Passes, chunks_of, makespan_s
from dynpipe_ds.simulation import Workload, equal_stages_s, simulate


def holders_of(cuts: list[int]) -> list[int]:
    """Rank of every layer of a partition."""
    return [rank for rank, (first, end) in enumerate(pairwise(cuts)) for _ in range(first, end)]


def test_ranges_of_layers() -> None:
    assert chunks_of([0, 0, 1, 0, 2]) == [Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(2, 4, 5)]


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 8), (4, 16), (8, 8)])
def test_equal_stages_take_what_1f1b_takes(stages: int, count: int) -> None:
    passes = Passes(np.full((2 * stages, count), 0.5), np.full((2 * stages, count), 1.0))
    cuts = list(range(0, 2 * stages + 1, 2))
    assert makespan_s(holders_of(cuts), passes) == pytest.approx(equal_stages_s(stages, count, 1.0, 2.0))


@pytest.mark.parametrize("seed", range(8))
def test_contiguous_stages_take_what_the_simulator_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forward = rng.lognormal(0.0, 0.4, (16, 1)) * np.ones(16)
    cuts = [0, *sorted(rng.choice(np.arange(1, 16), 3, replace=False).tolist()), 16]
    frozen = cuts[1] if seed % 2 else 0
    backward = 2 * forward
    backward[:frozen] = 0.0
    found = makespan_s(holders_of(cuts), Passes(forward, backward, frozen, 0.01, 0.02, 0.05))
    sums = [[table[first:end].sum(0) for first, end in pairwise(cuts)] for table in (forward, backward)]
    trains = np.array([[end > frozen] for end in cuts[1:]])
    told = simulate(Workload(
        np.array(sums[0]) + 0.01, np.array(sums[1]) + 0.02 * trains, 16, activation_link_s=0.05, gradient_link_s=0.05,
        frozen_boundaries=1 if frozen else 0,
    ))  # fmt: skip
    assert found == pytest.approx(told.makespan_s, rel=1e-6)


def test_no_rank_works_faster_than_its_load() -> None:
    rng = np.random.default_rng(3)
    forward = rng.uniform(0.5, 1.5, (12, 20))
    holders = rng.integers(0, 4, 12).tolist()
    found = makespan_s(holders, Passes(forward, 2 * forward))
    loads = [3 * forward[np.array(holders) == rank].sum() for rank in range(4)]
    assert max(loads) <= found < 1.6 * max(loads)
    assert makespan_s(holders, Passes(forward, 2 * forward, message_s=0.1)) > found


def test_a_frozen_front_ends_the_way_back() -> None:
    forward = np.ones((4, 1))
    backward = np.array([[0.0], [0.0], [2.0], [2.0]])
    assert makespan_s([0, 0, 1, 1], Passes(forward, backward, 2, message_s=1.0)) == pytest.approx(4 + 1 + 4)
    assert makespan_s([0, 1, 0, 1], Passes(forward, backward, 2, message_s=1.0)) == pytest.approx(4 + 3 + 4 + 1)
