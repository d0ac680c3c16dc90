"""The best partition and order together."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.partition import StageMemory, optimal, simulated
from dynpipe_ds.planning import (
    PlannedBatch,
    activation_caps,
    assume_halves,
    least_seconds,
    plan_batch,
    plan_order,
    worker_bytes_of_1f1b,
)  # fmt: skip
from dynpipe_ds.planning.planner import SAME
from dynpipe_ds.simulation import Workload, simulate


def random_profile(seed: int, num_layers: int, num_micro_batches: int, num_frozen: int = 0) -> PipelineProfile:
    rng = np.random.default_rng(seed)
    layers = tuple(
        LayerProfile(f"l{i}", f, 0.0 if i < num_frozen else 2 * f, 10, 40, 40, 80, 0 if i < num_frozen else 1000)
        for i, f in enumerate(rng.lognormal(0, 0.7, num_layers).tolist())
    )
    return PipelineProfile(0, (), num_micro_batches, layers, ())


def half(profile: PipelineProfile) -> PipelineProfile:
    return assume_halves(profile, 0.5)


def planned_on(profile: PipelineProfile, cuts: tuple[int, ...], worker_bytes: int) -> float:
    """Seconds of the order planned for one partition; infinite if it does not fit."""
    workload = Workload.from_profile(half(profile), cuts)
    state = [sum(held) for held in (profile.state_bytes()[a:b] for a, b in zip(cuts, cuts[1:], strict=False))]
    caps = [worker_bytes - held for held in state]
    if any(cap < needed for cap, needed in zip(caps, workload.activation_bytes, strict=True)):
        return float("inf")
    return plan_order(workload, caps).seconds


def peaks(profile: PipelineProfile, found: PlannedBatch) -> list[int]:
    state = [sum(held) for held in found.placement.by_stage(profile.state_bytes())]
    return [a + b for a, b in zip(state, found.planned.peak_bytes, strict=True)]


@pytest.mark.parametrize("num_frozen", [0, 3])
def test_near_the_best_of_all_partitions(num_frozen: int) -> None:
    """9 layers on 3 stages: 28 partitions, each with its own planned order."""
    ratios = []
    for seed in range(8):
        profile = random_profile(seed, 9, 6, num_frozen)
        memory = StageMemory(profile.state_bytes(), profile.activation_bytes(), 6, 0)
        start = optimal(profile.costs("time"), 3).boundaries
        worker_bytes = max(memory.stage_bytes(start))
        found = plan_batch(half(profile), [start])
        every = [(0, a, b, 9) for a, b in combinations(range(1, 9), 2)]
        ratios.append(found.seconds / min(planned_on(profile, cuts, worker_bytes) for cuts in every))
        assert max(peaks(profile, found)) <= worker_bytes, "of the fullest worker under 1F1B on the first candidate"
    assert min(ratios) >= 1 - 1e-9 and np.mean(ratios) < 1.01 and max(ratios) < 1.05, ratios


def test_better_than_either_alone() -> None:
    """Of 1F1B's best cut, with an order planned for it, and of the best cut for the planned order."""
    gains = []
    for seed in range(4):
        profile = random_profile(seed, 24, 12)
        cuts = simulated(profile.costs("time"), 8, profile=profile).boundaries
        memory = StageMemory(profile.state_bytes(), profile.activation_bytes(), 12, 0)
        most = max(memory.stage_bytes(cuts))
        batch_s = simulate(Workload.from_profile(profile, cuts)).makespan_s
        found = plan_batch(half(profile), [cuts])
        assert found.seconds <= planned_on(profile, cuts, most) * (1 + SAME) <= batch_s * (1 + 2 * SAME)
        again = plan_batch(half(profile), [cuts])
        assert (found.placement, found.planned.order) == (again.placement, again.planned.order), "deterministic"
        gains.append(batch_s / found.seconds)
    assert min(gains) > 1.03 and np.mean(gains) > 1.15, gains


def test_more_effort_finds_shorter_batches_and_is_not_exceeded() -> None:
    """A longer search goes on where a shorter one ended; one trial may begin with what is left.

    It may end on a partition that promises more, but whose runs gain less by being pushed to and fro.
    """
    efforts, size, gains = (0, 2_000, 6_000, 60_000), 3 * 6 * 10, []
    for seed in range(6):
        profile = random_profile(seed, 18, 10)
        found = [plan_batch(half(profile), [(0, 3, 6, 9, 12, 15, 18)], effort=effort) for effort in efforts]
        seconds = [one.seconds for one in found]
        assert all(more < 1.01 * less for less, more in pairwise(seconds)), seconds
        assert found[0].num_computations <= 3 * size, "one rule on the candidate, and where the bound leads to"
        assert all(one.num_computations <= most + 14 * size for one, most in zip(found[1:], efforts[1:], strict=True))
        gains.append(seconds[0] / seconds[-1])
    assert sum(gain > 1.02 for gain in gains) >= 4, gains


def test_nothing_is_tried_where_nothing_can_be_shorter() -> None:
    """Equal layers, whose order has no bubble but that of filling: the bound is reached, and the search ends."""
    layers = tuple(LayerProfile(f"l{i}", 1.0, 2.0, 10, 40, 40, 80, 1000) for i in range(8))
    profile = half(PipelineProfile(0, (), 16, layers, ()))
    found = plan_batch(profile, [(0, 2, 4, 6, 8)], worker_bytes=10**9)
    assert found.seconds <= found.planned.least_s * (1 + SAME)
    assert found.num_computations <= 3 * (3 * 4 * 16)


