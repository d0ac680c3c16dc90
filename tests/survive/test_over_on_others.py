"""A rank is lost when a save is over on some ranks and not on all; who hears of that from others has saved as well."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.faults.points import Point, kill
from tests.survive.harness import Job, Outcome, train
from tests.survive.test_survive import JOBS, Undisturbed, check, undisturbed  # noqa: F401 - a fixture

ONCE = replace(JOBS["saving"], save_every=6)
OVER = Point("all know the new checkpoint", "dynpipe_ds.survive.landmarks:Landmarks._count")
VICTIM, LATE = 1, 2


def train_with_one_late(rank: int, job: Job, note: str) -> Outcome:
    """The victim is killed when all others have done what they do together; one of them then finds it lost, still in
    its save, while the save of the others is over."""
    flags = [Path(f"{note}.over.{other}") for other in range(job.num_ranks) if other != VICTIM]
    killed = Path(f"{note}.{VICTIM}")

    def act() -> None:
        if rank != VICTIM:
            Path(f"{note}.over.{rank}").touch()
        while not (all(flag.exists() for flag in flags) if rank == VICTIM else killed.exists() or rank != LATE):
            time.sleep(0.01)
        if rank == VICTIM:
            kill(str(killed))
        if rank == LATE:
            dist.barrier()

    with OVER.arm(act):
        return train(rank, job, {}, note)


def test_who_hears_that_a_save_is_over_knows_the_checkpoint(
    tmp_path: Path, undisturbed: Undisturbed  # noqa: F811
) -> None:
    note = str(tmp_path / "note")
    outcomes: list[Outcome | None] = run_ranks(
        train_with_one_late, ONCE.num_ranks, ONCE, note, may_die={VICTIM}
    )
    check(outcomes, undisturbed("saving"), {VICTIM}, 3)
    saved = f"{note}.checkpoints/global_step6"
    assert [one.saved for one in outcomes if one is not None] == [saved] * 3
