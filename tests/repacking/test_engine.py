"""The automatic policy, refusals, back-ends, and ranks that are lost while it happens."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynpipe_ds import FatalError, RepackError
from tests.distributed.configs import BY_HAND
from tests.distributed.models import Run, digest, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.faults.points import Point, kill


def run_with(repack: dict[str, Any], stages: int = 3, num_batches: int = 9, **section: Any) -> Run:
    """A run whose configuration re-packs."""
    return Run(stages, num_batches=num_batches, config={
        "dynamic_pipeline": {**BY_HAND, "repack": repack, **section},
    })


def train_automatically(_rank: int, run: Run) -> Any:
    """Train; losses, what was told, and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = make_engine(run)
        events: list[Any] = []
        engine.on_repack(events.append)
        losses = train(engine, run)
        engine.dynamic.repacker.giving_back.wait()
    texts = [str(w.message) for w in caught if "dynamic_pipeline" in str(w.message)]
    texts = [text for text in texts if "losses of this run may differ" not in text]  # clipping is on by default
    return losses, events, texts, digest(engine)


def test_target_and_tolerance() -> None:
    everyone = run_ranks(train_automatically, 3, run_with({}))
    target = {"enabled": True, "target_stages": 2, "earliest_batch": 4}
    shrunk = run_ranks(train_automatically, 3, run_with(target), may_leave={1, 2})
    (losses, events, warned, _) = shrunk[0]
    assert losses == everyone[0][0] and not warned
    assert [(e.batch, len(e.before), len(e.after), e.released) for e in events] == [(5, 4, 3, False)]
    assert "re-packed after batch 5 from 3 to 2 stages" in str(events[0]) and events[0].seconds > 0

    # Everything is tolerated, twice confirmed.
    eager = {"enabled": True, "tolerance": 0.99, "min_stages": 2}
    shrunk = run_ranks(train_automatically, 3, run_with(eager), may_leave={1, 2})
    assert shrunk[0][0] == everyone[0][0]
    assert [len(event.after) for event in shrunk[0][1]] == [3]


def hold_then_train(rank: int, run: Run) -> list[int]:
    """The user's partition holds for six batches, although a target asks for fewer stages at once."""
    engine = make_engine(run)
    shrunk_after: list[int] = []
    engine.on_repack(lambda event: shrunk_after.append(event.batch))
    engine.repartition((0, 3, 8), hold=6)
    train(engine, run)
    return shrunk_after


def test_re_packing_waits_while_the_users_partition_holds() -> None:
    run = run_with({"enabled": True, "target_stages": 1}, stages=2, num_batches=8)
    assert run_ranks(hold_then_train, 2, run, may_leave={1})[0] == [6]


def test_what_memory_forbids_is_told_once() -> None:
    target = {"enabled": True, "target_stages": 1}
    run = run_with(target, stages=2, memory_cap_bytes=60_000)
    results = run_ranks(train_automatically, 2, run)
    assert results[0][0] == run_ranks(train_automatically, 2, run_with({}, stages=2))[0][0]
    assert all(events == [] for _, events, *_ in results)
    (warning,) = results[0][2]
    assert "repack.target_stages is not possible: num_stages = 1" in warning and "60" in warning


@pytest.mark.parametrize("refuse", ["", "prepare", "release", "verify"])
def test_back_end(tmp_path: Path, refuse: str) -> None:
    release = {"backend": "tests.repacking.backends:Recording", "folder": str(tmp_path), "refuse": refuse}
    run = run_with({"enabled": True, "target_stages": 1, "release": release}, stages=2, num_batches=6)
    losses, events, warned, _ = run_ranks(train_automatically, 2, run, may_leave={1})[0]
    assert len(losses) == 6
    calls = (tmp_path / "calls").read_text().splitlines()
    expected = ["prepare [1] 0", "release [1]", "verify"]
    assert calls == expected[: expected.index(next(c for c in expected if c.startswith(refuse or "verify"))) + 1]
    assert len(events) == int(refuse != "prepare")
    if refuse:
        (warning,) = warned
        assert f"{refuse} refused: the test wants it so" in warning and "training goes on" in warning
    else:
        assert not warned


