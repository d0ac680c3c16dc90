"""The two rules of DeepSpeed, and the repair of empty stages that they share."""

import itertools
import random

import numpy as np
import pytest

from dynpipe_ds.partition import (
    InfeasiblePartitionError,
    StageMemory,
    balanced,
    check_boundaries,
    optimal,
    uniform,
)
from dynpipe_ds.partition.repair import fill_empty_stages


@pytest.fixture(scope="module")
def deepspeed_utils():
    return pytest.importorskip("deepspeed.runtime.utils")


def test_uniform_is_deepspeeds_rule(deepspeed_utils):
    for num_layers, num_stages in itertools.product(range(1, 20), range(1, 8)):
        expected = tuple(deepspeed_utils.partition_uniform(num_layers, num_stages))
        plan = uniform([1.0] * num_layers, num_stages, allow_empty=True)
        assert plan.boundaries == expected


def test_balanced_is_deepspeeds_rule(deepspeed_utils):
    rng = np.random.default_rng(0)
    for _ in range(100):
        num_layers = int(rng.integers(1, 16))
        num_stages = int(rng.integers(1, num_layers + 1))
        costs = rng.integers(0, 9, num_layers).tolist()
        plan = balanced(costs, num_stages)
        if plan.boundaries != tuple(deepspeed_utils.partition_balanced(costs, num_stages)):
            raise AssertionError((costs, num_stages, plan))
        assert {type(cut) for cut in plan.boundaries} == {int}
        assert optimal(costs, num_stages).bottleneck <= plan.bottleneck


@pytest.mark.parametrize("partitioner", [uniform, balanced])
def test_keeps_pinned_cuts_and_fills_stages(partitioner):
    rng = random.Random(0)
    for _ in range(200):
        num_layers = rng.randint(2, 12)
        pinned = [cut for cut in range(1, num_layers) if rng.random() < 0.5]
        num_stages = rng.randint(1, num_layers - len(pinned))
        costs = [rng.choice([0, 0, 1, 50]) for _ in range(num_layers)]
        plan = partitioner(costs, num_stages, pinned=pinned)
        check_boundaries(
            plan.boundaries, num_layers=num_layers, num_stages=num_stages, pinned=pinned
        )


@pytest.mark.parametrize("partitioner", [uniform, balanced])
def test_fewer_layers_than_stages(partitioner):
    with pytest.raises(InfeasiblePartitionError, match="2 layers are fewer than 3 stages"):
        partitioner([1.0, 1.0], 3)
    assert partitioner([1.0, 1.0], 3, allow_empty=True).bottleneck == 1


@pytest.mark.parametrize("partitioner", [uniform, balanced])
def test_memory_is_checked_afterwards(partitioner):
    memory = StageMemory([10] * 4, [5] * 4, 4, 35)
    with pytest.raises(
        InfeasiblePartitionError,
        match="stage 0 with layers 0 to 1 needs 40 bytes, its cap is 35; the partitioner 'opt",
    ):
        partitioner([1.0] * 4, 2, memory=memory)
    with pytest.raises(InfeasiblePartitionError, match="at least 60 bytes.* add up to 58"):
        optimal([1.0] * 4, 2, memory=StageMemory([10] * 4, [5] * 4, 4, 29))


def test_figures_of_a_plan():
    plan = uniform([1.0, 2.0, 3.0, 4.0], 2, current=[0, 1, 4], layer_bytes=[1, 2, 3, 4])
    assert plan.boundaries == (0, 2, 4)
    assert (plan.bottleneck, plan.bottleneck_before, plan.bytes_to_move) == (7, 9, 2)
    assert uniform([1.0] * 4, 2, speeds=[1.0, 0.5]).bottleneck == 4


def test_empty_stages_are_filled_by_the_least_shift():
    rng = random.Random(1)
    for _ in range(500):
        num_groups = rng.randint(1, 7)
        num_stages = rng.randint(1, num_groups)
        inner = sorted(rng.randint(0, num_groups) for _ in range(num_stages - 1))
        cuts = [0, *inner, num_groups]
        filled = fill_empty_stages(cuts, num_groups)
        check_boundaries(filled, num_layers=num_groups, num_stages=num_stages)
        least = min(
            sum(abs(a - b) for a, b in zip(inner, other, strict=True))
            for other in itertools.combinations(range(1, num_groups), num_stages - 1)
        )
        assert sum(abs(a - b) for a, b in zip(cuts, filled, strict=True)) == least


def test_partition_without_empty_stages_is_left_alone():
    assert fill_empty_stages([0, 1, 5, 9], 9) == [0, 1, 5, 9]
