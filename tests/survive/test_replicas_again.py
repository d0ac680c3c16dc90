"""While the others go on without a lost replica, another rank is killed: one that stays, or one that has no place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.points import Point
from tests.once import Once
from tests.survive.harness import Job, Outcome, run_job
from tests.survive.test_replicas import JOBS, kill_at
from tests.survive.test_survive import AGAIN, FORWARD, Undisturbed

REPEATING = replace(JOBS["3x2 zero1"], every=3)
"""No snapshot is taken before the batch in which the first is lost, so that batches are repeated."""
HANDING_OVER = {
    name: Point(name, target, after=after) for name, target, after in (
        ("before copies are handed over", "dynpipe_ds.snapshots.handing_over:plan_hand_over", False),
        ("while copies are handed over", "dynpipe_ds.snapshots.handing_over:exchange_bytes", False),
        ("after copies were handed over", "dynpipe_ds.snapshots.handing_over:exchange_bytes", True),
    )
}  # fmt: skip
MOMENTS = AGAIN | HANDING_OVER


@pytest.fixture(scope="session")
def undisturbed() -> Callable[[Job], list[Outcome | None]]:
    return Once(lambda job: run_job(replace(job, saves=False), {}))


@pytest.mark.parametrize(("first", "second", "leftover"), [
    (1, 3, (0, 2)), pytest.param(4, 2, (3, 5), marks=pytest.mark.exhaustive),
])  # fmt: skip
@pytest.mark.parametrize("moment", [
    pytest.param(m, marks=() if m == "after copies were handed over" else pytest.mark.exhaustive) for m in MOMENTS
])  # fmt: skip
def test_a_replica_of_another_stage_is_lost_while_they_go_on(
    moment: str, first: int, second: int, leftover: tuple[int, ...], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """One stage is still whole, whether the rank that has no place has left by then or not."""
    kill_at(
        REPEATING, undisturbed(REPEATING), {first: FORWARD, second: MOMENTS[moment]}, tmp_path, num_stages=1,
        leftover=leftover,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", [
    *(m for m in MOMENTS if m in ("before the world", "before copies are handed over")), "after copies were handed over"
])  # fmt: skip
def test_the_one_that_has_no_place_is_lost_before_it_leaves(
    moment: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Its copies are the only ones of its stage: until they are handed over, the newest checkpoint serves."""
    job = replace(REPEATING, saves=True, save_every=2, rereads="data_at")
    kill_at(job, undisturbed(job), {1: FORWARD, 0: MOMENTS[moment]}, tmp_path, num_stages=2, leftover=())


@pytest.mark.exhaustive
def test_the_one_that_was_given_the_copies_is_lost(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Until the next snapshot is complete nobody else has them."""
    job = replace(REPEATING, saves=True, save_every=2, rereads="data_at")
    point = AGAIN["while batches are repeated"]
    kill_at(job, undisturbed(job), {1: FORWARD, 2: point}, tmp_path, num_stages=1, leftover=(0, 3))