def test_the_present_partition_is_compared_on_equal_terms() -> None:
    """It is planned in the way that is the best on the partition found, too, and kept if that is no longer."""
    stayed = 0
    for seed in range(8):
        profile = random_profile(seed, 8, 6)
        start = simulated(profile.costs("time"), 4, profile=profile).boundaries
        found = plan_batch(half(profile), [start], effort=1_500)
        assert found.present is not None and found.present.seconds >= found.seconds
        if found.placement.boundaries == start:
            assert found.present.order == found.planned.order
            stayed += 1
    assert 0 < stayed < 8, stayed


def test_never_slower_than_1f1b_on_a_candidate() -> None:
    """Nothing can be split, and as little memory as can be: then the candidate as it is."""
    for seed in range(6):
        profile = random_profile(seed, 10, 8)
        candidates = [(0, 5, 8, 10), (0, 2, 4, 10), (0, 3, 6, 10)]
        found = plan_batch(profile, candidates, effort=0, worker_bytes=10**9)
        least = min(simulate(Workload.from_profile(profile, cuts)).makespan_s for cuts in candidates)
        assert found.seconds <= least * (1 + SAME)


def test_links_speeds_and_constraints_count() -> None:
    profile = random_profile(1, 12, 6)
    options = {"speeds": [1.0, 0.5, 1.0], "activation_link_s": [0.1, 0.0], "gradient_link_s": 0.2}
    found = plan_batch(half(profile), [(0, 4, 8, 12)], pinned=[3, 5], **options)
    assert not {3, 5} & set(found.placement.boundaries)
    workload = Workload.from_profile(half(profile), found.placement, **options)
    assert found.planned.least_s <= simulate(workload, found.planned.order).makespan_s <= found.seconds
    caps = activation_caps(profile, found.placement, worker_bytes_of_1f1b(profile, (0, 4, 8, 12)))
    assert found.planned.least_s == least_seconds(workload, caps)
    slow = plan_batch(half(profile), [(0, 4, 8, 12)])
    slow_layers, layers = ([len(p.placement.chunks_of(1)[0]) for p in (found, slow)])
    assert slow_layers < layers, "a worker at half speed gets fewer layers"


def test_memory_of_each_worker() -> None:
    profile = random_profile(2, 12, 6)
    free = plan_batch(half(profile), [(0, 4, 8, 12)], worker_bytes=10**9)
    caps = [10**9, 3600, 10**9]
    tight = plan_batch(half(profile), [(0, 5, 7, 12)], worker_bytes=caps)
    assert peaks(profile, free)[1] > 3600 >= peaks(profile, tight)[1] and tight.seconds >= free.seconds


def test_refusals() -> None:
    profile = random_profile(1, 6, 4)
    with pytest.raises(ValueError, match=r"candidates = \[\]: need at least one partition to start from"):
        plan_batch(profile, [])
    with pytest.raises(ValueError, match=r"candidates = \[\[0, 3, 6\]\]: none is allowed by pinned cuts"):
        plan_batch(profile, [(0, 3, 6)], pinned=[3])
    with pytest.raises(ValueError, match=r"within worker_bytes = 3000; give another partition or raise"):
        plan_batch(profile, [(0, 3, 6)], worker_bytes=3000)
    with pytest.raises(ValueError, match="must rise from 0 to the number of layers, 6"):
        plan_batch(replace(profile, num_micro_batches=2), [(0, 3, 5)])


def test_stages_that_are_not_the_slowest_are_evened_out() -> None:
    """Three stages of frozen layers take no longer than the others however these layers are cut, so no step pays."""
    layers = tuple(
        LayerProfile(f"l{i}", 1.0, 0.0 if i < 30 else 2.0, 10, 40, 40, 80, 0 if i < 30 else 1000) for i in range(50)
    )
    profile = half(PipelineProfile(0, (), 32, layers, ()))
    uneven, even = (0, 12, 24, 30, 34, 38, 42, 46, 50), (0, 10, 20, 30, 34, 38, 42, 46, 50)
    found = plan_batch(profile, [uneven], worker_bytes=10**9)
    assert found.present is not None and found.seconds < 0.99 * found.present.seconds
    assert found.seconds < 1.005 * plan_batch(profile, [even], worker_bytes=10**9).seconds


@pytest.mark.parametrize(
    ("start", "options"),
    [
        ((0, 10), {}),
        ((0, 5, 10), {}),
        (tuple(range(11)), {}),
        ((0, 2, 6, 8, 10), {"speeds": (1, 0.5, 1, 1)}),
        ((0, 3, 6, 8, 10), {"pinned": (2, 5)}),
        ((0, 0, 6, 8, 10), {"allow_empty": True}),
    ],
)
@pytest.mark.parametrize("num_frozen", [0, 4, 10])
def test_any_pipeline_can_be_planned(start: tuple[int, ...], options: dict[str, Any], num_frozen: int) -> None:
    """One stage, a stage for each layer, speeds, pinned cuts, empty stages, and nothing that trains."""
    profile = half(random_profile(0, 10, 6, num_frozen))
    found = plan_batch(profile, [start], worker_bytes=10**9, **options)
    usual = simulate(Workload.from_profile(profile, start, speeds=options.get("speeds"))).makespan_s
    assert found.seconds <= usual * (1 + SAME)
    assert not set(options.get("pinned", ())) & set(found.placement.boundaries)
