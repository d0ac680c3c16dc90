"""`diffusion`: what falls, when it stops, and how far from `optimal` it ends."""

import numpy as np
import pytest

from dynpipe_ds.partition import (
    InfeasiblePartitionError,
    StageMemory,
    check_boundaries,
    diffusion,
    optimal,
    uniform,
)
from dynpipe_ds.partition.diffusion import potential, round_bound

UNLIMITED = 10**9


def loads_of(boundaries, costs, speeds=None):
    speeds = speeds or [1.0] * (len(boundaries) - 1)
    return [
        sum(costs[a:b]) / v for a, b, v in zip(boundaries, boundaries[1:], speeds, strict=False)
    ]


def random_case(rng):
    """Costs and a starting point, from none to all layers at one end."""
    num_stages = int(rng.integers(2, 13))
    num_layers = int(rng.integers(num_stages, 8 * num_stages))
    kind = rng.integers(3)
    if kind == 0:
        costs = rng.lognormal(size=num_layers)
    else:
        costs = rng.integers(kind - 1, 5, num_layers).astype(float)
    costs[rng.integers(num_layers)] += 1
    starts = [
        None,
        [*range(num_stages), num_layers],
        [0, *range(num_layers - num_stages + 1, num_layers + 1)],
        [0, *sorted(rng.choice(num_layers - 1, num_stages - 1, replace=False) + 1), num_layers],
    ]
    return costs.tolist(), num_stages, starts[rng.integers(len(starts))]


def test_potential_is_the_sum_over_pairs():
    assert potential([1.0, 4.0, 6.0]) == 3 + 5 + 2
    assert potential([2.0, 2.0]) == 0


def test_rounds_keep_the_bound_and_the_end_is_no_better_than_optimal(record_property):
    rng = np.random.default_rng(0)
    ratios, shares = [], []
    for _ in range(400):
        costs, num_stages, current = random_case(rng)
        gamma = float(rng.choice([0.1, 0.01, 1e-6])) * sum(costs)
        plan = diffusion(costs, num_stages, current=current, gamma=gamma, max_rounds=UNLIMITED)
        bound = round_bound(num_stages, sum(costs), gamma)
        assert plan.rounds <= bound, (costs, num_stages, current)
        best = optimal(costs, num_stages).bottleneck
        assert best <= plan.bottleneck
        ratios.append(plan.bottleneck / best)
        shares.append(plan.rounds / bound)
    record_property("bottleneck over optimal, mean", float(np.mean(ratios)))
    record_property("bottleneck over optimal, largest", float(np.max(ratios)))
    record_property("rounds over bound, largest", float(np.max(shares)))


@pytest.mark.parametrize("with_speeds", [False, True])
def test_potential_and_bottleneck_never_rise(with_speeds):
    rng = np.random.default_rng(1)
    for _ in range(60):
        costs, num_stages, current = random_case(rng)
        speeds = rng.choice([0.25, 0.5, 1.0], num_stages).tolist() if with_speeds else None
        options = {"current": current, "speeds": speeds, "gamma": 0.0}
        rounds = diffusion(costs, num_stages, max_rounds=UNLIMITED, **options).rounds
        steps = [
            loads_of(
                diffusion(costs, num_stages, max_rounds=count, **options).boundaries, costs, speeds
            )
            for count in range(rounds + 1)
        ]
        for before, after in zip(steps, steps[1:], strict=False):
            assert potential(after) < potential(before)
            assert max(after) <= max(before)


def test_stops_at_gamma():
    costs = [1.0] * 40
    start = [0, 37, 38, 39, 40]
    already = potential(loads_of(start, costs))
    assert diffusion(costs, 4, current=start, gamma=already).boundaries == tuple(start)
    plan = diffusion(costs, 4, current=start)
    # Neighbours that differ by one layer have nothing to pass on: one short of even.
    assert plan.boundaries == (0, 11, 21, 31, 40)
    assert 0 < plan.rounds <= round_bound(4, 40.0, 0.4)
    within = diffusion([1.0] * 4000, 4, current=[0, 3997, 3998, 3999, 4000])
    assert within.bottleneck <= 1.01 * 1000


def test_stops_at_max_rounds():
    start = [0, 37, 38, 39, 40]
    plan = diffusion([1.0] * 40, 4, current=start, max_rounds=0)
    assert (plan.boundaries, plan.rounds) == (tuple(start), 0)


def test_starts_from_uniform():
    costs = [1.0] * 7
    assert diffusion(costs, 3).boundaries == uniform(costs, 3).boundaries
    assert diffusion(costs, 3, current=[0, 7]).boundaries == uniform(costs, 3).boundaries


def test_keeps_pinned_cuts_and_fills_stages():
    rng = np.random.default_rng(2)
    for _ in range(100):
        costs, num_stages, current = random_case(rng)
        pinned = (np.flatnonzero(rng.random(len(costs) - 1) < 0.1) + 1).tolist()
        if len(costs) - len(pinned) < num_stages:
            continue
        plan = diffusion(costs, num_stages, current=current, pinned=pinned)
        check_boundaries(
            plan.boundaries, num_layers=len(costs), num_stages=num_stages, pinned=pinned
        )


def test_gives_the_last_layer_only_where_empty_stages_are_allowed():
    costs, current = [1.0, 1.0, 0.1], [0, 1, 2, 3]
    speeds = [1.0, 0.01, 1.0]
    assert diffusion(costs, 3, current=current, speeds=speeds).boundaries == (0, 1, 2, 3)
    plan = diffusion(costs, 3, current=current, speeds=speeds, allow_empty=True)
    assert plan.bottleneck < 100


def test_takes_no_layers_beyond_the_cap():
    costs, start = [1.0] * 8, [0, 6, 8]
    memory = StageMemory([10] * 8, [0] * 8, 4, [100, 30])
    plan = diffusion(costs, 2, current=start, memory=memory)
    assert plan.boundaries == (0, 5, 8)
    memory = StageMemory([10] * 8, [0] * 8, 4, [30, 100])
    assert diffusion(costs, 2, current=[0, 2, 8], memory=memory).boundaries == (0, 3, 8)
    with pytest.raises(InfeasiblePartitionError, match="diffusion: stage 0 .* 'optimal'"):
        diffusion(costs, 2, current=[0, 4, 8], memory=memory)


@pytest.mark.parametrize("gamma", [-1.0, float("nan")])
def test_wrong_gamma(gamma):
    with pytest.raises(ValueError, match="gamma is .*; it must be finite and >= 0"):
        diffusion([1.0] * 4, 2, gamma=gamma)
