"""Layers that are known to change: what was measured before says nothing of them, and a decision needs no proof."""

from __future__ import annotations

import random

import pytest

from dynpipe_ds.decide import Balancer
from tests.decide.synthetic import QUIET, Boundaries, Noise, controller, profile

EVEN: Boundaries = (0, 3, 6, 9, 12)
BEFORE = [0.010] * 12
CHEAPER = [0.010] * 3 + [0.004] * 9
DEARER = [0.010] * 9 + [0.020] * 3


def observed(
    balancer: Balancer, seconds: list[float], batches: range, noise: Noise = QUIET, seed: int = 0
) -> list[int]:
    """Train on one partition; returns the batches after which layers were to move."""
    rng, moves = random.Random(seed), []
    for batch in batches:
        balancer.observe(profile(noise.apply(seconds, EVEN, rng), EVEN, batch=batch))
        decided = balancer.decide(batch, EVEN)
        if decided is not None and decided[1].rebalance:
            moves.append(batch)
    return moves


def test_only_what_was_measured_since_is_combined() -> None:
    balancer = controller()
    observed(balancer, BEFORE, range(8))
    balancer.expect_change()
    smoothed = []
    for batch in range(8, 12):
        observed(balancer, DEARER, range(batch, batch + 1))
        combined = balancer.smoothed()
        assert combined is not None
        smoothed.append(combined.costs("time")[-1])
    assert smoothed == [pytest.approx(0.020)] * 4, "the batches before are not in the median"


@pytest.mark.parametrize("after", [CHEAPER, DEARER], ids=["faster", "slower"])
def test_a_known_change_is_answered_at_once(after: list[float]) -> None:
    """Also where layers have become slower, which otherwise could be one odd batch."""
    told, untold = controller(), controller()
    for balancer in (told, untold):
        assert observed(balancer, BEFORE, range(8)) == []
    told.expect_change()
    first, later = (observed(balancer, after, range(8, 20)) for balancer in (told, untold))
    assert first[0] == 8
    if after is DEARER:
        assert later[0] > 8, "else the test would tell nothing"


def test_a_known_change_under_noise_is_no_reason_to_move() -> None:
    """Each batch is told to have changed, and none has: what is beyond the noise decides as ever."""
    balancer, noise = controller(), Noise(layer=0.02, rank=0.02)
    rng, moves = random.Random(3), 0
    for batch in range(300):
        balancer.expect_change()
        balancer.observe(profile(noise.apply(BEFORE, EVEN, rng), EVEN, batch=batch))
        decided = balancer.decide(batch, EVEN)
        moves += decided is not None and decided[1].rebalance
    assert moves == 0


def test_known_changes_are_no_noise() -> None:
    """Layers become faster after every second batch: the first change that pays is answered at once."""
    told, untold = controller(), controller()
    steps = [[0.005] * frozen + [0.010] * (12 - frozen) for frozen in (0, 3, 5, 6)]
    moves: dict[Balancer, list[int]] = {told: [], untold: []}
    for step, seconds in enumerate(steps):
        for balancer, moved in moves.items():
            if balancer is told and step:
                balancer.expect_change()
            moved += observed(balancer, seconds, range(2 * step, 2 * step + 2), Noise(layer=0.002), seed=step)
    assert moves[told][0] == 6
    assert moves[untold] != moves[told], "else the test would tell nothing"


def test_a_known_change_is_answered_at_once_under_noise_of_which_little_is_known() -> None:
    """In the first batches of a run, the first of which is slow in parts."""
    moved = []
    for seed in range(40):
        balancer, noise = controller(), Noise(layer=0.03, rank=0.05)
        observed(balancer, [0.020] * 4 + BEFORE[4:], range(1), noise, seed)
        assert observed(balancer, BEFORE, range(1, 4), noise, seed + 100) == []
        balancer.expect_change()
        moved.append(observed(balancer, [0.004] * 8 + [0.010] * 4, range(4, 8), noise, seed + 200)[:1])
    assert sum(batch == [4] for batch in moved) > 20 and sum(batch in ([4], [5], [6]) for batch in moved) == 40


def test_what_was_known_to_change_is_kept() -> None:
    first, second = controller(), controller()
    observed(first, BEFORE, range(2))
    first.expect_change()
    observed(first, DEARER, range(2, 4))
    second.load_state_dict(first.state_dict())
    noise = first._history.stage_noise(EVEN)
    assert second._history.stage_noise(EVEN) == noise == 0.0
    older = {key: value for key, value in first.state_dict().items() if key != "changed_before"}
    second.load_state_dict(older)
    assert second._history.stage_noise(EVEN) > 0.01, "the step counts, as when it was written"


def test_a_copy_knows_what_can_be_compared() -> None:
    first, second = controller(), controller()
    observed(first, BEFORE, range(8))
    first.expect_change()
    observed(first, DEARER, range(8, 9))
    second.load_state_dict(first.state_dict())
    assert second.smoothed() == first.smoothed()
    older = {key: value for key, value in first.state_dict().items() if key != "num_comparable"}
    second.load_state_dict(older)
    combined = second.smoothed()
    assert combined is not None and combined.costs("time")[-1] == pytest.approx(0.010), "as older checkpoints were read"


def test_what_was_measured_before_is_no_reason_to_move() -> None:
    """Also with an interval, which asks for no evidence: the old times would move a layer."""
    told, untold = (controller(rebalance_every=1, min_gain=0.0) for _ in range(2))
    for balancer in (told, untold):
        for batch in range(5):
            balancer.observe(profile(DEARER, EVEN, batch=batch))
    told.expect_change()
    assert observed(told, BEFORE, range(5, 9)) == []
    assert observed(untold, BEFORE, range(5, 6)) == [5]
