"""How often snapshots are taken, and what one costs."""

from __future__ import annotations

import random

import pytest

from dynpipe_ds.snapshots.interval import LEAST_COMPARED, LONGEST, SHARE, SnapshotCost, smallest_interval


@pytest.mark.parametrize("cost", [0.001, 0.0299, 0.03, 0.031, 0.25, 3.0, 40.0])
def test_the_interval_is_the_smallest_that_costs_less_than_the_share(cost: float) -> None:
    found = smallest_interval(cost)
    assert cost / found < SHARE
    assert found == 1 or cost / (found - 1) >= SHARE


def test_intervals_end_somewhere() -> None:
    assert smallest_interval(float("nan")) == smallest_interval(0.0) == 1
    assert smallest_interval(float("inf")) == smallest_interval(1e9) == LONGEST


def one(cost: SnapshotCost, *, before_s: float, inside_s: float, longer_s: float, every: int, batch_s: float) -> float:
    """A snapshot under way for one batch, then batches without one; what was not seen of it."""
    cost.begin()
    cost.spend(before_s, before_batch=True)
    cost.batch(batch_s + longer_s, is_under_way=True)
    cost.spend(inside_s)
    unseen_s = cost.end()
    for _ in range(every - 1):
        cost.batch(batch_s, is_under_way=False)
    return unseen_s


def test_what_no_clock_sees_is_found_by_comparison() -> None:
    cost = SnapshotCost()
    unseen = [
        one(cost, before_s=0.01, inside_s=0.02, longer_s=0.05, every=5, batch_s=0.2) for _ in range(LEAST_COMPARED + 2)
    ]
    assert unseen[:LEAST_COMPARED] == [0.0] * LEAST_COMPARED, "the first is compared with nothing"
    assert unseen[LEAST_COMPARED:] == [pytest.approx(0.03)] * 2, "0.06 s longer, 0.03 s of them seen"
    assert cost.in_batches == pytest.approx(0.3)


def test_nothing_less_than_what_is_seen_is_believed() -> None:
    cost = SnapshotCost()
    for _ in range(8):
        assert one(cost, before_s=0.01, inside_s=0.05, longer_s=-0.1, every=5, batch_s=0.2) == 0.0
    assert cost.in_batches == pytest.approx(0.3)


def test_without_batches_in_between_nothing_is_compared() -> None:
    cost = SnapshotCost()
    for number in range(8):
        one(cost, before_s=0.001, inside_s=0.0, longer_s=0.0, every=1, batch_s=0.2 / (number + 1))
    assert not cost.is_compared, "batches that become shorter tell nothing about snapshots"
    assert SnapshotCost().in_batches == 0.0


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("unseen_s", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("drift", [0.0, -0.002])
def test_snapshots_cost_as_much_as_they_may(noise: float, unseen_s: float, drift: float) -> None:
    """In the end, not by what is seen: batches of 0.2 s, 5 ms seen, and batches that get shorter or do not."""
    draw = random.Random(1)
    cost, next_batch, lost_s, batches_s = SnapshotCost(), 0, 0.0, 0.0
    for batch in range(400):
        batch_s = 0.2 * (1 + drift) ** batch
        is_taken = batch >= next_batch
        if is_taken:
            cost.begin()
            cost.spend(0.005, before_batch=True)
        cost.batch(batch_s * draw.gauss(1.0, noise) + unseen_s * is_taken, is_under_way=is_taken)
        if batch >= 100:
            lost_s += (0.005 + unseen_s) * is_taken
            batches_s += batch_s
        if is_taken:
            cost.end()
            next_batch = batch + max(1 if cost.is_compared else 2, smallest_interval(cost.in_batches))
    assert (0.5 * SHARE if unseen_s and not drift else 0.0) < lost_s / batches_s < (1.5 if noise else 1.2) * SHARE
