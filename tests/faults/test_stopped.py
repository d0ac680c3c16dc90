"""Ranks that are stopped (SIGSTOP), or fail where nothing can be undone: everybody ends in time, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dynpipe_ds import FatalError, RankLostError
from dynpipe_ds.ranks import explaining_lost_ranks, fatal, heartbeat
from dynpipe_ds.ranks.guard import Guard
from tests.distributed.models import Run, data, make_engine
from tests.distributed.ranks import RankFailure, run_ranks
from tests.faults.points import Point, kill

TIMEOUT_S = 4.0
PATIENCE_S = 1.5
GRACE_S = 60.0  # after which a rank that does not raise is ended, and has no answer

RUN = Run(3, first=(0, 3, 5, 8), num_batches=5)
FORWARD = Point("in the middle of a batch", "tests.distributed.models:Block.forward", call=6)
FIRST_FORWARD = Point("before its neighbour can be missed", "tests.distributed.models:Block.forward")
BEGIN = Point("before a batch, when all know what it runs", "dynpipe_ds.messages.channels:Channels.begin")


def stop(seconds: float | None = None) -> None:
    """Stop this process, for ever or for a while."""
    if seconds is not None:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def patience(grace_s: float = 4.0) -> Iterator[None]:
    """Short waiting."""
    with ExitStack() as stack:
        for module, name, value in (
            (heartbeat, "PATIENCE_S", PATIENCE_S), (heartbeat, "MARGIN_S", 1.0), (fatal, "GRACE_S", grace_s),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


@dataclass
class Outcome:
    """What a rank saw: losses, what it raised, and when."""

    losses: list[float] = field(default_factory=list)
    error: str = ""
    ranks: list[int] = field(default_factory=list)
    lost: bool = False
    at: float = 0.0

    def __str__(self) -> str:
        return self.error

    def note(self, error: FatalError) -> None:
        """Keep what was raised."""
        self.error, self.ranks, self.lost = str(error), error.ranks, isinstance(error, RankLostError)
        self.at = time.time()


def train(rank: int, faults: dict[int, tuple[Point, Callable[[], Any]]]) -> Outcome:
    """Train; from the third batch on the faults are armed."""
    outcome = Outcome()
    engine = make_engine(RUN)
    batches = data(0, RUN.micro_batches)
    with ExitStack() as stack:
        try:
            for batch in range(RUN.num_batches):
                if batch == 2:
                    stack.enter_context(patience())
                    if rank in faults:
                        point, action = faults[rank]
                        stack.enter_context(point.arm(action))
                outcome.losses.append(float(engine.train_batch(batches)))
        except FatalError as error:
            outcome.note(error)
    return outcome


def note_and_stop(path: Path, seconds: float | None = None) -> None:
    """Write down when, and stop."""
    path.write_text(str(time.time()))
    stop(seconds)


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    losses: list[float] = run_ranks(train, 3, {})[0].losses
    assert len(losses) == RUN.num_batches
    return losses


@pytest.mark.parametrize("victim", [0, *(pytest.param(r, marks=pytest.mark.exhaustive) for r in (1, 2))])
def test_a_stopped_rank_is_named_in_time(
    victim: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    note = tmp_path / "stopped"
    faults = {victim: (FORWARD, partial(note_and_stop, note))}
    outcomes = run_ranks(train, 3, faults, collective_s=TIMEOUT_S, may_die={victim})
    stopped_at = float(note.read_text())
    others = [outcome for outcome in outcomes if outcome is not None]
    assert len(others) == 2
    for outcome in others:
        assert outcome.lost and outcome.ranks == [victim]
        assert f"rank {victim} did not answer while batch 2 was trained" in outcome.error
    assert others[0].error == others[1].error
    record_property("beyond_timeout_s", [round(o.at - stopped_at - TIMEOUT_S, 2) for o in others])


@pytest.mark.parametrize("victim", [0, *(pytest.param(r, marks=pytest.mark.exhaustive) for r in (1, 2))])
def test_stopped_for_a_while(victim: int, undisturbed: list[float]) -> None:
    """Longer than it takes to call somebody lost, shorter than the timeout: as if nothing had been."""
    outcomes = run_ranks(train, 3, {victim: (FORWARD, partial(stop, PATIENCE_S + 1.0))}, collective_s=30.0)
    assert all(outcome.losses == undisturbed and not outcome.error for outcome in outcomes), outcomes


@pytest.mark.exhaustive
def test_a_stopped_rank_is_not_accused_of_what_killed_another(tmp_path: Path) -> None:
    """Neither by the rank that waited for it, nor by itself when it goes on among dead ones."""
    note, pause_s = tmp_path / "stopped", TIMEOUT_S + PATIENCE_S + 2.0
    faults = {
        1: (FIRST_FORWARD, partial(note_and_stop, note, pause_s)),
        2: (BEGIN, partial(kill, str(tmp_path / "killed"))),
    }
    outcomes = run_ranks(train, 3, faults, collective_s=TIMEOUT_S, may_die={2})
    for outcome in outcomes[:2]:
        assert outcome.ranks == [2] and outcome.lost, outcomes
        assert "rank 2 ended while batch 2 was trained" in outcome.error and "rank 1" not in outcome.error
    assert outcomes[1].at - float(note.read_text()) > pause_s


# -- failures that nothing can undo -----------------------------------------------------------

EXPECTED = (
    "rank 1 failed while layers were moved (OutOfMemoryError: no room on this device), which can't be undone, so every "
    "rank stops; the last complete checkpoint is folder/global_step4: load it and go on from there"
)


def newest() -> str:
    return "folder/global_step4"


def started() -> Guard:
    guard = Guard(newest)
    guard.start()
    return guard


def fail(guard: Guard) -> None:
    with guard.no_way_back("layers were moved"):
        raise torch.OutOfMemoryError("no room on this device")


def wait_for(rank: int, guard: Guard) -> None:
    with guard.naming_lost_ranks("batch 3 was trained"):
        dist.recv(torch.zeros(4), src=rank)


def compute(seconds: float, guard: Guard) -> None:
    """Communicate when it is too late, in code of a user's own."""
    assert heartbeat.start_heartbeat() is guard.heartbeat
    with explaining_lost_ranks("batch 3 was trained", newest):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            torch.randn(64, 64) @ torch.randn(64, 64)
        dist.all_reduce(torch.zeros(4))


