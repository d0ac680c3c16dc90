"""`optimal` against brute force, its tie-break, and its error messages."""

import itertools
import random

import numpy as np
import pytest

from dynpipe_ds.partition import InfeasiblePartitionError, StageMemory, optimal
from tests.steps import lines_run


def all_partitions(num_layers, num_stages, pinned, allow_empty):
    """Every contiguous partition that keeps the pinned cuts."""
    if allow_empty:
        choices = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
    else:
        choices = itertools.combinations(range(1, num_layers), num_stages - 1)
    for cuts in choices:
        if not pinned.intersection(cuts):
            yield (0, *cuts, num_layers)


def stage_of(boundaries):
    """Stage of every layer."""
    spans = zip(boundaries, boundaries[1:], strict=False)
    return [stage for stage, (first, end) in enumerate(spans) for _ in range(first, end)]


def to_move(old_stages, boundaries, layer_bytes):
    """Bytes, then layers, whose stage changes."""
    changed = [
        size
        for size, old, new in zip(layer_bytes, old_stages, stage_of(boundaries), strict=True)
        if old != new
    ]
    return sum(changed), len(changed)


def best_by_brute_force(case):
    """Smallest (bottleneck, bytes to move, layers to move), None if nothing is feasible."""
    costs, num_stages = case["costs"], case["num_stages"]
    speeds = case["speeds"] or [1.0] * num_stages
    caps = [float("inf")] * num_stages
    if case["memory"] is not None:
        caps = case["memory"].caps(num_stages)
    old_stages = stage_of(case["current"]) if case["current"] else None
    best = None
    for cuts in all_partitions(len(costs), num_stages, set(case["pinned"]), case["allow_empty"]):
        if case["memory"] is not None and any(
            used > cap for used, cap in zip(case["memory"].stage_bytes(cuts), caps, strict=True)
        ):
            continue
        loads = [sum(costs[a:b]) / v for a, b, v in zip(cuts, cuts[1:], speeds, strict=False)]
        bottleneck = max(loads)
        if best is not None and bottleneck > best[0]:
            continue
        moved = to_move(old_stages, cuts, case["layer_bytes"]) if old_stages else (0, 0)
        best = min(best or (bottleneck, *moved), (bottleneck, *moved))
    return best


def random_case(rng, *, with_memory, with_speeds, allow_empty):
    """One small problem with whole costs, so that float sums are exact."""
    num_layers, num_stages = rng.randint(1, 8), rng.randint(1, 5)
    kind = rng.choice(["small", "zeros", "huge", "wide"])
    values = {"small": (1, 2, 3), "zeros": (0, 0, 1), "huge": (0, 1, 2), "wide": range(1000)}
    costs = [rng.choice(values[kind]) for _ in range(num_layers)]
    if kind == "huge":
        costs[rng.randrange(num_layers)] = 1000
    memory = None
    if with_memory:
        memory = StageMemory(
            state_bytes=[rng.randint(0, 10) for _ in costs],
            activation_bytes=[rng.randint(0, 6) for _ in costs],
            num_micro_batches=rng.randint(1, 6),
            cap_bytes=rng.choice([rng.randint(10, 80), rng.choices(range(80), k=num_stages)]),
        )
    old_cuts = sorted(rng.randint(0, num_layers) for _ in range(num_stages - 1))
    return {
        "costs": costs,
        "num_stages": num_stages,
        "current": rng.choice([None, [0, *old_cuts, num_layers], [0, num_layers]]),
        "layer_bytes": [rng.choice([0, 1, 1, 2, 100]) for _ in costs],
        "memory": memory,
        "pinned": [c for c in range(1, num_layers) if rng.random() < rng.choice([0, 0.3])],
        "speeds": rng.choices([0.125, 0.5, 1.0, 2.0], k=num_stages) if with_speeds else None,
        "allow_empty": allow_empty,
    }


def check_case(case):
    """Compare one case with brute force; say whether it was feasible."""
    expected = best_by_brute_force(case)
    try:
        plan = optimal(**case)
    except InfeasiblePartitionError:
        assert expected is None, case
        return False
    moved = (0, 0)
    if case["current"]:
        moved = to_move(stage_of(case["current"]), plan.boundaries, case["layer_bytes"])
        assert plan.bytes_to_move == moved[0], case
    assert (plan.bottleneck, *moved) == expected, case
    assert plan.boundaries in set(
        all_partitions(
            len(case["costs"]), case["num_stages"], set(case["pinned"]), case["allow_empty"]
        )
    )
    return True


