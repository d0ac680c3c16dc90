"""Intervals of ratios: by hand, and as often right as they say where the truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scenarios.report.interval import (
    Estimate,
    median_of_ratios,
    ratio_of_totals,
)

TRUE = 1.2


def turns(rng: np.random.Generator, windows: int, batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of two runs' batches (windows, batches), in turns, on a machine whose slowness lasts for ten batches."""
    steps = 2 * windows * batches
    slowness, noise = np.zeros(steps + 100), rng.normal(size=steps + 100)
    for i in range(1, len(slowness)):
        slowness[i] = 0.9 * slowness[i - 1] + math.sqrt(1 - 0.9**2) * noise[i]
    seconds = np.exp(0.1 * slowness[100:]).reshape(windows, 2, batches)
    seconds[1::2] = seconds[1::2, ::-1]  # the order is reversed from window to window
    return TRUE * seconds[:, 0], seconds[:, 1]


def test_totals_by_hand() -> None:
    """4 / 3 of totals; deviations -1/3, 0, 1/3; t of two degrees of freedom is 4.30."""
    found = ratio_of_totals([1.0, 4.0, 3.0], [1.0, 3.0, 2.0])
    error = math.sqrt(3 / 2 * 2 / 9) / 6
    assert found.value == pytest.approx(4 / 3) and found.pairs == 3
    assert found.high == pytest.approx(4 / 3 + 4.30 * error, rel=0.01)
    assert found.low == pytest.approx(4 / 3 - 4.30 * error, rel=0.01)


def test_medians_by_hand() -> None:
    """Of six pairs, from the least to the greatest (97%); of fifteen, from the fourth to the fourth last (96%)."""
    six = median_of_ratios([1.0, 2.0, 3.0, 4.0, 5.0, 99.0], [1.0] * 6)
    assert six == Estimate(3.5, 1.0, 99.0, 6)
    fifteen = median_of_ratios([float(i) for i in range(15, 0, -1)], [1.0] * 15)
    assert fifteen == Estimate(8.0, 4.0, 12.0, 15)


def test_few_pairs_have_no_interval() -> None:
    assert ratio_of_totals([1.0, 2.0], [1.0, 1.0]) == Estimate(1.5, pairs=2)
    assert median_of_ratios([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == Estimate(3.0, pairs=5)
    assert ratio_of_totals([1.0] * 3, [1.0] * 3).low == ratio_of_totals([1.0] * 3, [1.0] * 3).high == 1.0


@pytest.mark.parametrize("windows", [3, 10])
def test_windows_of_one_run_are_as_often_right_as_they_say(windows: int) -> None:
    """Nine of ten times and more; with batches as pairs, which are not independent, only in two of three."""
    rng = np.random.default_rng(1)
    right = dict.fromkeys(("windows", "batches"), 0)
    for _ in range(400):
        static_s, dynamic_s = turns(rng, windows, 6)
        pairs = {"windows": [x.sum(axis=1) for x in (static_s, dynamic_s)],
                 "batches": [x.ravel() for x in (static_s, dynamic_s)]}  # fmt: skip
        for name, (above, below) in pairs.items():
            found = ratio_of_totals(above, below)
            assert found.low is not None and found.high is not None
            right[name] += found.low <= TRUE <= found.high
    assert right["windows"] / 400 > 0.88
    assert right["batches"] / 400 < 0.80, "or windows need not be taken as a whole"


def test_medians_are_as_often_right_as_they_say() -> None:
    """Whatever the noise: here one action in ten takes three times as long."""
    rng = np.random.default_rng(2)
    right = 0
    for _ in range(400):
        above, below = (np.where(rng.random(15) < 0.1, 3.0, 1.0) * rng.lognormal(0, 0.05, 15) for _ in range(2))
        found = median_of_ratios(TRUE * above, below)
        assert found.low is not None and found.high is not None
        right += found.low <= TRUE <= found.high
    assert right / 400 > 0.93


def test_in_words() -> None:
    assert Estimate(1.2, 1.154, 1.25, 5).text() == "1.20x (1.15 to 1.25)"
    assert Estimate(1.2).text() == "1.20x (no interval)"
    assert Estimate(1.037, 0.99, 1.1, 9).change.text("+.1%", "") == "+3.7% (-1.0% to +10.0%)"


@pytest.mark.parametrize("ratio", [ratio_of_totals, median_of_ratios])
def test_what_are_no_pairs(ratio: object) -> None:
    for above, below in (([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0])):
        with pytest.raises(ValueError, match="give one of each for every pair"):
            ratio(above, below)  # type: ignore[operator]
    with pytest.raises(ValueError, match="leave out what took no time"):
        median_of_ratios([1.0, 1.0], [0.0, 1.0])
