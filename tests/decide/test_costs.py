"""What a move is expected to cost: by its bytes, whatever one slow move took."""

from __future__ import annotations

import pytest

from dynpipe_ds.decide.costs import REMEMBERED, MoveCosts


def costs(*moves: tuple[int, float]) -> MoveCosts:
    found = MoveCosts()
    for move in moves:
        found.record(*move)
    return found


def test_nothing_is_known_before_the_first_move() -> None:
    assert MoveCosts().expected_s(100) is None


def test_more_bytes_cost_more() -> None:
    found = costs((100, 1.1), (200, 1.2), (400, 1.4))
    assert found.expected_s(1000) == pytest.approx(2.0)
    assert found.expected_s(50) == pytest.approx(1.05)


def test_one_slow_move_changes_little() -> None:
    found = costs((100, 9.0), (200, 1.2), (400, 1.4), (300, 1.3), (500, 1.5))
    assert found.expected_s(1000) == pytest.approx(2.0, rel=0.1)


def test_bytes_that_are_unknown_or_alike_tell_nothing_of_them() -> None:
    assert costs((0, 1.0), (0, 3.0), (0, 2.0)).expected_s(100) == 2.0
    assert costs((100, 1.0), (100, 3.0), (100, 2.0)).expected_s(900) == 2.0
    assert costs((100, 1.0), (200, 3.0)).expected_s(0) == 1.0


def test_more_bytes_never_cost_less() -> None:
    assert costs((100, 3.0), (200, 1.0)).expected_s(10_000) == 1.0


def test_two_moves_of_about_as_many_bytes_tell_little_of_bytes() -> None:
    """They differ by what planning took: a move of ten times the bytes costs at most ten times as much."""
    assert costs((100, 0.07), (101, 0.14)).expected_s(1000) == pytest.approx(0.7)


def test_what_is_kept() -> None:
    found = costs(*((size, float(size)) for size in range(1, 2 * REMEMBERED)))
    assert len(found.state_dict()) == REMEMBERED
    copy = MoveCosts()
    copy.load_state_dict(found.state_dict())
    assert copy.expected_s(3) == found.expected_s(3)
    copy.load_state_dict([0.5, 0.25])
    assert copy.expected_s(3) == 0.25
    with pytest.raises(ValueError, match="seconds = -1.0: must be finite and >= 0"):
        copy.record(1, -1.0)