@pytest.mark.parametrize("allow_empty", [False, True], ids=["full", "empty-allowed"])
@pytest.mark.parametrize("with_memory", [False, True], ids=["", "memory"])
@pytest.mark.parametrize("with_speeds", [False, True], ids=["", "speeds"])
def test_agrees_with_brute_force(with_memory, with_speeds, allow_empty):
    rng = random.Random(f"{with_memory} {with_speeds} {allow_empty}")
    feasible = 0
    for _ in range(800):
        feasible += check_case(
            random_case(
                rng, with_memory=with_memory, with_speeds=with_speeds, allow_empty=allow_empty
            )
        )
    assert 200 < feasible


def test_group_that_fits_on_some_stages_only():
    # Speed and cap both close stages to some layers: found by a longer random search.
    case = {
        "costs": [1, 0, 5, 20, 2, 2, 0],
        "num_stages": 5,
        "current": [0, 0, 0, 3, 5, 7],
        "layer_bytes": [0, 1, 100, 1, 1, 100, 1],
        "memory": StageMemory([3, 1, 0, 2, 3, 5, 9], [1, 1, 3, 4, 6, 6, 0], 3, 47),
        "pinned": [],
        "speeds": [1, 2, 1, 1, 2],
        "allow_empty": False,
    }
    assert check_case(case)


def test_float_costs_and_uneven_speeds():
    rng = random.Random(3)
    for _ in range(300):
        case = random_case(rng, with_memory=False, with_speeds=False, allow_empty=False)
        case["costs"] = [rng.lognormvariate(0, 1) for _ in case["costs"]]
        case["speeds"] = [rng.uniform(0.1, 3) for _ in range(case["num_stages"])]
        expected = best_by_brute_force(case)
        if expected is not None:
            assert optimal(**case).bottleneck == pytest.approx(expected[0], rel=1e-12)


def test_zero_costs_alone():
    plan = optimal([0.0] * 5, 3)
    assert plan.bottleneck == 0
    assert plan.predicted_gain == 0


def test_huge_layer_stands_alone_and_the_rest_is_even():
    plan = optimal([1.0] * 6 + [50.0] + [1.0] * 6, 5)
    assert plan.bottleneck == 50
    assert plan.boundaries == (0, 3, 6, 7, 10, 13)


def test_unequal_workers_get_unequal_shares():
    plan = optimal([1.0] * 9, 2, speeds=[1.0, 0.5])
    assert plan.boundaries == (0, 6, 9)
    assert plan.bottleneck == 6


def test_keeps_an_optimal_current_partition():
    costs = [1.0, 1.0, 8.0, 1.0, 1.0]
    for current in ((0, 2, 3, 5), (0, 1, 3, 5), (0, 2, 4, 5)):
        plan = optimal(costs, 3, current=current, layer_bytes=[7] * 5)
        if max(sum(costs[a:b]) for a, b in zip(current, current[1:], strict=False)) == 8:
            assert plan.boundaries == current
        assert plan.bottleneck == 8


def test_equal_bytes_are_decided_by_layers():
    # Layers without bytes (functions, say) are not moved for nothing.
    plan = optimal([9.0, 0.0, 0.0, 0.0, 9.0], 2, current=[0, 4, 5], layer_bytes=[5, 0, 0, 0, 5])
    assert plan.boundaries == (0, 4, 5)
    plan = optimal([9.0, 0.0, 0.0, 0.0, 9.0], 2, current=[0, 4, 5])
    assert plan.boundaries == (0, 4, 5)


def test_current_partition_with_another_number_of_stages():
    plan = optimal([1.0] * 6, 2, current=[0, 2, 4, 6], layer_bytes=[10] * 6)
    assert plan.boundaries == (0, 3, 6)
    # Layer 2 joins stage 0, layer 3 stays on stage 1, layers 4 and 5 leave stage 2.
    assert plan.bytes_to_move == 10 + 20
    assert plan.bottleneck_before == 2


def test_counts_micro_batches_in_flight():
    # 4 layers of 10 bytes of activations: stage 0 holds min(M, 2) micro-batches of them.
    def memory(num_micro_batches, cap):
        return StageMemory([0] * 4, [10] * 4, num_micro_batches, cap)

    assert optimal([1.0] * 4, 2, memory=memory(8, 40)).boundaries == (0, 2, 4)
    assert optimal([1.0] * 4, 2, memory=memory(8, 30)).boundaries == (0, 1, 4)
    assert optimal([1.0] * 4, 2, memory=memory(1, 30)).boundaries == (0, 2, 4)


