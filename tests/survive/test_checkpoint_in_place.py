"""Two neighbours are killed at once; the others go back to the newest checkpoint, in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, ZERO
from tests.faults.points import Point
from tests.once import Once
from tests.survive.harness import Job, Outcome, run_job
from tests.survive.test_survive import BEGINNING, Undisturbed, check

OFTEN = Job(config=ADAMW, saves=True, save_every=5, every=1, rereads="data_at")
"""Snapshots cover the batches since the checkpoint, of which no micro-batches are kept any more."""
LATE = replace(BEGINNING, call=8)  # of batch 9
JOBS = {
    "adamw": OFTEN,
    "zero1": replace(OFTEN, config={**ADAMW, **ZERO}, rereads="state"),
    "bf16": replace(OFTEN, config={**ADAMW, **BF16_FP32_SUMS}),
    "acting": replace(OFTEN, acts=True, rereads="state"),
    "evaluating": replace(OFTEN, evaluates=True),
}


@pytest.fixture(scope="session")
def undisturbed() -> Callable[[str], list[Outcome | None]]:
    return Once(lambda name: run_job(replace(JOBS[name], saves=False), {}))


def kill_both(
    job: Job, victims: tuple[int, int], tmp_path: Path, point: Point = LATE
) -> list[Outcome | None]:
    return run_job(job, dict.fromkeys(victims, point), str(tmp_path / "note"))


@pytest.mark.parametrize(("job", "victims"), [
    ("zero1", (0, 1)), ("acting", (2, 3)),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("adamw", (1, 2)),
        ("adamw", (3, 0)), ("adamw", (2, 3)), ("zero1", (1, 2)), ("bf16", (1, 2)), ("bf16", (0, 1)), ("acting", (0, 1)),
        ("evaluating", (0, 1)), ("evaluating", (2, 3)),
    )),
])  # fmt: skip
def test_the_newest_checkpoint_in_place(
    job: str, victims: tuple[int, int], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    outcomes = kill_both(JOBS[job], victims, tmp_path)
    assert (tmp_path / f"note.{victims[0]}").exists() and (tmp_path / f"note.{victims[1]}").exists()
    check(outcomes, undisturbed(job), set(victims), 2)
    if JOBS[job].rereads == "data_at":
        assert all(one.num_opened == 1 for one in outcomes if one is not None), "from the checkpoint's batch on"


def test_data_that_cant_be_read_again_ends_the_job_and_says_so(tmp_path: Path) -> None:
    outcomes = kill_both(replace(OFTEN, rereads=""), (1, 2), tmp_path)
    for rank in (0, 3):
        one = outcomes[rank]
        assert one is not None and "engine.data_at" in one.error and "micro-batches of batches 5 to" in one.error, one
        assert "the last complete checkpoint is" in one.error


def test_without_a_checkpoint_the_job_ends_and_says_so(tmp_path: Path) -> None:
    outcomes = kill_both(replace(OFTEN, saves=False), (1, 2), tmp_path)
    for rank in (0, 3):
        one = outcomes[rank]
        assert one is not None and "neither saved nor loaded a complete checkpoint" in one.error, one
