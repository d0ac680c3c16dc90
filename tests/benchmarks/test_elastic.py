"""The pauses of a job that is resized: real ranks, and what is computed of made-up seconds."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import readme
from benchmarks.elastic import pauses
from benchmarks.elastic.train import OPTIMIZERS
from benchmarks.record import environment, save
from tests.benchmarks.test_record import BUSY, IDLE
from tests.matrix import mostly


@pytest.mark.parametrize("optimizer", mostly(OPTIMIZERS, ["bf16 + ZeRO-1"]))
def test_both_jobs_train_the_same_and_every_pause_is_told(optimizer: str) -> None:
    """Two stages, four, one, three; the parts are those that the engine tells, and no more than the whole."""
    row = pauses.measure(optimizer, 10_000, 1)
    assert row["same_bits"] and row["num_batches"] == 8
    assert [(pause["before"], pause["after"]) for pause in row["pauses"]] == [*pauses.DIRECTIONS]
    for pause in row["pauses"]:
        told = pause["regroup_s"] + pause["migrate_s"] + pause["plan_s"]
        assert 0.0 < min(pause["regroup_s"], pause["migrate_s"]) and told <= pause["pause_s"] + 0.001


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("state_bytes", pauses.STATE_BYTES)
def test_a_stage_holds_about_what_was_asked_for(optimizer: str, state_bytes: int) -> None:
    hidden = pauses.width(state_bytes, optimizer)
    assert hidden % 8 == 0 and pauses.held_bytes(hidden, optimizer) == pytest.approx(state_bytes, rel=0.1)


def test_every_direction_comes_as_often_and_enough_workers_come() -> None:
    steps, comes = pauses.plan(3)
    sizes = [pauses.START, *steps.values()]
    ways = list(zip(sizes, sizes[1:], strict=False))
    assert [ways.count(way) for way in pauses.DIRECTIONS] == [3, 3, 3] and comes == 12
    assert list(steps) == list(range(1, 22, 2))


def row(pauses_s: list[float], *, same_bits: bool = True) -> dict[str, Any]:
    """Pauses of 2 → 4, of which a fifth is for the groups; the other ways take a second each."""
    found = [
        {"before": before, "after": after, "pause_s": s, "regroup_s": 0.2 * s, "migrate_s": 0.5 * s, "plan_s": 0.1 * s}
        for before, after, times in [(2, 4, pauses_s), (4, 1, [1.0] * len(pauses_s)), (1, 3, [1.0] * len(pauses_s))]
        for s in times
    ]
    return {
        "optimizer": "AdamW", "state_bytes": 1_040_000, "hidden": 120, "num_batches": 24, "same_bits": same_bits,
        "pauses": found,
    }  # fmt: skip


def test_a_cell_has_the_median_pause_and_what_it_consists_of() -> None:
    line = pauses.short([row([9.0, 2.0, 1.0])]).splitlines()[2]
    assert line == "| AdamW | 1.0 | 2.00 (0.40 + 1.00 + 0.60) | 1.00 (0.20 + 0.50 + 0.30) | " \
        "1.00 (0.20 + 0.50 + 0.30) | equal bits |"
    assert "| DIFFERENT |" in pauses.short([row([1.0], same_bits=False)])
    assert pauses.whole([row([9.0, 2.0, 1.0])]).count("| 2 → 4 |") == 3 and pauses.longest([row([9.0, 2.0])]) == 9.0


@pytest.mark.parametrize("reading", [IDLE, BUSY], ids=["idle", "busy"])
def test_the_page_says_whether_the_machine_was_busy(reading: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("BENCHMARKS_FORCE", "1")
    values = {"environment": environment(reading=reading), "rows": [row([9.0, 2.0, 1.0])]}
    save(tmp_path / "elastic", pauses.NAME, values, pauses.summary(values))
    text = readme.pauses(tmp_path)
    assert text.startswith("BUSY MACHINE: ") == (reading is BUSY)
    assert "the longest took 9.00 s" in text and "| AdamW | 1.0 | 2.00 (" in text