def test_infeasible_memory_names_the_layer():
    memory = StageMemory([10, 10, 900, 10], [1, 1, 50, 1], 4, 500)
    with pytest.raises(InfeasiblePartitionError, match=r"^layer 2 alone: 950 bytes on stage 1.*"):
        optimal([1.0] * 4, 2, memory=memory)
    with pytest.raises(InfeasiblePartitionError, match="cap of 500 bytes; raise the memory cap"):
        optimal([1.0] * 4, 2, memory=memory)


def test_infeasible_memory_names_pinned_layers():
    memory = StageMemory([300] * 4, [0] * 4, 4, 500)
    with pytest.raises(InfeasiblePartitionError, match="pinned layers 1 to 2 alone: 600 bytes"):
        optimal([1.0] * 4, 3, memory=memory, pinned=[2])


def test_infeasible_memory_names_the_total_and_the_caps():
    memory = StageMemory([400] * 4, [10] * 4, 4, [700, 800])
    with pytest.raises(InfeasiblePartitionError, match="at least 1,640 bytes.* add up to 1,500"):
        optimal([1.0] * 4, 2, memory=memory)


def test_infeasible_memory_of_early_stages():
    memory = StageMemory([0] * 4, [10] * 4, 4, 25)
    with pytest.raises(InfeasiblePartitionError, match="no contiguous partition.*up to 2 micro"):
        optimal([1.0] * 4, 2, memory=memory)


def test_fewer_layers_than_stages():
    with pytest.raises(InfeasiblePartitionError, match="2 layers are fewer than 3 stages.*use few"):
        optimal([1.0, 2.0], 3)
    with pytest.raises(InfeasiblePartitionError, match=r"3 layers in 2 groups \(pinned"):
        optimal([1.0] * 3, 3, pinned=[1])
    plan = optimal([1.0, 2.0], 3, allow_empty=True)
    assert plan.bottleneck == 2
    assert plan.num_stages == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1.0, float("nan")]}, "cost of layer 1 is nan; costs must be finite"),
        ({"costs": [1.0, 2.0, -3.0]}, "cost of layer 2 is -3.0"),
        ({"costs": []}, r"costs have shape \(0,\)"),
        ({"costs": [1e308, 1e308]}, "add up to more than a float can hold"),
        ({"num_stages": 0}, "num_stages is 0; it must be at least 1"),
        ({"num_stages": 1.5}, "num_stages .* must be a sequence of integers"),
        ({"pinned": [4]}, r"pinned cut 4 is outside 1\.\.3"),
        ({"speeds": [1.0]}, "speeds have 1 entries; give one for each of 2"),
        ({"speeds": [1.0, 0.0]}, "speed of stage 1 is 0.0"),
        ({"current": [0, 3, 2, 4]}, "current partition: boundaries .* fall from 3 to 2"),
        ({"layer_bytes": [1]}, "layer_bytes has 1 entries for 4 layers"),
        ({"layer_bytes": [1, 1, -1, 1]}, "layer_bytes of layer 2 is -1"),
        ({"layer_bytes": [2**60] * 4}, "layer_bytes add up to .* bytes; sums must stay below"),
        ({"memory": StageMemory([1], [1], 1, 9)}, "memory describes 1 layers, the costs 4"),
        ({"memory": StageMemory([1] * 4, [1] * 4, 1, [9])}, "cap_bytes has 1 entries"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimal(**{"costs": [1.0] * 4, "num_stages": 2, **arguments})


def test_whole_numbers_of_any_size_stay_exact():
    costs = [3 * 2**40 + 1, 3 * 2**40, 1, 2, 3]
    assert optimal(costs, 2).bottleneck == 3 * 2**40 + 6
    assert optimal([cost * 2.0**-900 for cost in costs], 2).bottleneck == 2.0**-900 * (
        3 * 2**40 + 6
    )


def test_result_is_of_plain_numbers():
    plan = optimal(
        np.array([1, 2, 3, 4]),
        np.int64(2),
        current=np.array([0, 1, 4]),
        layer_bytes=np.array([5, 6, 7, 8]),
    )
    assert plan.boundaries == (0, 3, 4)
    assert {type(cut) for cut in plan.boundaries} == {int}
    assert type(plan.bottleneck) is float
    assert type(plan.bytes_to_move) is int


def test_large_case_takes_few_steps():
    # The benchmark measures; this notices a change of complexity: now it is 43,000 lines of code.
    rng = np.random.default_rng(0)
    costs = rng.lognormal(size=1000).tolist()
    current = [*range(256), 1000]
    num_lines = lines_run(lambda: optimal(costs, 256, current=current, layer_bytes=[10**9] * 1000))
    assert num_lines < 100_000
