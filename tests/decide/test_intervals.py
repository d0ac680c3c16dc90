"""When a decision is due: by intervals, after failures, while a partition holds, in a run that goes on."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from dynpipe_ds.decide.evidence import LEAST_EVIDENCE
from dynpipe_ds.partition import Plan
from tests.decide.synthetic import (
    BETTER,
    UNEQUAL,
    Noise,
    controller,
    decide,
    half_gets_cheaper,
    optimal,
    profile,
    train,
)

RECORDING = Path(__file__).parents[1] / "data" / "recorded_freezing.json"


# -- intervals and the dynamic phase ----------------------------------------------------------


def due_batches(num_batches: int, **section: Any) -> list[int]:
    """Batches after which an unequal model is due; plans are made but refused."""
    decider, due = controller(**section), []
    for batch in range(num_batches):
        decider.observe(profile(UNEQUAL, (0, 4, 8), batch=batch))
        if decider.due(batch):
            due.append(batch)
            smoothed = decider.smoothed()
            assert smoothed is not None
            decider.judge(Plan((0, 4, 8), 0.08, 0.08), smoothed)
    return due


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"rebalance_every": "never"}, []),
        ({"rebalance_every": 5}, [4, 9, 14, 19]),
        ({"rebalance_every": 1, "profile_batches": 17}, [16, 17, 18, 19]),
        ({"rebalance_every": 5, "profile_batches": 7}, [6, 9, 14, 19]),
        ({"rebalance_every": 5, "first_batch": 8}, [12, 17]),
        ({"rebalance_every": 1, "first_batch": 8, "last_batch": 11}, [8, 9, 10, 11]),
        ({"rebalance_every": "auto", "last_batch": 5}, [2, 3, 4, 5]),
        ({"rebalance_every": "auto", "profile_batches": 18}, [17, 18, 19]),
    ],
    ids=str,
)
def test_due(section: dict[str, Any], expected: list[int]) -> None:
    assert due_batches(20, **section) == expected


def test_asking_changes_nothing() -> None:
    decider = controller(rebalance_every=1, profile_batches=1)
    assert not decider.due(0)
    assert decider.smoothed() is None
    decider.observe(profile(UNEQUAL, (0, 4, 8)))
    assert decider.due(0)
    assert decider.due(0)


def test_move_asked_for_by_the_user_begins_a_new_interval() -> None:
    decider = controller(rebalance_every=5, profile_batches=1)
    decider.observe(profile(UNEQUAL, (0, 4, 8)))
    assert decider.due(4)
    decider.moved(4)
    assert not decider.due(8)
    assert decider.due(9)


def test_interval_takes_the_partitioners_prediction() -> None:
    section = {"rebalance_every": 10, "min_gain": 0.25}
    decision = decide(controller(**section), BETTER, UNEQUAL)
    assert decision.rebalance
    assert decision.reason == "predicted gain 25.0% reaches min_gain 25.0%"
    assert decision.saved_s == pytest.approx(10 * 7 * 0.02)
    decision = decide(controller(**section), Plan((0, 5, 8), 0.07, 0.08), UNEQUAL)
    assert not decision.rebalance
    assert decision.reason == "predicted gain 12.5% is less than min_gain 25.0%"


def test_interval_without_gain_moves_nothing() -> None:
    decider = controller(rebalance_every=1, min_gain=0.0)
    assert not decide(decider, Plan((0, 3, 8), 0.1, 0.08), UNEQUAL).rebalance


def test_never() -> None:
    decision = decide(controller(rebalance_every="never"), BETTER, UNEQUAL)
    assert not decision.rebalance
    assert decision.reason == "rebalance_every is 'never'"


def test_profiles_of_another_model_are_refused() -> None:
    decider = controller()
    decider.observe(profile([1.0] * 8, (0, 4, 8)))
    with pytest.raises(ValueError, match="has 7 layers, the one before 8"):
        decider.observe(profile([1.0] * 7, (0, 4, 7), batch=1))


def test_layers_without_any_time() -> None:
    assert train(lambda batch: [0.0] * 8, (0, 4, 8), num_batches=10).moved_at == []


def test_same_inputs_same_decisions() -> None:
    model, noise = half_gets_cheaper(8, 20), Noise(layer=0.05, rank=0.05)
    first, second = (train(model, (0, 4, 8), num_batches=40, noise=noise, seed=3) for _ in range(2))
    assert first.decisions
    assert first.decisions == second.decisions


# -- a recorded run -----------------------------------------------------------------------------


def test_recorded_freezing_is_answered_and_nothing_else() -> None:
    """Real layer times on a busy machine (see tests/data): noise before, half frozen after."""
    recording = json.loads(RECORDING.read_text(encoding="utf-8"))
    batches = [[forward + backward for forward, backward in batch] for batch in
               recording["forward_backward_s"]]  # fmt: skip
    frozen_at, start = recording["freeze_at"], tuple(recording["boundaries"])
    run = train(
        lambda batch: batches[batch], start, num_batches=len(batches), move_s=0.2,
        num_micro_batches=recording["num_micro_batches"],
    )  # fmt: skip
    assert len(run.moved_at) == 1
    assert frozen_at + LEAST_EVIDENCE - 1 <= run.moved_at[0] <= frozen_at + 6
    assert run.boundaries == (0, 5, 8)


def test_after_a_failure_it_pauses_longer_each_time_until_a_move_succeeds() -> None:
    decider = controller(rebalance_every=1, profile_batches=1)

    def next_due(after: int) -> int:
        for batch in range(after, after + 1000):
            decider.observe(profile(UNEQUAL, (0, 4, 8), batch=batch))
            if decider.due(batch):
                return batch
        raise AssertionError("never due again")

    decider.failed(next_due(0))
    pauses, last = [], 0
    for _ in range(3):
        now = next_due(last + 1)
        pauses.append(now - last)
        decider.failed(now)
        last = now
    assert pauses == [8, 16, 32]
    decider.moved(next_due(last + 1))
    failed = next_due(last + 200)
    decider.failed(failed)
    assert next_due(failed + 1) == failed + 8


@pytest.mark.parametrize("section", [{}, {"rebalance_every": 4}], ids=str)
def test_while_the_users_partition_holds_nothing_is_due(section: dict[str, Any]) -> None:
    decider = controller(**section)

    def due_among(batches: range) -> list[int]:
        due = []
        for batch in batches:
            decider.observe(profile(UNEQUAL, (0, 4, 8), batch=batch))
            due += [batch] if decider.due(batch) else []
        return due

    assert due_among(range(8))
    decider.hold(8, 10)  # batches 8 to 17 run on it
    assert due_among(range(8, 30))[0] == 17, "an interval that ended meanwhile is made up for"
    decider.hold(30, "forever")
    assert not due_among(range(30, 200))
    other = controller(**section)
    other.load_state_dict(decider.state_dict())
    assert other.is_held(10**6)
    other.load_state_dict(decider.state_dict(), same_stages=False)
    assert not other.is_held(200), "boundaries of other stages are nobody's choice"
    decider.release()
    assert due_among(range(200, 204))


# -- a run that is interrupted and goes on ------------------------------------------------------


def interrupted(stop: int | None, *, num_batches: int = 60, same_stages: bool = True, **section: Any) -> list[Any]:
    """Decisions and moves of a run whose every third move fails; after batch ``stop`` another controller takes over."""
    rng, decider, boundaries = random.Random(5), controller(**section), (0, 4, 9)
    told: list[Any] = []
    attempts = 0
    for batch in range(num_batches):
        model = half_gets_cheaper(9, 20)(batch if batch < 40 else 0)
        measured = profile(Noise(0.03, 0.03).apply(model, boundaries, rng), boundaries, batch=batch)
        if decider.wants_profile(batch):
            decider.observe(measured)
        if decider.newest[-1].batch == batch and decider.due(batch):
            smoothed = decider.smoothed()
            assert smoothed is not None
            plan = optimal(smoothed.costs("time"), 2, boundaries)
            if plan.boundaries == boundaries and batch % 5 == 0:
                plan = Plan((0, 5, 9), plan.bottleneck, plan.bottleneck)  # judged by whole batches
            decision = decider.judge(plan, smoothed)
            told.append((batch, plan.boundaries, decision))
            if decision.rebalance:
                attempts += 1
                if attempts % 3 == 1:
                    decider.failed(batch)
                else:
                    boundaries = plan.boundaries
                    decider.record_cost(0.02 * attempts)
                    decider.moved(batch)
        if batch == stop:
            known, decider = decider.state_dict(), controller(**section)
            decider.load_state_dict(known, same_stages=same_stages)
            assert not same_stages or decider.state_dict() == known
    return told


@pytest.mark.parametrize(
    "section",
    [
        {"profile_every": 4}, {"rebalance_every": 7, "min_gain": 0.0}, pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"stage_speeds": [1.0, 0.9], "profile_batches": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_one_that_goes_on_decides_as_the_uninterrupted_one(section: dict[str, Any]) -> None:
    expected = interrupted(None, **section)
    assert sum(decision.rebalance for _, _, decision in expected) >= 3
    for stop in range(60):
        assert interrupted(stop, **section) == expected, stop


def test_on_another_number_of_stages_layer_times_carry_over_and_pauses_do_not() -> None:
    decider, other = controller(), controller()
    for batch in range(10):
        decider.observe(profile(UNEQUAL, (0, 4, 8), batch=batch))
    decider.record_cost(3.0)
    decider.failed(9)
    other.load_state_dict(decider.state_dict(), same_stages=False)
    assert other.smoothed() is None, "what stages measured starts anew"
    for batch in range(10, 13):
        other.observe(profile(UNEQUAL, (0, 2, 4, 8), batch=batch))
    assert other.due(12), "no pause"
    known = other.state_dict()
    assert len(known["profiles"]) == 13 and known["costs_s"] == [] and known["num_failures"] == 0


def test_state_of_older_checkpoints_is_taken_in() -> None:
    profiles = [profile(UNEQUAL, (0, 4, 8), batch=batch) for batch in range(10)]
    history = [[0.0, *accumulate(p.costs("time"))] for p in profiles]
    decider, fresh = controller(), controller()
    decider.load_state_dict({"newest": profiles[-3:], "history": history, "costs_s": [0.2], "decided_batch": 4})
    for p in profiles:
        fresh.observe(p)
    fresh.record_cost(0.2)
    smoothed = decider.smoothed()
    assert smoothed is not None and smoothed == fresh.smoothed()
    assert decider.judge(BETTER, smoothed) == fresh.judge(BETTER, smoothed)
    decider.observe(profile(UNEQUAL, (0, 4, 8), batch=10))
    assert decider.due(10)
