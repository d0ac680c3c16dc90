"""``kill -9`` of one rank at any point: every other rank ends soon, and says who was lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from _pytest.mark import ParameterSet

from dynpipe_ds import heartbeat
from dynpipe_ds.heartbeat import RankLostError
from tests.distributed.models import Run, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.faults.points import POINTS, Point, kill

RANKS = 3


def train_until_killed(rank: int, victim: int, point: Point) -> tuple[str, float] | None:
    """Train; on survivors give back the message and when it came."""
    run = Run(RANKS, num_batches=8, first=(0, 1, 2, 8), config={
        "dynamic_pipeline": {"enabled": True, "rebalance_every": 4, "min_gain": 0.0, "cost": "parameters"},
    })
    with ExitStack() as stack:
        stack.enter_context(patch.object(heartbeat, "INTERVAL_S", 0.2))
        engine = make_engine(run)
        if rank == victim:
            stack.enter_context(point.arm(kill))
        try:
            train(engine, run)
        except RankLostError as error:
            return str(error), time.time()
    return None


TYPICAL = POINTS[::4]  # of every phase one or two


def points() -> Iterator[ParameterSet]:
    for point in POINTS:
        yield pytest.param(point, id=point.name, marks=() if point in TYPICAL else pytest.mark.exhaustive)


@pytest.mark.parametrize("point", points())
def test_survivors_name_the_lost_rank(point: Point) -> None:
    victim = POINTS.index(point) % RANKS
    results = run_ranks(train_until_killed, RANKS, victim, point, timeout_s=60, may_die={victim})
    assert results[victim] is None
    for rank, result in enumerate(results):
        if rank != victim:
            assert result is not None, f"rank {rank} noticed nothing"
            assert f"rank {victim} ended while" in result[0], result[0]
