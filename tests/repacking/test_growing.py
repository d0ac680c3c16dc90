"""More stages where workers wait: the decision against brute force, and that noise moves nothing to and fro."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from dynpipe_ds.repacking.confirming import MOST, TURN, TWICE, Confirmation
from dynpipe_ds.repacking.decision import Wish, fewest_stages, to_stages
from dynpipe_ds.repacking.outcome import Refusal, Repacking
from dynpipe_ds.repacking.request import Request
from tests.matrix import mostly
from tests.repacking.test_decision import best_partitions, granted, in_order, one_f_one_b_s, refused, request

WISH = Wish(tolerance=0.05, min_gain=1.1 / 0.95 - 1)


def even(num_layers: int, num_stages: int, **options: Any) -> Request:
    """Layers that all take a second, on stages of as many as can be."""
    cuts = tuple(num_layers * stage // num_stages for stage in range(num_stages + 1))
    return request([1.0] * num_layers, cuts, **{"micro_batches": 16, **options})


# -- where the workers are ----------------------------------------------------------------------


def test_to_more_stages() -> None:
    """All that are there stay; the last one goes on reading labels; nobody is released."""
    found = granted(to_stages(even(8, 2, more_stages=3), 4))
    assert found.num_stages == 4 and found.boundaries == (0, 2, 4, 6, 8)
    assert found.holders == (0, None, None, 1) and found.joining_stages == (1, 2)
    assert found.surviving_ranks == (0, 1) and not found.released_ranks and not found.released_nodes
    assert found.seconds_after == pytest.approx(one_f_one_b_s(even(8, 2), found.boundaries))
    assert found.reason.startswith("2 -> 4 stages have 1")
    alone = granted(to_stages(even(4, 1, more_stages=1), 2))
    assert alone.holders == (0, None)


def test_more_workers_than_layers() -> None:
    found = granted(to_stages(even(4, 2, more_stages=7), 9))
    assert found.num_stages == 4 and found.reason.endswith("of 9 stages asked for, 4 layers can use 4")
    pinned = granted(to_stages(even(4, 2, more_stages=7, pinned=[1]), 9))
    assert pinned.boundaries == (0, 2, 3, 4) and pinned.reason.endswith("4 layers and 1 pinned cuts can use 3")
    full = refused(to_stages(even(2, 2, more_stages=2), 4))
    assert full == "num_stages = 4: 2 layers can use 2; the pipeline has 2 stages already"


def test_more_than_there_are_workers_for() -> None:
    text = refused(to_stages(even(8, 2, more_stages=1), 4))
    assert "num_stages = 4: the pipeline has 2 stages, and workers for 1 more wait" in text and "dynpipe join" in text
    assert "num_stages = 2: the pipeline has 2 stages" in refused(to_stages(even(8, 2, more_stages=1), 2))


def test_nothing_is_known_of_who_waits() -> None:
    """As fast as the usual worker, with as much memory as the one with the least."""
    case = even(6, 3, more_stages=1, stage_speeds=[1.0, 0.5, 1.0], memory_cap_bytes=[500, 400, 300])
    assert case.speeds((0, None, 1, 2)) == [1.0, 1.0, 0.5, 1.0]
    memory = case.memory((0, 1, None, 2))
    assert memory is not None and memory.cap_bytes == [500, 400, 300, 300]
    found = granted(to_stages(case, 4))
    assert found.holders[0] == 0 and found.holders[-1] == 2
    speeds = case.speeds(found.holders)
    assert speeds is not None
    slow = speeds.index(0.5)
    assert found.boundaries[slow + 1] - found.boundaries[slow] == 1, "the slow one holds the least"
    assert max(found.stage_bytes) <= 300


# -- how many -----------------------------------------------------------------------------------


def test_as_many_as_bring_something() -> None:
    """Against every number by brute force: the fewest that nearly reach the best, where the best is far enough."""
    rng = random.Random(23)
    grown = 0
    for _ in range(120):
        num_layers = rng.randint(3, 8)
        present = rng.randint(1, min(3, num_layers))
        seconds = [rng.choice([0.1, 1.0]) * (1 + rng.random()) for _ in range(num_layers)]
        cuts = (0, *sorted(rng.sample(range(1, num_layers), present - 1)), num_layers)
        case = request(seconds, cuts, micro_batches=rng.randint(1, 8), more_stages=rng.randint(1, 4))
        wish = Wish(rng.choice([0.0, 0.05, 0.3]), min_gain=0.6)
        found = fewest_stages(case, wish)
        seconds_of = {}
        for n in range(1, min(num_layers, present + case.more_stages) + 1):
            options = [one_f_one_b_s(case, cut) for cut in best_partitions(case, n)]
            seconds_of[n] = min(options), max(options)
        present_s = min(one_f_one_b_s(case, case.current), seconds_of[present][1])
        best_s = min(least for least, _ in seconds_of.values())
        if isinstance(found, Repacking) and found.num_stages > present:
            grown += 1
            assert present_s / best_s >= 1.6 - 1e-9
            assert found.seconds_after <= seconds_of[found.num_stages][1] + 1e-9
            for n in range(1, found.num_stages):  # all below are too slow, in any of their best partitions but ties
                assert seconds_of[n][1] > best_s / (1 - wish.tolerance) - 1e-9
        elif isinstance(found, Refusal):
            more = [s for n, (s, _) in seconds_of.items() if n > present]
            enough = present_s <= min([present_s, *more]) / (1 - wish.tolerance) * (1 + 1e-6)
            assert enough or not more or present_s / min(s for n, (_, s) in seconds_of.items() if n > present) < 1.6
    assert grown > 20


def test_what_it_takes_to_grow() -> None:
    case = even(12, 2, more_stages=4)
    assert granted(fewest_stages(case, WISH)).num_stages == 6
    assert granted(fewest_stages(case, replace(WISH, max_stages=3))).num_stages == 3
    assert "would raise the predicted throughput by 142.9%" in refused(fewest_stages(case, replace(WISH, min_gain=3.0)))
    now_s = case.batch_s(case.current, range(2))
    long_s, short_s = 100 * now_s, now_s / 10
    assert granted(fewest_stages(case, replace(WISH, horizon_s=long_s, pause_s=now_s))).num_stages == 6
    assert "the pause takes" in refused(fewest_stages(case, replace(WISH, horizon_s=short_s, pause_s=now_s)))
    assert "lower min_stages" in refused(fewest_stages(even(12, 2), replace(WISH, min_stages=2)))
    # A heavy layer limits any number: two more workers would stand idle.
    heavy = request([1.0, 6.0, 1.0, 1.0, 1.0], (0, 2, 5), micro_batches=16, more_stages=3)
    assert granted(fewest_stages(heavy, Wish(0.05, min_gain=0.01))).num_stages == 3


def test_step_by_step_no_more_is_lost_than_at_once() -> None:
    """What all workers would reach is the measure, not what is left of them."""
    lost: dict[int, float] = {}
    for most_stages in (0, 8):
        case, wish = even(64, 8, most_stages=most_stages, micro_batches=2), Wish(0.2)
        start_s = case.batch_s(case.current, range(8))
        while isinstance(found := fewest_stages(case, wish), Repacking):
            workers = in_order(found.num_stages, [f"n{i}" for i in range(found.num_stages)])
            case = replace(case, current=found.boundaries, workers=workers)
        lost[most_stages] = 1.0 - start_s / case.batch_s(case.current, range(case.num_stages))
    assert lost[8] <= 0.2 < lost[0]


def test_links_that_were_not_measured_make_no_number_look_better() -> None:
    case = even(8, 4, more_stages=4, boundaries=(0, 2, 4, 6, 8))
    linked = replace(case, profile=replace(case.profile, link_s=(0.5, None, 0.5)))
    for count in (2, 3, 4, 6):
        cuts = tuple(8 * stage // count for stage in range(count + 1))
        holders = tuple(stage if stage < 4 else None for stage in range(count))
        more_s = linked.batch_s(cuts, holders) - case.batch_s(cuts, holders)
        assert more_s >= (count - 1) * 2 * 0.5 - 1e-9, "there and back over every boundary"


# -- never to and fro ---------------------------------------------------------------------------


class Job:
    """A run of decisions: profiles with noise, workers that come back as soon as they were given back.

    Args:
        rng: of the noise.
        seconds: what the layers really take.
        num_stages: to begin with.
        num_workers: in all.
        noise: standard deviation of a layer's seconds in one batch, as a share.
    """

    def __init__(
        self, rng: random.Random, seconds: list[float], num_stages: int, num_workers: int, noise: float
    ) -> None:
        self.rng, self.seconds, self.noise = rng, seconds, noise
        self.num_workers, self.wish = num_workers, WISH
        self.cuts = tuple(len(seconds) * stage // num_stages for stage in range(num_stages + 1))
        self.confirmation = Confirmation()
        self.sizes = [num_stages]
        self.micro_batches = rng.choice([2, 4, 8, 16])

    def decide(self, num_decisions: int, *, num_batches: int = 5) -> list[int]:
        """Decide so many times, each by the median of some batches; all numbers of stages so far."""
        for _ in range(num_decisions):
            noisy = [
                median(max(0.01, self.rng.gauss(1.0, self.noise)) * second for _ in range(num_batches))
                for second in self.seconds
            ]
            present = len(self.cuts) - 1
            case = request(
                noisy, self.cuts, micro_batches=self.micro_batches, more_stages=self.num_workers - present,
                most_stages=self.num_workers,
            )
            found = fewest_stages(case, self.wish)
            wished = found.num_stages if isinstance(found, Repacking) else None
            if self.confirmation.hear(present, wished):
                assert isinstance(found, Repacking)
                self.cuts = found.boundaries
                self.confirmation.carried_out(present, found.num_stages)
                self.sizes.append(found.num_stages)
        return self.sizes


def turns(sizes: list[int]) -> int:
    """How often the direction changed."""
    ways = [after > before for before, after in pairwise(sizes)]
    return sum(first != second for first, second in pairwise(ways))


def random_job(seed: int, noise: float) -> Job:
    rng = random.Random(seed)
    num_layers = rng.randint(4, 16)
    spread = rng.choice([0.0, 0.3, 1.0])
    seconds = [rng.lognormvariate(0.0, spread) for _ in range(num_layers)]
    num_workers = rng.randint(2, min(8, num_layers))
    return Job(rng, seconds, rng.randint(1, num_workers), num_workers, noise)


def test_without_noise_one_decision_is_the_last() -> None:
    for seed in range(80):
        assert len(random_job(seed, 0.0).decide(6)) <= 2


@pytest.mark.parametrize(("seeds", "num_batches"), mostly(
    [pytest.param(seeds, n, id=f"{len(seeds)} jobs, {n}") for seeds in (range(16), range(16, 200)) for n in (1, 5)],
    ["16 jobs, 5"],
))  # fmt: skip
def test_noise_moves_nothing_to_and_fro(seeds: range, num_batches: int) -> None:
    """One layer's seconds vary by 10% from batch to batch; the load stays: never back and forth again."""
    resized = 0
    for seed in seeds:
        job = random_job(seed, 0.1)
        sizes = job.decide(40, num_batches=num_batches)
        resized += len(sizes) > 1
        assert turns(sizes) <= 1, (seed, sizes)
    assert resized > len(seeds) / 3


