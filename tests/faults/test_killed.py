"""``kill -9`` of one rank at any point: the others say who was lost, and a restart ends as if nothing had been."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from dynpipe_ds.ranks.fatal import RankLostError
from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, ZERO
from tests.distributed.models import data, make_engine
from tests.distributed.owned import Own, Shared
from tests.distributed.ranks import run_ranks
from tests.faults.harness import NUM_BATCHES, Job, Outcome, intact_checkpoints, run_job, state_of
from tests.faults.points import LOADING, POINTS, SAVING, TRAINING, TRANSFER, Point, kill
from tests.once import Once

JOB = Job()
OTHERS = {
    "2 ranks": Job(2, 2),
    "2x2 ranks": Job(4, 2),
    "4 ranks": Job(4, 4),
    "ZeRO-1": Job(config={**ADAMW, **ZERO}),
    "bf16": Job(config={**ADAMW, **BF16_FP32_SUMS}),
    "ZeRO-1 on 2x2": Job(4, 2, config={**ADAMW, **ZERO}),
}
OWNED = {
    "owned on 2x2": Job(4, 2, special={1: Shared, 4: Own}),
    "owned, ZeRO-1 on 2x2": Job(4, 2, config={**ADAMW, **ZERO}, special={1: Shared, 4: Own}),
}
OF_OWNED = ["saving: before what single replicas own", "loading: before rows are cut"]
TYPICAL = {
    "profiling: before the backward",
    "migration: after tensors travelled",
    "saving: before it gets its name",
    "saving: before latest is replaced",
    "saving over it: between two renames",
    "loading: while layers move",
}
ON_OTHERS = [
    "profiling: before profiles are exchanged",
    "migration: before tensors travel",
    "saving: after shares were gathered",
    "saving: it has its name",
    "loading: in the middle of reading",
    "loading: before weights",
]


@pytest.fixture(scope="session")
def uninterrupted() -> Callable[[Job], list[Outcome | None]]:
    """Outcomes of a job that nobody kills and that saves nothing; each job runs once."""
    return Once(partial(run_job, place=None))


@pytest.fixture(scope="session")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Path]:
    """A job's folder of checkpoints from the middle of it, each job's made once."""

    def place(job: Job) -> Path:
        found = tmp_path_factory.mktemp("half_way") / "checkpoints"
        run_job(job, found)
        for leftover in found.glob(f"global_step[{NUM_BATCHES // 2 + 1}-{NUM_BATCHES}]"):
            shutil.rmtree(leftover)
        (found / "latest").write_text(f"global_step{NUM_BATCHES // 2}")
        return found

    return Once(place)


def kill_and_restart(
    point: Point, victim: int, job: Job, restart: Job, place: Path, expected: list[Outcome | None],
    record: Callable[[str, object], None],
) -> None:
    """Kill, look at what is left, start again, compare."""
    whole = expected[0]
    assert whole is not None
    before = intact_checkpoints(place)
    outcomes = run_job(job, place, point, victim)
    assert outcomes[victim] is None, "the victim must come by"
    survivors = [outcome for outcome in outcomes if outcome is not None]
    there = intact_checkpoints(place)
    latest = (place / "latest").read_text() if (place / "latest").exists() else None
    assert latest in there if before or latest else len(there) <= 1, "it may have its name and not be the latest yet"
    killed_at = float(Path(f"{place}.killed").read_text())
    for outcome in survivors:
        assert f"rank {victim} ended while" in outcome.lost, outcome
        assert outcome.losses == whole.losses[outcome.first :][: len(outcome.losses)]
        named = re.search(r"the last complete checkpoint is (\S+):", outcome.lost)
        if named is None:
            assert "no checkpoint was saved or loaded by this run" in outcome.lost and latest is None, outcome.lost
        else:
            assert Path(named[1]).parent == place and Path(named[1]).name in there
            assert latest is None or there[Path(named[1]).name] >= there[latest], outcome.lost
    again = run_job(restart, place)
    for outcome in again:
        assert outcome is not None and outcome.first == (there[latest] if latest else 0)
        assert outcome.losses == whole.losses[outcome.first :], "the same bits as without interruption"
    assert state_of(again) == state_of(expected)
    assert not list(place.glob(".*")), "leftovers of the killed processes"
    record("ended_s", round(max(o.ended_at for o in survivors) - killed_at, 2))
    record("message", survivors[0].lost.replace(str(place), "checkpoints"))
    record("trained", max(o.first + len(o.losses) for o in survivors))
    record("resumed_from", there[latest] if latest else 0)


def victim_of(point: Point, num_ranks: int) -> int:
    return POINTS.index(point) % num_ranks if point.victim is None else point.victim % num_ranks


def cases() -> Iterator[ParameterSet]:
    for point in POINTS:
        marks = () if point.name in TYPICAL else pytest.mark.exhaustive
        yield pytest.param(point, JOB, JOB, id=point.name, marks=marks)
    for name, job in OTHERS.items():
        for point in (p for p in POINTS if p.name in ON_OTHERS):
            yield pytest.param(point, job, job, id=f"{point.name}, {name}", marks=pytest.mark.exhaustive)
    for name, job in OWNED.items():
        for point in (p for p in POINTS if p.name in (*ON_OTHERS, *OF_OWNED)):
            marks = () if point.name in OF_OWNED and not job.config else pytest.mark.exhaustive
            yield pytest.param(point, job, job, id=f"{point.name}, {name}", marks=marks)
    for point in (p for p in POINTS if p.name in ON_OTHERS):
        for stages in (2, 4):
            other = replace(JOB, num_ranks=stages, num_stages=stages)
            marks = pytest.mark.exhaustive
            yield pytest.param(point, JOB, other, id=f"{point.name}, restart on {stages}", marks=marks)


@pytest.mark.parametrize(("point", "job", "restart"), cases())
def test_killed_and_restarted(
    point: Point, job: Job, restart: Job, tmp_path: Path,
    uninterrupted: Callable[[Job], list[Outcome | None]], half_way: Callable[[Job], Path],
    record_property: Callable[[str, object], None],
) -> None:
    place = tmp_path / "checkpoints"
    if point.phase == "loading":
        shutil.copytree(half_way(job), place)
    else:
        place.mkdir()
    victim = victim_of(point, job.num_ranks)
    record_property("victim", victim)
    kill_and_restart(point, victim, job, restart, place, uninterrupted(job), record_property)


BY_HAND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rebalance": (lambda engine: engine.rebalance(), "dynpipe_ds.training:disagreement"),
    "repartition": (lambda engine: engine.repartition((0, 3, 5, 8)), "dynpipe_ds.training:disagreement"),
    "its transfer": (lambda engine: engine.repartition((0, 3, 5, 8)), TRANSFER + "start"),
    "replace_parameters": (lambda engine: engine.replace_parameters(()), "dynpipe_ds.stage:replace_parameters"),
    "wait_for_disk": (lambda engine: engine.wait_for_disk(), "dynpipe_ds.checkpoint.checkpoints:together"),
}


def call_by_hand(rank: int, call: str, place: str) -> str:
    engine = make_engine(JOB.run)
    engine.train_batch(data(0, JOB.run.micro_batches))
    action, target = BY_HAND[call]
    with Point(call, target).arm(partial(kill, f"{place}/killed")) if rank == 1 else nullcontext():
        try:
            action(engine)
        except RankLostError as error:
            return str(error)
    return ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", BY_HAND)
def test_a_rank_lost_in_a_call_of_the_users(call: str, tmp_path: Path) -> None:
    outcomes = run_ranks(call_by_hand, 3, call, str(tmp_path), may_die={1})
    assert outcomes[1] is None
    assert all("rank 1 ended while" in text for text in (outcomes[0], outcomes[2])), outcomes


def test_every_phase_is_covered() -> None:
    assert TYPICAL | {*ON_OTHERS, *OF_OWNED} <= {point.name for point in POINTS}
    assert len({point.name for point in POINTS}) == len(POINTS)
    for points in (TRAINING, SAVING, LOADING):
        assert {victim_of(point, JOB.num_ranks) for point in points} == {0, 1, 2}