def start(_rank: int, run: Run) -> str:
    """What a start that fails says."""
    try:
        make_engine(run)
    except ValueError as error:
        return str(error)
    return ""


def test_a_back_end_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    release = {"backend": "tests.repacking.backends:Recording", "folder": str(tmp_path), "refuse": "check"}
    messages = run_ranks(start, 2, run_with({"release": release}, stages=2))
    assert messages[0] == messages[1]
    assert "rank 1: ReleaseError: no scheduler on this rank; use another back-end" in messages[0]


def repack_badly(_rank: int, run: Run) -> list[str]:
    """Ask for what can't be; the messages."""
    engine = make_engine(run)
    said = []

    def attempt(num_stages: int) -> None:
        try:
            engine.repack(num_stages)
        except (RuntimeError, RepackError) as error:
            said.append(str(error))

    attempt(1)
    train(engine, run)
    attempt(2)
    attempt(0)
    other = make_engine(run)
    attempt(1)
    other.destroy()
    return said


def test_refusals() -> None:
    results = run_ranks(repack_badly, 2, run_with({}, stages=2, num_batches=2))
    assert results[0] == results[1]
    no_profile, too_many, none, second_engine = results[0]
    assert "train one batch first" in no_profile
    assert "num_stages = 2: the pipeline has 2 stages, and no workers wait" in too_many
    assert "num_stages = 0" in none
    assert "1 other engine(s) of this process" in second_engine


POINTS = [
    Point("before layers move", "dynpipe_ds.repacking.live:Shrink.prepare"),
    Point("before the vote", "dynpipe_ds.host.world:World.check"),
    Point("after the vote", "dynpipe_ds.repacking.live:Shrink.prepare", after=True),
    Point("before old groups go", "dynpipe_ds.host.world:_destroy"),
    Point("after old groups went", "dynpipe_ds.host.world:_destroy", after=True),
    Point("before ranks are renumbered", "dynpipe_ds.host.topology:_renumber_module"),
]


def no_memory() -> None:
    raise MemoryError("no room")


def shrink_until_fault(rank: int, victim: int, point: Point, fault: Callable[[], None]) -> str:
    """Train and re-pack; what the error says on ranks that are neither killed nor released."""
    run = run_with({"enabled": True, "target_stages": 2, "earliest_batch": 3})
    with ExitStack() as stack:
        engine = make_engine(run)
        if rank == victim:
            stack.enter_context(point.arm(fault))
        try:
            train(engine, run)
        except FatalError as error:
            return str(error)
    return "noticed nothing"


@pytest.mark.parametrize(
    "point", [pytest.param(p, id=p.name, marks=() if p == POINTS[2] else pytest.mark.exhaustive) for p in POINTS]
)
def test_a_rank_that_is_lost_is_named(point: Point) -> None:
    victim = 2 * (POINTS.index(point) % 2)  # stages 0 and 2 stay, rank 1 is to leave
    end = partial(kill, os.devnull)
    results = run_ranks(shrink_until_fault, 3, victim, point, end, may_die={victim, 1})
    (survivor,) = {0, 2} - {victim}
    assert f"rank {victim}" in results[survivor] and "ended while" in results[survivor], results


def test_a_failure_after_the_vote_ends_everybody_with_one_message() -> None:
    """Rank 1 has left by then; rank 2 is named as before, although it is the second of two by now."""
    results = run_ranks(shrink_until_fault, 3, 2, POINTS[-1], no_memory, may_die={1, 2})
    text = "rank 2 failed while layers were moved to fewer ranks (MemoryError: no room), which can't be undone"
    assert results[0] == results[2] and results[0].startswith(text), results
