"""Seconds and bytes of a batch in other micro-batches, and the number that is chosen with the stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynpipe_ds.repacking.decision import Wish, fewest_stages, to_stages
from dynpipe_ds.repacking.micro_batches import ASSUMED_SHARE, Scaling, possible_numbers
from tests.repacking.test_decision import granted, profile, request


def test_numbers_that_part_a_batch() -> None:
    assert possible_numbers(24, 4) == [1, 2, 3, 6, 8, 12, 24]
    assert possible_numbers(256, 64) == [8, 16, 32, 128, 256]
    assert possible_numbers(7, 7) == [1]
    assert possible_numbers(1, 1) == []


def test_seconds_before_anything_was_measured() -> None:
    """A fifth of what a micro-batch of the JSON's size takes is fixed; bytes and messages are in proportion."""
    scaling = Scaling(4)
    now = replace(profile([1.0, 2.0], micro_batches=4, held=[10, 3]), boundaries=(0, 1, 2), link_s=(0.4,))
    other = scaling.scaled(now, 4, 8)
    share = ASSUMED_SHARE + (1 - ASSUMED_SHARE) / 2
    assert other.costs("time") == pytest.approx([share, 2 * share])
    assert [layer.activation_bytes for layer in other.layers] == [5, 2] and other.link_s == (0.2,)
    assert other.num_micro_batches == 8 and not scaling.is_measured
    assert scaling.scaled(other, 2, 4).costs("time") == pytest.approx(now.costs("time"))


def test_two_sizes_tell_what_is_fixed() -> None:
    """0.3 s, and 0.1 s a sample; told once for each change."""
    scaling = Scaling(8)
    scaling.arrives(8, 1.1)
    assert not scaling.is_measured, "nothing to compare with"
    scaling.leaves(8, 1.1)
    scaling.arrives(2, 0.5)
    assert scaling.is_measured and scaling.fixed_samples == pytest.approx(3.0)
    scaling.arrives(2, 0.9)
    assert scaling.fixed_samples == pytest.approx(3.0)
    whole = replace(profile([0.5]), num_micro_batches=8)
    for number, seconds in ((16, 0.4), (4, 0.7), (1, 1.9)):
        assert scaling.scaled(whole, 2, number).costs("time") == pytest.approx([seconds])
    other = Scaling(8)
    other.load_state_dict(scaling.state_dict())
    assert other.fixed_samples == scaling.fixed_samples


@pytest.mark.parametrize(("size", "seconds"), [(4, 1.2), (2, 0.0), (8, 0.4)])
def test_noise_is_no_measurement(size: int, seconds: float) -> None:
    """More samples never take less, and what takes no time tells nothing; as little as one size alone."""
    scaling = Scaling(8)
    scaling.leaves(8, 1.1)
    scaling.arrives(size, seconds)
    assert not scaling.is_measured


def test_more_stages_need_more_micro_batches() -> None:
    """The more stages, the longer they fill and drain; with nothing fixed, ever more micro-batches are better."""
    scaling, chosen = Scaling(8), []
    for count in (1, 2, 4, 8):
        now = profile([1.0] * 16, micro_batches=8)
        case = request([1.0] * 16, (0, 8, 16) if count != 2 else (0, 16), micro_batches=8, more_stages=8)
        case = replace(case, others=scaling.alternatives(now, 8))
        chosen.append(granted(to_stages(case, count)).num_micro_batches)
    assert chosen == sorted(chosen) and chosen[0] == 1 < chosen[-1]
    free = Scaling(8)
    free.fixed_samples = 0.0
    case = request([1.0] * 16, (0, 16), micro_batches=8, more_stages=3)
    case = replace(case, others=free.alternatives(case.profile, 8))
    assert granted(to_stages(case, 4)).num_micro_batches == 64


def test_by_brute_force() -> None:
    """Every other number is slower, or saves next to nothing."""
    scaling = Scaling(4)
    case = request([1.0, 3.0, 2.0, 1.0, 2.0, 2.0], (0, 6), micro_batches=6, more_stages=2)
    case = replace(case, others=scaling.alternatives(case.profile, 4))
    found = granted(to_stages(case, 3))
    for asked in (replace(case, others=()), *case.alternatives()):
        other = granted(to_stages(asked, 3))
        assert found.seconds_after <= other.seconds_after * 1.021
    assert f"in {found.num_micro_batches} micro-batches" in found.reason
    assert found.seconds_before == case.batch_s(case.current, (0,))


def test_memory_counts_for_the_larger_micro_batches() -> None:
    case = request([1.0] * 4, (0, 2, 4), micro_batches=8, held=[10] * 4, state=[0] * 4, memory_cap_bytes=60)
    case = replace(case, others=Scaling(8).alternatives(case.profile, 8))
    found = granted(to_stages(case, 1))
    assert found.num_micro_batches == 8 and found.stage_bytes == (40,), "four would hold 80"
    roomy = replace(case, memory_cap_bytes=10**6)
    assert granted(to_stages(roomy, 1)).num_micro_batches == 1
    # Smaller ones may fit where the present ones don't.
    tight = replace(case, memory_cap_bytes=25)
    assert granted(to_stages(tight, 1)).num_micro_batches in (16, 32, 64)


def test_the_measure_of_both_ways_counts_them_too() -> None:
    """What more stages bring is compared with what the present ones would do in their best number."""
    case = request([1.0] * 8, (0, 4, 8), micro_batches=1, more_stages=2)
    with_others = replace(case, others=Scaling(16).alternatives(case.profile, 16))
    found = granted(fewest_stages(with_others, Wish(0.05, min_gain=0.2)))
    assert found.num_stages == 4 and found.num_micro_batches > 1
