"""The partitioner that shortens the simulated batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from dynpipe_ds.decide.methods import PartitionMethod
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.partition import (
    InfeasiblePartitionError,
    StageMemory,
    get_partitioner,
    optimal,
    run_partitioner,
    simulated,
    wants_profile,
)
from dynpipe_ds.simulation import Workload, predicted_batches_s, simulate


def profile_of(seconds: list[float], num_micro_batches: int, *, frozen: int = 0) -> PipelineProfile:
    layers = tuple(
        LayerProfile("l", s / 3, 0.0 if i < frozen else 2 * s / 3, 1, 4, 4, 8, 1) for i, s in enumerate(seconds)
    )
    return PipelineProfile(0, (0, len(layers)), num_micro_batches, layers, ())


def random_profile(seed: int, num_layers: int, num_micro_batches: int) -> PipelineProfile:
    return profile_of(np.random.default_rng(seed).lognormal(0, 0.7, num_layers).tolist(), num_micro_batches)


def predicted(profile: PipelineProfile, partitions: Iterable[Sequence[int]], **kwargs: Any) -> list[float]:
    return predicted_batches_s([(profile, boundaries) for boundaries in partitions], **kwargs)


def test_a_light_end_fills_the_pipeline_sooner() -> None:
    """Bottleneck 4 either way: with 2 micro-batches the cut decides how long filling takes."""
    profile = profile_of([4.0, 1.0, 1.0, 1.0], 2)
    plan = simulated(profile.costs(), 3, profile=profile)
    partitions = [(0, a, b, 4) for a, b in combinations(range(1, 4), 2)]
    assert predicted(profile, [plan.boundaries]) == [min(predicted(profile, partitions))]


def test_nearly_always_the_shortest_batch_and_never_longer_than_optimal() -> None:
    reached = 0
    for seed in range(30):
        num_layers, num_stages, num_micro_batches = 8 + seed % 4, 3 + seed % 2, 2 + seed % 5
        profile = random_profile(seed, num_layers, num_micro_batches)
        plan = simulated(profile.costs(), num_stages, profile=profile)
        ours, others = predicted(
            profile, [plan.boundaries, optimal(profile.costs(), num_stages).boundaries]
        )
        assert ours <= others * (1 + 1e-9)
        cuts = combinations(range(1, num_layers), num_stages - 1)
        best = min(predicted(profile, [(0, *inner, num_layers) for inner in cuts]))
        reached += ours <= best * (1 + 1e-9)
    assert reached >= 27


def test_many_micro_batches_leave_the_bottleneck() -> None:
    for seed in range(5):
        profile = random_profile(seed, 12, 200)
        plan, reference = simulated(profile.costs(), 4, profile=profile), optimal(profile.costs(), 4)
        assert plan.bottleneck == pytest.approx(reference.bottleneck, rel=0.01)


def test_slow_links_count() -> None:
    """Gradients of one boundary travel long: 1F1B's round trips through it stretch, so its stages get less."""
    profile = profile_of([1.0] * 12, 12)
    links = [0.0, 0.0, 3.0]
    plan = simulated(profile.costs(), 4, profile=profile, activation_link_s=links, gradient_link_s=links)
    ours, even = (
        simulate(Workload.from_profile(profile, cuts, activation_link_s=links, gradient_link_s=links)).makespan_s
        for cuts in (plan.boundaries, (0, 3, 6, 9, 12))
    )
    assert ours < 0.97 * even
    with pytest.raises(ValueError, match=r"gradient_link_s has shape \(2,\)"):
        simulated(profile.costs(), 4, profile=profile, gradient_link_s=[1.0, 2.0])


def test_constraints_hold() -> None:
    profile = random_profile(3, 12, 4)
    costs = profile.costs()
    plan = simulated(costs, 4, profile=profile, pinned=[3, 6, 9])
    assert not set(plan.boundaries) & {3, 6, 9}
    memory = StageMemory([10] * 12, [1] * 12, 4, cap_bytes=45)
    plan = run_partitioner(simulated, costs, 4, profile=profile, memory=memory)
    assert max(memory.stage_bytes(plan.boundaries)) <= 45
    with pytest.raises(InfeasiblePartitionError):
        simulated(costs, 4, profile=profile, memory=StageMemory([10] * 12, [1] * 12, 4, cap_bytes=20))
    slow_first = simulated(costs, 2, profile=profile, speeds=[0.25, 1.0])
    assert slow_first.boundaries[1] < simulated(costs, 2, profile=profile).boundaries[1]
    some_empty = simulated([5.0, 0.0], 3, allow_empty=True)
    assert some_empty.boundaries[0] == 0 and some_empty.boundaries[-1] == 2


def test_stays_where_nothing_is_shorter() -> None:
    """One micro-batch takes as long whatever the cut; with more, a light last stage drains sooner."""
    alone, profile = profile_of([1.0] * 9, 1), profile_of([1.0] * 9, 8)
    for cut in range(1, 9):
        current = (0, cut, 9)
        assert simulated(alone.costs(), 2, profile=alone, current=current).boundaries == current
        assert simulated(profile.costs(), 2, profile=profile, current=current).boundaries == (0, 5, 9)
    assert simulated([1.0], 1).boundaries == (0, 1)


def test_without_a_profile_and_by_parameters() -> None:
    assert simulated([1.0] * 8, 4).boundaries == (0, 2, 4, 6, 8)
    profile = random_profile(4, 8, 4)
    scaled = simulated([2 * cost for cost in profile.costs()], 3, profile=profile)
    assert scaled.boundaries == simulated(profile.costs(), 3, profile=profile).boundaries
    with pytest.raises(ValueError, match="the profile has 8 layers, the costs 9"):
        simulated([1.0] * 9, 3, profile=profile)


def test_a_frozen_prefix_has_no_backward() -> None:
    profile = profile_of([1.0] * 8, 4, frozen=4)
    plan = simulated(profile.costs(), 2, profile=profile)
    cuts = [(0, cut, 8) for cut in range(1, 8)]
    assert predicted(profile, [plan.boundaries]) == [min(predicted(profile, cuts))]


def test_by_name_it_gets_the_profile() -> None:
    assert wants_profile(get_partitioner("simulated")) and not wants_profile(get_partitioner("optimal"))
    assert not wants_profile(print.__class__), "no signature, no profile"
    profile = random_profile(5, 10, 3)
    plan = PartitionMethod.parse("simulated:time").plan(profile, 4)
    assert plan.boundaries == simulated(profile.costs(), 4, profile=profile).boundaries
    assert PartitionMethod.parse("simulated:parameters").plan(profile, 2).boundaries == (0, 5, 10)
