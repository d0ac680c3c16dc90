"""A slow replica shows beside the others of its stage, without any move; noise alone says nothing."""

from __future__ import annotations

import math
import random

import pytest

from dynpipe_ds.decide.replicas import BATCHES, Replicas
from dynpipe_ds.decide.speeds import Speeds

CUTS = (0, 2, 4)


def seen(*batches: list[list[float]]) -> Replicas:
    """What is known after some kinds of batches, each seen as often as is needed."""
    replicas = Replicas()
    for busy_s in batches:
        for _ in range(BATCHES):
            replicas.observe(busy_s)
    return replicas


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_one_slow_worker_is_found_and_believed_until_it_recovers(num_replicas: int) -> None:
    slow = [[2.0] * num_replicas, [1.0] * (num_replicas - 1) + [1.5]]
    replicas = Replicas()
    changes = [replicas.observe(slow) for _ in range(3 * BATCHES)]
    assert changes.index(True) == BATCHES - 1 and sum(changes) == 1
    assert replicas.differing(0) == [] and replicas.slowest(0) == replicas.mean(0) == 0.0
    assert replicas.differing(1) == [(num_replicas - 1, pytest.approx(math.log(1.5)))]
    assert replicas.slowest(1) == pytest.approx(math.log(1.5))
    assert replicas.mean(1) == pytest.approx(math.log((num_replicas + 0.5) / num_replicas))
    for _ in range(BATCHES):
        replicas.observe([[2.0] * num_replicas, [1.0] * num_replicas])
    assert replicas.slowness == ()


def test_batches_that_disagree_tell_nothing() -> None:
    replicas = Replicas()
    for number in range(40):
        assert not replicas.observe([[1.0, 3.0 if number % BATCHES else 1.0]])
    assert replicas.slowness == ()


def test_one_replica_or_a_stage_without_layers_tells_nothing() -> None:
    assert seen([[], []]).slowness == ()
    assert seen([[0.0, 0.0], [1.0, 1.0]]).slowness == ()
    assert seen([[0.0, 1.0], [1.0, 1.0]]).slowness == ()


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_batches_of_noise_tell_of_no_replica(seed: int) -> None:
    rng, replicas = random.Random(seed), Replicas()
    for _ in range(1000):
        replicas.observe([[rng.gauss(1.0, 0.1) for _ in range(2)] for _ in range(4)])
        assert replicas.slowness == ()


def speeds_of(given: list[float] | None, *kinds: tuple[list[float], list[list[float]]]) -> Speeds:
    """Speeds that have seen batches with these costs of layers and seconds of replicas."""
    speeds, batch = Speeds(given), 0
    for costs, busy_s in kinds:
        for _ in range(BATCHES):
            speeds.observe(batch, CUTS, costs, busy_s)
            batch += 1
    return speeds


SLOW = [[2.0, 2.0], [2.0, 4.0]]  # of two replicas of the second stage one takes twice as long


def test_the_slowest_replica_paces_its_stage_and_layers_are_measured_by_the_mean() -> None:
    speeds = speeds_of(None, ([1.0, 1.0, 1.5, 1.5], SLOW))
    assert speeds.values == pytest.approx([1.0, 0.5])
    assert speeds.means == pytest.approx([1.0, 1 / 1.5])
    assert speeds.describe() == ["replica 1 of stage 1 slower by 2.00x"]


@pytest.mark.parametrize(("given", "values"), [
    ([1.0, 0.5], [1.0, 0.5]),  # just that was meant
    ([1.0, 0.25], [1.0, 0.25]),  # both are slow
    ([1.0, 1.0], [1.0, 0.5]),
    ([2.0, 1.0], [2.0, 0.5]),
])  # fmt: skip
def test_what_was_given_is_of_the_slowest_replica(given: list[float], values: list[float]) -> None:
    assert speeds_of(given, ([1.0, 1.0, 1.5, 1.5], SLOW)).values == pytest.approx(values)


def test_layers_that_move_to_a_slow_replica_do_not_count_it_twice() -> None:
    speeds = speeds_of(None, ([1.0, 1.0, 1.5, 1.5], SLOW))
    for batch in range(100, 104):
        speeds.observe(batch, (0, 3, 4), [1.0, 1.0, 1.0, 1.5], [[3.0, 3.0], [1.0, 2.0]])
    assert speeds.values == pytest.approx([1.0, 0.5])


def test_a_copy_knows_what_the_first_knew() -> None:
    first, second = speeds_of(None, ([1.0, 1.0, 1.5, 1.5], SLOW)), Speeds(None)
    second.load_state_dict(first.state_dict())
    assert second.values == first.values and second.means == first.means
    assert second.state_dict() == first.state_dict()
    for speeds in (first, second):
        speeds.observe(100, CUTS, [1.0] * 4, [[2.0, 2.0], [2.0, 2.0]])
    assert second.state_dict() == first.state_dict()


def test_another_number_of_stages_begins_anew() -> None:
    speeds = speeds_of(None, ([1.0, 1.0, 1.5, 1.5], SLOW))
    assert speeds.observe(100, (0, 4), [1.0] * 4, [[4.0, 4.0]])
    assert speeds.values is None