def test_noise_alone_would() -> None:
    """Without the room between both shares and without waiting for the wish to be confirmed, there is no rest."""
    restless = 0
    for seed in range(6):
        job = random_job(seed, 0.1)
        job.wish = replace(WISH, min_gain=0.001)
        job.confirmation.hear = lambda present, wished: wished is not None  # type: ignore[method-assign]
        restless += turns(job.decide(20, num_batches=1)) > 1
    assert restless > 1


def test_a_load_that_really_changes_is_followed() -> None:
    rng = random.Random(2)
    job = Job(rng, [1.0] * 12, 6, 6, 0.1)
    job.micro_batches = 16
    assert job.decide(20) == [6]
    job.seconds = [1.0] + [0.001] * 11  # frozen, pruned, left early: one layer is all that is left
    assert job.decide(4)[-1] == 1
    job.seconds = [1.0] * 12
    assert job.decide(TURN - 1)[-1] == 1
    assert job.decide(3)[-1] == 6
    assert job.decide(100)[-1] == 6


def test_how_often_a_wish_must_be_heard() -> None:
    heard = Confirmation()
    assert [heard.hear(4, wished) for wished in (2, 3, 3)] == [False, False, True]
    heard.carried_out(4, 3)
    assert [heard.hear(3, 2) for _ in range(TWICE)] == [False, True], "the same direction"
    heard.carried_out(3, 2)
    assert [heard.hear(2, 4) for _ in range(TURN)] == [False] * (TURN - 1) + [True]
    heard.carried_out(2, 4)
    assert [heard.hear(4, None if i == 9 else 2) for i in range(2 * TURN)] == [False] * 2 * TURN, "not in a row"
    assert [heard.hear(4, 2) for _ in range(2 * TURN)].index(True) == 2 * TURN - 1 - (2 * TURN - 10)
    other = Confirmation()
    other.load_state_dict(heard.state_dict(), same_stages=True)
    assert other.state_dict() == heard.state_dict()
    for _ in range(5):
        heard.carried_out(4, 2)
        heard.carried_out(2, 4)
    assert [heard.hear(4, 2) for _ in range(MOST)] == [False] * (MOST - 1) + [True]
