"""A slow worker is measured as soon as layers move to it or from it; noise alone says nothing of workers."""

from __future__ import annotations

import random
from itertools import count, pairwise, product

import pytest

from dynpipe_ds.decide import Balancer
from dynpipe_ds.decide.speeds import Speeds
from tests.decide.synthetic import NOISES, QUIET, Boundaries, Noise, controller, profile

LAYERS = 24


def measured(
    costs: list[float], boundaries: Boundaries, slow: dict[int, float], noise: Noise, rng: random.Random
) -> list[float]:
    stages = [s for s, (a, b) in enumerate(pairwise(boundaries)) for _ in range(a, b)]
    return noise.apply([cost * slow.get(s, 1.0) for cost, s in zip(costs, stages, strict=True)], boundaries, rng)


def play(
    slow: dict[int, float], *, num_batches: int, noise: Noise = QUIET, seed: int = 0, num_stages: int = 4,
    costs: list[float] | None = None, **section: object,
) -> tuple[Balancer, list[Boundaries]]:
    """The balancer, with its own partitioner, on workers some of which are slow."""
    rng, costs = random.Random(seed), costs or [0.01] * LAYERS
    balancer = controller(**section)
    cuts: Boundaries = tuple(round(s * LAYERS / num_stages) for s in range(num_stages + 1))
    ran = []
    for batch in range(num_batches):
        ran.append(cuts)
        seconds = measured(costs, cuts, slow, noise, rng)
        if not balancer.wants_profile(batch):
            continue
        balancer.observe(profile(seconds, cuts, batch=batch))
        decided = balancer.decide(batch, cuts)
        if decided is not None and decided[1].rebalance:
            cuts = decided[0].boundaries
            balancer.record_cost(0.02)
            balancer.moved(batch)
    return balancer, [*ran, cuts]


