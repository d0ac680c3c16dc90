"""What the benchmarks of lost workers compute from what they have seen."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.faults import points, snapshots, storm


class Told:
    """A run that was told in advance."""

    def __init__(self, name: str, told: list[dict[str, Any]], kills: list[dict[str, Any]]) -> None:
        self.name, self.told, self.kills = name, told, kills

    def lines(self, key: str) -> list[dict[str, Any]]:
        return [line for line in self.told if key in line]


def batch(number: int, time: float, **more: Any) -> dict[str, Any]:
    return {
        "batch": number, "loss": float(number).hex(), "time": time, "pid": 7, "rank": 0, "stages": 4,
        "samples": 16 * number, **more,
    }


def run(name: str, times: list[float], kills: list[dict[str, Any]] | None = None, **digest: str) -> Any:
    used = dict(zip(storm.HELD, (10, 5, 8, 1000), strict=True))
    told = [batch(number, time, **used) for number, time in enumerate(times, 1)]
    told += [{"digest": digest or {"0": "a"}, "pid": 7, "snapshots_s": 0.1}, {"temporary_files": []}]
    return Told(name, told, kills or [])


CALM = [float(second) for second in range(100, 111)]
STORM = [100.0, 101.0, 102.0, 106.0, 107.0, 108.0, 109.0, 110.0, 111.0, 112.0, 113.0]
KILL = {"time": 102.5, "rank": 2, "workers": 4, "pid": 9}


def test_goodput_counts_batches_in_the_same_time() -> None:
    found = storm.judge(run("calm", CALM), run("storm", STORM, [KILL]))
    assert found["goodput"] == pytest.approx(7 / 10)
    assert (found["calm_s"], found["storm_s"]) == (10.0, 13.0)


def test_the_batch_that_was_under_way_is_not_the_next_one() -> None:
    found = storm.judge(run("calm", CALM), run("storm", STORM, [KILL]))
    assert found["kills"] == [{"s": 2.5, "rank": 2, "workers": 4, "gap_s": 4.5}]
    assert found["held"]["losses"] == 1


@pytest.mark.parametrize("same", ["losses", "state"])
def test_other_bits_are_seen(same: str) -> None:
    other = run("storm", STORM, [KILL], **{"0": "b"} if same == "state" else {})
    if same == "losses":
        other.told[3]["loss"] = 0.5.hex()
    found = storm.judge(run("calm", CALM), other)
    assert not found[f"same_{same}"] and found["same_state" if same == "losses" else "same_losses"]
    assert sum(row[1] == "NO" for row in storm.rows(found, 40.0)) == 1


def test_a_batch_that_nobody_trained_is_seen() -> None:
    found = storm.judge(run("calm", CALM), run("storm", STORM[:-1], [KILL]))
    assert not found["same_losses"] and found["samples"] < found["calm_samples"]


def test_what_was_held_is_that_of_the_worker_that_saw_most_losses() -> None:
    told = run("storm", STORM, [KILL])
    told.told += [batch(9, 111.5, pid=8, stages=4, **dict.fromkeys(storm.HELD, 1))]
    told.told[10]["resident_kib"] = 2000
    found = storm.held(told)
    assert found["losses"] == 1 and found["resident_kib"] == [1000, 2000] and found["threads"] == [8, 8]


def test_points_are_grouped_and_late_ones_counted() -> None:
    tests = [
        {"test": "a", "outcome": "passed", "point": "saving: x", "victim": 0, "detection_s": 0.5, "next_batch_s": 1.5},
        {"test": "b", "outcome": "passed", "point": "saving: x", "victim": 3, "detection_s": 2.5, "next_batch_s": 6.0},
        {"test": "c", "outcome": "failed"},
    ]
    text = points.text(tests, ["saving: x", "saving: y"])
    assert "3 tests, 1 failed; 2 kills" in text and "FAILED: c" in text
    assert "until detection: 1 times" in text and "next batch: 1 times" in text
    assert "| saving | 2 | 1.50 | 2.50 | 2.25 | 3.50 |" in text
    assert "| last | 1 | 2.50 | 2.50 | 3.50 | 3.50 |" in text
    assert "Not measured, since no rank came by or the time was over: saving: y." in text


@pytest.mark.parametrize(("share", "every"), [(0.0, 1), (0.0059, 1), (0.006, 2), (0.12, 21)])
def test_the_smallest_interval_below_the_goal(share: float, every: int) -> None:
    """What one every five batches costs, scaled: exactly 3% is not below it."""
    assert snapshots.smallest_interval(share) == every


@pytest.mark.parametrize(("interval", "batch_s", "left_s", "length"), [
    (21, 0.5, 1000.0, 25),  # a whole interval, in multiples of five
    (21, 0.5, 130.0, 10),  # six rounds of four windows have to fit
    (3, 0.1, 1000.0, 30),  # three seconds at least
    (21, 60.0, 100.0, 5),
])  # fmt: skip
def test_a_window_holds_a_snapshot_if_there_is_time(interval: int, batch_s: float, left_s: float, length: int) -> None:
    assert snapshots.window_length(interval, batch_s, left_s) == length


def test_what_a_snapshot_costs_in_pairs() -> None:
    """Ten batches of 0.1 s, and one snapshot of 50 ms every five: 10% more, so 17 batches are below 3%."""
    seconds = {
        snapshots.WITHOUT: [1.0] * 6, snapshots.AGAIN: [1.01] * 6, snapshots.AUTO: [1.0, 1.05] * 3,
        snapshots.OFTEN: [1.1] * 6,
    }
    around_s = {**seconds, snapshots.AUTO: [1.0] * 5 + [math.nan], snapshots.OFTEN: [1.0] * 6}
    row = {
        "model": "m", "optimizer": "o", "state_bytes": 2e6, "window": 10, "wall_s": seconds, "cpu_s": seconds,
        "around_s": around_s,
        "spent_s": {snapshots.WITHOUT: 0.0, snapshots.AGAIN: 0.0, snapshots.AUTO: 0.12, snapshots.OFTEN: 0.48},
        "same_losses": True,
    }  # fmt: skip
    assert snapshots.intervals(row) == ["m", "o", "6 of 10", "40.0", "50.0 (50.0 to 50.0)", "14", "17 (17 to 17)"]
    none, again, auto, _ = snapshots.costs(row)
    assert none[4:6] == ["100.0", ""] and again[5].startswith("+1.0%") and again[7] == ""
    assert auto[5].startswith("+2.5% (") and auto[7].startswith("+2.0%") and auto[8] == "1.95%"


def test_batches_with_a_snapshot_are_compared_with_those_of_their_window() -> None:
    batches = [(1.5, True), (1.0, False), (1.0, False), (1.1, False)]
    assert snapshots.without_snapshots_s(batches) == pytest.approx(4.1)
    assert math.isnan(snapshots.without_snapshots_s([(1.0, True)] * 5))
