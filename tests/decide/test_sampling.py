"""Which batches are profiled: each while something changes, few while nothing does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest

from dynpipe_ds.decide.sampling import BUDGET, MOST_EVERY, SETTLED, Sampling

Model = Callable[[int], Sequence[float]]
EQUAL = [0.01] * 8
OTHER = [0.01] * 4 + [0.005] * 4


def profiled(
    sampling: Sampling, model: Model, batches: range, *, noise: float = 0.0, cost: float = 0.0, seed: int = 0
) -> list[int]:
    """The batches that are profiled, of a model whose layer times are those of a machine with some noise."""
    found = []
    for batch in batches:
        if not sampling.wants(batch):
            continue
        found.append(batch)
        rng = random.Random(1000 * seed + batch)
        seconds = [s * max(0.1, rng.gauss(1.0, noise)) for s in model(batch)]
        sampling.observe(batch, [*accumulate(seconds, initial=0.0)], tolerated=0.0125, cost=cost)
    return found


def gaps(batches: Sequence[int]) -> set[int]:
    return {after - before for before, after in pairwise(batches)}


@pytest.mark.parametrize(
    ("every", "cost", "expected"),
    [
        ("auto", 0.0, 1), ("auto", BUDGET, 1), ("auto", 3.5 * BUDGET, 4), ("auto", 1000 * BUDGET, MOST_EVERY),
        (1, 1.0, 1), (7, 0.0, 7), (25, 0.0, 25),
    ],
)  # fmt: skip
def test_as_seldom_as_the_budget_asks_for_or_the_user(every: Any, cost: float, expected: int) -> None:
    found = profiled(Sampling(every), lambda _: EQUAL, range(200), noise=0.02, cost=cost)
    assert found[:SETTLED] == list(range(SETTLED)), "first, every batch"
    assert gaps(found[SETTLED:]) == {expected}


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_change_is_seen_by_the_next_profile_and_then_every_batch_is_profiled(noise: float) -> None:
    for seed in range(20):
        at = 100 + seed
        sampling = Sampling("auto")
        found = profiled(
            sampling, lambda batch, at=at: OTHER if batch >= at else EQUAL, range(at + 40), noise=noise, cost=1.0,
            seed=seed,
        )  # fmt: skip
        first = next(batch for batch in found if batch >= at)
        assert first - at < MOST_EVERY
        assert [batch for batch in found if first <= batch < first + SETTLED] == [*range(first, first + SETTLED)]
        assert found[-1] - found[-2] == MOST_EVERY, "and it settles again"


def test_noise_and_a_machine_that_slows_down_as_a_whole_are_no_change() -> None:
    model: Model = lambda batch: [0.01 * (1 + batch % 3)] * 8  # noqa: E731
    for seed in range(20):
        found = profiled(Sampling(10), model, range(500), noise=0.1, seed=seed)
        assert len(found) < 500 / 10 + 2 * SETTLED


def test_noise_that_grows_is_got_used_to() -> None:
    sampling = Sampling(10)
    profiled(sampling, lambda _: EQUAL, range(50), noise=0.001)
    found = profiled(sampling, lambda _: EQUAL, range(50, 400), noise=0.2)
    assert gaps([batch for batch in found if batch > 300]) == {10}


def test_told_of_a_change_it_profiles_at_once() -> None:
    sampling = Sampling(10)
    profiled(sampling, lambda _: EQUAL, range(30))
    assert not sampling.wants(31)
    sampling.restart()
    assert profiled(sampling, lambda _: OTHER, range(31, 60))[: SETTLED + 1] == [*range(31, 31 + SETTLED), 48]


def test_one_slow_batch_at_the_start_or_a_model_without_times() -> None:
    assert gaps(profiled(Sampling(10), lambda b: OTHER if b == 0 else EQUAL, range(100))[-3:]) == {10}
    assert gaps(profiled(Sampling(10), lambda _: [0.0] * 8, range(100))[-3:]) == {10}


def test_one_that_goes_on_samples_as_the_uninterrupted_one() -> None:
    model: Model = lambda batch: OTHER if batch >= 40 else EQUAL  # noqa: E731
    expected = profiled(Sampling("auto"), model, range(100), noise=0.05, cost=0.03)
    for stop in range(100):
        first, second = Sampling("auto"), Sampling("auto")
        before = profiled(first, model, range(stop), noise=0.05, cost=0.03)
        second.load_state_dict(first.state_dict())
        assert before + profiled(second, model, range(stop, 100), noise=0.05, cost=0.03) == expected
