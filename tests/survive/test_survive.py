"""A rank is killed anywhere; the others go on with fewer stages and the bits of a run in which it was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.configs import ADAMW, ZERO
from tests.faults.points import Point
from tests.once import Once
from tests.survive.harness import NUM_BATCHES, Job, Outcome, run_job, state_of

JOBS = {"adamw": Job(config=ADAMW), "zero1": Job(config={**ADAMW, **ZERO})}
FORWARD = Point("in the middle of a forward", "tests.distributed.models:Block.forward", call=6)


@pytest.fixture(scope="session")
def undisturbed() -> Callable[[str], list[Outcome | None]]:
    """Outcomes of jobs that nobody kills; each runs once."""
    return Once(lambda name: run_job(JOBS[name], {}))


def check(outcomes: list[Outcome | None], whole: list[Outcome | None], lost: set[int], num_stages: int) -> None:
    first = whole[0]
    assert first is not None
    left = [one for one in outcomes if one is not None]
    assert [rank for rank, one in enumerate(outcomes) if one is None] == sorted(lost), outcomes
    for one in left:
        assert not one.error, one.error
        assert one.losses == first.losses and len(one.losses) == NUM_BATCHES
        assert one.num_stages == num_stages and one.num_steps == first.num_steps
    assert state_of(outcomes) == state_of(whole)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_fewer_stages(
    victim: int, tmp_path: Path, undisturbed: Callable[[str], list[Outcome | None]],
    record_property: Callable[[str, object], None],
) -> None:
    outcomes = run_job(JOBS["adamw"], {victim: FORWARD}, str(tmp_path / "killed"))
    check(outcomes, undisturbed("adamw"), {victim}, 3)
    killed_at = float((tmp_path / f"killed.{victim}").read_text())
    record_property("next_batch_s", round(max(o.went_on_at for o in outcomes if o is not None) - killed_at, 2))


