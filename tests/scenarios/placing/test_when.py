"""In which batches a plan is due."""

from __future__ import annotations

import numpy as np
import pytest

from scenarios.moe.placing import Lanes, WhenToPlan, balance


def test_every_so_many_batches() -> None:
    when = WhenToPlan(plan_every=3, drift=None)
    assert [when.due(1.0) for _ in range(8)] == [True, False, False, True, False, False, True, False]
    every = WhenToPlan()
    assert [every.due(1.0) for _ in range(3)] == [True, True, True]


def test_sooner_when_the_balance_drifts() -> None:
    when = WhenToPlan(plan_every=100, drift=0.1)
    # The first batch after a plan says what the plan reached; worse than what was before is no drift.
    told = [2.0, 1.2, 1.25, 1.31, 1.33, 1.0, 1.2]
    assert [when.due(value) for value in told] == [True, False, False, False, True, False, True]


def test_a_better_balance_is_no_drift() -> None:
    when = WhenToPlan(plan_every=100, drift=0.0)
    assert [when.due(value) for value in (1.5, 1.5, 1.4, 1.5, 1.51)] == [True, False, False, False, True]


def test_the_busiest_rank_over_the_mean() -> None:
    loads = np.array([[5, 1], [2, 4]])
    assert balance(Lanes.static(2, 2), loads) == pytest.approx(7 / 6)
    assert balance(Lanes.local(2, 2), loads) == 1.0
    assert balance(Lanes.static(2, 2), np.zeros((2, 2))) == 1.0
    with pytest.raises(ValueError, match="for 2 ranks and 4 experts; here are 2 ranks and 2"):
        balance(Lanes.static(2, 4), loads)


def test_it_goes_on_after_a_checkpoint() -> None:
    told = [2.0, 1.2, 1.25, 1.31, 1.33, 1.0, 1.2, 1.0, 1.0, 1.0]
    for stop in range(len(told)):
        whole, first, second = (WhenToPlan(plan_every=4, drift=0.1) for _ in range(3))
        wanted = [whole.due(value) for value in told]
        found = [first.due(value) for value in told[:stop]]
        second.load_state_dict(first.state_dict())
        assert found + [second.due(value) for value in told[stop:]] == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan_every": 0}, "plan_every=0 must be at least 1 batch"),
        ({"drift": -0.1}, "drift=-0.1 must be 0 or more, such as 0.1, or null"),
        ({"drift": float("nan")}, "drift=nan must be 0 or more"),
    ],
)
def test_settings_without_a_meaning(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WhenToPlan(**settings)  # type: ignore[arg-type]