def bottleneck(cuts: Boundaries, slow: dict[int, float]) -> float:
    return max((b - a) * slow.get(s, 1.0) for s, (a, b) in enumerate(pairwise(cuts)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [QUIET, Noise(layer=0.02, rank=0.02)], ids=str)
@pytest.mark.parametrize("worker", range(4))
def test_one_of_four_workers_is_slow(worker: int, noise: Noise, seed: int) -> None:
    slow = {worker: 1.5}
    balancer, ran = play(slow, num_batches=10, noise=noise, seed=seed)
    best = min(
        max(count * slow.get(stage, 1.0) for stage, count in enumerate((a, b, c, LAYERS - a - b - c)))
        for a, b, c in product(range(1, 9), repeat=3)
    )
    assert bottleneck(ran[-1], slow) <= best / 0.95
    speeds = balancer.speeds
    if speeds is None:  # the cut is as good, and the noise is too large to be sure of the worker
        assert noise is not QUIET
        return
    assert speeds[worker] == pytest.approx(1 / 1.5, rel=0.1)
    assert all(speed == 1.0 for stage, speed in enumerate(speeds) if stage != worker)


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_a_thousand_quiet_batches_tell_of_no_worker(noise: Noise) -> None:
    balancer, ran = play({}, num_batches=1000, noise=noise)
    assert balancer.speeds is None
    if not noise.spike_probability:
        assert len(set(ran)) == 1


def test_what_was_given_is_corrected() -> None:
    balancer, _ = play({1: 2.0}, num_batches=16, stage_speeds=[1.0, 1.0, 0.5, 1.0])
    speeds = balancer.speeds
    assert speeds is not None
    assert speeds[1] == pytest.approx(0.5, rel=0.1) and speeds[2] == pytest.approx(1.0, rel=0.1)


def test_layers_that_change_tell_of_no_worker() -> None:
    speeds = Speeds(None)
    for batch in range(4):
        speeds.observe(batch, (0, 2, 4), [1.0, 1.0, 1.0, 1.0])
    speeds.expect_change()
    for batch in range(4, 8):
        assert not speeds.observe(batch, (0, 3, 4), [1.0, 1.0, 3.0, 1.0])
    assert speeds.values is None


def shown(*moments: tuple[Boundaries, list[float]]) -> Speeds:
    """Speeds that have seen each of some partitions for four batches."""
    speeds, numbers = Speeds(None), count()
    for cuts, costs in moments:
        for _ in range(4):
            speeds.observe(next(numbers), cuts, costs)
    return speeds


SLOW_SECOND = (((0, 2, 4), [1.0, 1.0, 2.0, 2.0]), ((0, 3, 4), [1.0, 1.0, 1.0, 2.0]))


def test_a_worker_that_recovers() -> None:
    assert shown(*SLOW_SECOND).values == [1.0, 0.5]
    assert shown(*SLOW_SECOND, ((0, 2, 4), [1.0] * 4)).values is None


def test_all_of_a_machine_may_slow_down_meanwhile() -> None:
    assert shown(((0, 2, 4), [1.0] * 4), ((0, 3, 4), [1.4] * 4)).values is None


def test_a_copy_knows_what_the_first_knew() -> None:
    first, second = shown(*SLOW_SECOND), Speeds(None)
    second.load_state_dict(first.state_dict())
    assert second.values == first.values == [1.0, 0.5]
    assert second.state_dict() == first.state_dict()


def test_layers_that_change_slowly_tell_of_no_worker() -> None:
    """Where few batches are profiled, what was measured before a move is old."""
    speeds = Speeds(None)
    for batch in range(0, 80, 10):
        cost = 1.0 - batch / 200
        speeds.observe(batch, (0, 2, 4) if batch < 40 else (0, 3, 4), [1.0, 1.0, cost, 1.0])
    assert speeds.values is None


def test_layers_that_change_after_a_move_tell_of_no_worker() -> None:
    """Of the model that changes four batches later, and of one that changes while a layer moves."""
    cheaper = [1.0, 1.0, 0.4, 0.4]
    assert shown(((0, 2, 4), [1.0] * 4), ((0, 3, 4), [1.0] * 4), ((0, 3, 4), cheaper)).values is None
    assert shown(((0, 2, 4), [1.0] * 4), ((0, 3, 4), cheaper)).values is None, "the last layer stayed, and changed"


def test_layers_that_change_by_unlike_amounts_while_they_move_tell_of_no_worker() -> None:
    """Tokens leave early: the deeper a layer is, the less it takes, and the one that moved fell by more than others."""
    exited = [1.0, 1.0, 1.0, 0.9, 0.8, 0.4, 0.5, 0.5, 0.5]
    assert shown(((0, 3, 6, 9), [1.0] * 9), ((0, 2, 5, 9), exited)).values is None


def test_what_a_pass_takes_by_itself_tells_of_no_worker() -> None:
    """It is measured with the layer that a stage begins with, whichever that is."""
    before, after = [0.25, 0.2, 0.2, 0.25, 0.2, 0.2], [0.25, 0.2, 0.25, 0.2, 0.2, 0.2]
    assert shown(((0, 3, 6), before), ((0, 2, 6), after)).values is None


def test_layers_that_changed_just_before_they_moved_tell_of_no_worker() -> None:
    """They moved because they had changed: the batches before are those of another model, all but the newest."""
    speeds, cheaper = Speeds(None), [1.0] * 6 + [0.4, 0.4]
    for batch in range(8):
        speeds.observe(batch, (0, 4, 8), [1.0 + 0.001 * (batch % 2)] * 4 + [1.0] * 4)
    speeds.observe(8, (0, 4, 8), cheaper)
    for batch in range(9, 13):
        speeds.observe(batch, (0, 3, 6, 8)[:1] + (3, 8), cheaper)
    assert speeds.values is None
    changed = Speeds(None)
    for batch in range(9):
        changed.observe(batch, (0, 7, 8), [1.0] * 6 + ([1.0, 1.0] if batch < 8 else [0.4, 0.4]))
    for batch in range(9, 13):
        changed.observe(batch, (0, 6, 8), cheaper)
    assert changed.values is None, "layer 6 takes 0.4 of what it took, and so does layer 7, which stayed"