def compute_and_fail(guard: Guard) -> None:
    with guard.no_way_back("layers were moved"):
        compute(0.5, guard)


def act(rank: int, actions: list[Callable[[Guard], Any]], grace_s: float, patient: bool) -> Any:
    """Do this rank's part, and look at the error; twice, since it must not be forgotten."""
    guard = started()
    outcome = Outcome()
    with patience(grace_s):
        dist.barrier()
        began = time.time()
        try:
            actions[rank](guard)
        except FatalError as error:
            outcome.note(error)
            outcome.at -= began
        with pytest.raises(FatalError, match="every rank stops") as again:
            wait_for((rank + 1) % 3, guard)
        assert str(again.value) == outcome.error
        if patient:
            time.sleep(600)
    return outcome


def test_a_fatal_failure_ends_everybody_with_one_message(record_property: Callable[[str, object], None]) -> None:
    actions = [partial(wait_for, 1), fail, partial(compute, 1.5)]
    outcomes = run_ranks(act, 3, actions, GRACE_S, False, may_die={1})
    assert [outcome.error for outcome in outcomes] == [EXPECTED] * 3
    assert all(outcome.ranks == [1] and not outcome.lost for outcome in outcomes)
    record_property("seconds", [round(outcome.at, 2) for outcome in outcomes])


@pytest.mark.exhaustive
def test_all_fail_at_once_with_one_message() -> None:
    outcomes = run_ranks(act, 3, [fail] * 3, GRACE_S, False, may_die={1})
    (text,) = {outcome.error for outcome in outcomes}
    assert "failed while layers were moved (OutOfMemoryError" in text


@pytest.mark.exhaustive
def test_a_failure_seen_by_others_within_the_same_part_is_the_first_one() -> None:
    outcomes = run_ranks(act, 3, [compute_and_fail, fail, compute_and_fail], GRACE_S, False, may_die={1})
    assert [outcome.error for outcome in outcomes] == [EXPECTED] * 3


def test_who_catches_the_error_and_waits_is_ended() -> None:
    """The failing rank and one that computes catch it; the third never gets out of its call."""
    actions = [partial(wait_for, 1), fail, partial(compute, 1.0)]
    with pytest.raises(RankFailure) as caught:
        run_ranks(act, 3, actions, 2.0, True)
    text = str(caught.value)
    assert text.count("died with exit code 1") == 3 and text.count(f"dynpipe_ds: {EXPECTED}") == 3, text


def use_the_store_of_a_stopped_rank(rank: int) -> None:
    """The call does not return, whatever its timeout."""
    with patience(grace_s=0.5):
        guard = started()
        dist.barrier()
        if rank == 0:
            stop()
        time.sleep(0.5)
        with guard.naming_lost_ranks("something was asked of the store"):
            dist.distributed_c10d._get_default_store().get("nobody sets this")


@pytest.mark.exhaustive
def test_waiting_that_no_timeout_bounds_is_bounded() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(use_the_store_of_a_stopped_rank, 3, collective_s=2.0, may_die={0})
    text = "rank 0 did not answer while something was asked of the store (stopped, or the machine is gone)"
    assert str(caught.value).count(f"dynpipe_ds: {text}") == 2, caught.value


def shrink_with_a_stopped_rank(rank: int, point: Point) -> Outcome:
    """Re-pack while rank 0, where the store is, stops at a point."""
    outcome = Outcome()
    engine = make_engine(RUN)
    batches = data(0, RUN.micro_batches)
    engine.train_batch(batches)
    with patience(), patch("dynpipe_ds.ranks.place.STORE_S", TIMEOUT_S), ExitStack() as stack:
        if rank == 0:
            stack.enter_context(point.arm(stop))
        try:
            engine.repack(2)
        except FatalError as error:
            outcome.note(error)
    return outcome


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [
    "dynpipe_ds.repacking.live:Shrink.prepare", "dynpipe_ds.host.world:World.check",
    "dynpipe_ds.host.world:_destroy",
])  # fmt: skip
def test_stopped_while_re_packing(target: str) -> None:
    """Errors where the waiting is ours, else the end by the policy; the text is the same."""
    try:
        outcomes = run_ranks(
            shrink_with_a_stopped_rank, 3, Point("", target), collective_s=TIMEOUT_S, may_die={0}
        )
        texts = [outcome.error for outcome in outcomes if outcome is not None]
    except RankFailure as error:
        texts = str(error).split("dynpipe_ds: ")[1:]
    assert texts and all("rank 0 did not answer while layers were moved to fewer ranks" in t for t in texts), texts
