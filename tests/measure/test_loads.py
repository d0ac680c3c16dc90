"""Imbalance of loads."""

from __future__ import annotations

import pytest

from dynpipe_ds.measure import imbalance


def test_it_is_the_papers_second_equation() -> None:
    assert imbalance([3.0, 1.0, 2.0]) == pytest.approx((3.0 - 1.0) / 2.0)
    assert imbalance([7.0, 7.0, 7.0]) == imbalance([]) == imbalance([0.0, 0.0]) == 0.0
    assert imbalance([0.0, 0.0, 0.0, 5.0]) == 4.0, "at most the number of workers"
    assert imbalance([6.0, 2.0, 4.0]) == imbalance([3.0, 1.0, 2.0]), "free of units"


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_impossible_loads_are_named(wrong: float) -> None:
    with pytest.raises(ValueError, match="must be finite numbers >= 0; leave out"):
        imbalance([1.0, wrong])
