"""Experts that replicas share out: any placement gives the same bits, with two replicas those of plain data parallelism."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import Way
from tests.matrix import mostly
from tests.scenarios.exactness import Job
from tests.scenarios.sharded_jobs import Placement, Seen, train_placed

ALL: list[Placement] = ["static", "local", "random"]


def compare(job: Job, ranks: int, placements: list[Placement], *, way: Way = None) -> Seen:
    """Fail unless all placements, the first one without moves of layers, give the same bits on all ranks."""
    moved = run_ranks(train_placed, ranks, job, placements, True, way, timeout_s=200)
    (still,) = run_ranks(train_placed, ranks, job, placements[:1], False, timeout_s=200)[0]
    for rank, found in enumerate(moved):
        for placement, seen in zip(placements, found, strict=True):
            assert seen.losses == still.losses, f"rank {rank}, {placement}"
            assert seen.layers == still.layers, f"rank {rank}, {placement}"
    return still


JOBS: dict[str, tuple[Job, int, list[Placement]]] = {
    "adamw-PP2xDP2": (Job("moe", num_batches=5), 4, [None, *ALL]),
    "adamw-DP2": (Job("moe", stages=1, num_batches=4), 2, [None, *ALL]),
}


@pytest.mark.parametrize("name", mostly(JOBS, list(JOBS)))
def test_the_bits_are_the_same_wherever_experts_are_computed(name: str) -> None:
    job, ranks, placements = JOBS[name]
    compare(job, ranks, placements)
