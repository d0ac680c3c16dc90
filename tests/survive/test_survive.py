"""A rank is killed anywhere; the others go on with fewer stages and the bits of a run in which it was not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.configs import ADAMW, ZERO
from tests.distributed.ranks import run_ranks
from tests.faults.harness import intact_checkpoints
from tests.faults.points import SAVING, TRAINING, Point
from tests.matrix import mostly
from tests.once import Once
from tests.survive.harness import KILL_FROM, NUM_BATCHES, Job, Outcome, run_job, state_of, train_again

MOVING = {"rebalance_every": 4, "min_gain": 0.0, "cost": "parameters"}
JOBS = {
    "adamw": Job(config=ADAMW), "zero1": Job(config={**ADAMW, **ZERO}),
    "moving adamw": Job(config=ADAMW, section=MOVING), "moving zero1": Job(config={**ADAMW, **ZERO}, section=MOVING),
    "saving": Job(config=ADAMW, saves=True), "evaluating": Job(config=ADAMW, evaluates=True),
    "cut smaller": Job(config=ADAMW, num_micro_batches=8), "repeating": Job(config=ADAMW, every=3),
}
BEGINNING = Point("before a batch", "dynpipe_ds.training:Training._train_batch", call=6)  # ranks wait for none there
FORWARD = Point("in the middle of a forward", "tests.distributed.models:Block.forward", call=22)


@pytest.fixture(scope="session")
def undisturbed() -> Callable[[str], list[Outcome | None]]:
    """Outcomes of jobs that nobody kills; each runs once."""
    return Once(lambda name: run_job(JOBS[name], {}))


def check(
    outcomes: list[Outcome | None], whole: list[Outcome | None], lost: set[int], num_stages: int,
    also: Sequence[Outcome] = (),
) -> None:
    first = whole[0]
    assert first is not None
    left = [one for one in outcomes if one is not None]
    assert [rank for rank, one in enumerate(outcomes) if one is None] == sorted(lost), outcomes
    for one in left:
        assert not one.error, one.error
        assert one.losses == first.losses and len(one.losses) == NUM_BATCHES
        assert one.num_stages == num_stages and one.num_steps == first.num_steps
        assert one.evaluated == first.evaluated
    if not any(one.evaluated for one in left):  # blocks count their forwards, and evaluations are not repeated
        assert state_of([*outcomes, *also]) == state_of(whole)


Undisturbed = Callable[[str], list[Outcome | None]]


def kill_at(
    point: Point, victim: int, job: str, tmp_path: Path, undisturbed: Undisturbed,
    record: Callable[[str, object], None],
) -> list[Outcome | None]:
    outcomes = run_job(JOBS[job], {victim: point}, str(tmp_path / "note"))
    note = tmp_path / f"note.{victim}"
    check(outcomes, undisturbed(job), {victim} if note.exists() else set(), 3 if note.exists() else 4)
    if note.exists():
        killed_at, left = float(note.read_text()), [one for one in outcomes if one is not None]
        noticed_s = max(at for one in left for at in one.noticed_at) - killed_at
        next_batch_s = max(one.went_on_at(killed_at) for one in left) - killed_at
        for name, value in (
            ("point", point.name), ("victim", victim), ("detection_s", noticed_s), ("next_batch_s", next_batch_s)
        ):  # benchmarks/faults/points.py
            record(name, value)
    return outcomes


@pytest.mark.parametrize("victim", mostly([0, 1, 3], [0, 3]))
def test_fewer_stages(
    victim: int, tmp_path: Path, undisturbed: Undisturbed, record_property: Callable[[str, object], None]
) -> None:
    outcomes = kill_at(FORWARD, victim, "adamw", tmp_path, undisturbed, record_property)
    assert (tmp_path / f"note.{victim}").exists()
    held = [one.held for one in outcomes if one is not None]
    assert all(after[-1] < after[KILL_FROM - 1] for after in held), f"connections to fewer ranks: {held}"


@pytest.mark.parametrize("victim", [1, *(pytest.param(rank, marks=pytest.mark.exhaustive) for rank in (0, 3))])
def test_samples_are_cut_otherwise_than_the_loader_does(
    victim: int, tmp_path: Path, undisturbed: Undisturbed, record_property: Callable[[str, object], None]
) -> None:
    """The first stage has read an odd number then: half of what the loader gave last is still to be used."""
    kill_at(replace(FORWARD, call=23), victim, "cut smaller", tmp_path, undisturbed, record_property)
    assert (tmp_path / f"note.{victim}").exists()


@pytest.mark.parametrize("victim", [1, *(pytest.param(rank, marks=pytest.mark.exhaustive) for rank in (0, 3))])
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("zero1", marks=pytest.mark.exhaustive)])
def test_a_spare_takes_its_place(
    victim: int, optimizer: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = replace(JOBS[optimizer], spares=1)
    soon = replace(FORWARD, call=6)  # with the first rank its door is lost, and the spare has to find another one
    outcomes = run_job(job, {victim: FORWARD if victim else soon}, str(tmp_path / "note"))
    whole = undisturbed(optimizer)
    first, spare = whole[0], outcomes[4]
    assert first is not None and spare is not None
    assert spare.losses and spare.losses == first.losses[-len(spare.losses) :]
    check(outcomes[:4], whole, {victim}, 4, also=[spare])


@pytest.mark.exhaustive
def test_who_was_silent_and_comes_back_ends(tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = replace(JOBS["adamw"], silent_s=2.0, stop_s=45.0)
    outcomes = run_job(job, {1: FORWARD}, str(tmp_path / "note"))
    woken = outcomes[1]
    assert woken is None or "gone on without this rank" in woken.error, woken
    check([outcomes[0], None, *outcomes[2:]], undisturbed("adamw"), {1}, 3)


TYPICAL = {
    ("profiling: before the optimizer step", 1, "zero1"), ("migration: tensors are under way", 3, "adamw"),
}
"""Of the matrix, what the usual suite runs."""


@pytest.mark.parametrize(("point", "victim", "optimizer"), [
    pytest.param(
        point, victim, optimizer, id=f"{point.name}, rank {victim}, {optimizer}",
        marks=() if (point.name, victim, optimizer) in TYPICAL else pytest.mark.exhaustive,
    )
    for point in TRAINING for victim in (0, 1, 3) for optimizer in ("adamw", "zero1")
])  # fmt: skip
def test_every_point_of_training(
    point: Point, victim: int, optimizer: str, tmp_path: Path, undisturbed: Undisturbed,
    record_property: Callable[[str, object], None],
) -> None:
    """A point that a rank does not come by leaves the run undisturbed."""
    kill_at(point, victim, f"moving {optimizer}", tmp_path, undisturbed, record_property)


@pytest.mark.parametrize("point", [
    pytest.param(p, id=p.name, marks=() if p.name == "saving: before it gets its name" else pytest.mark.exhaustive)
    for p in SAVING if p.tag is None and p.exchange and p.batch
])  # fmt: skip
def test_every_point_of_saving(
    point: Point, tmp_path: Path, undisturbed: Undisturbed, record_property: Callable[[str, object], None]
) -> None:
    victim = 1 if point.victim is None else point.victim
    kill_at(point, victim, "saving", tmp_path, undisturbed, record_property)
    place = tmp_path / "note.checkpoints"
    assert (place / "latest").read_text() == f"global_step{NUM_BATCHES}"
    assert intact_checkpoints(place)[f"global_step{NUM_BATCHES}"] == NUM_BATCHES


@pytest.mark.exhaustive
def test_batches_that_were_trained_before_an_older_checkpoint_was_loaded_are_another_past(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    soon = replace(FORWARD, call=6)
    losses = run_ranks(
        train_again, 4, JOBS["adamw"], {1: FORWARD}, {3: soon}, str(tmp_path / "note"), may_die={1, 3}
    )
    first = undisturbed("adamw")[0]
    assert first is not None
    assert losses == [first.losses[2:6], None, first.losses[2:6], None]


EVALUATING = Point("while a batch is evaluated", "deepspeed.runtime.pipe.engine:PipelineEngine._bcast_pipe_scalar")


@pytest.mark.parametrize("victim", [3, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_while_a_batch_is_evaluated(
    victim: int, tmp_path: Path, undisturbed: Undisturbed, record_property: Callable[[str, object], None]
) -> None:
    kill_at(EVALUATING, victim, "evaluating", tmp_path, undisturbed, record_property)
    assert (tmp_path / f"note.{victim}").exists()


@pytest.mark.parametrize("victims", [(1, 3), pytest.param((0, 2), marks=pytest.mark.exhaustive)])
def test_two_that_hold_no_copies_of_each_other(
    victims: tuple[int, int], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    outcomes = run_job(JOBS["adamw"], dict.fromkeys(victims, FORWARD), str(tmp_path / "note"))
    check(outcomes, undisturbed("adamw"), set(victims), 2)


def test_two_neighbours_say_why_nobody_goes_on(tmp_path: Path) -> None:
    outcomes = run_job(JOBS["adamw"], dict.fromkeys((1, 2), BEGINNING), str(tmp_path / "note"))
    left = [one for one in outcomes if one is not None]
    assert len(left) == 2
    for one in left:
        assert "the ranks that are left can't go on: no snapshot is complete on them" in one.error


AGAIN = {
    name: Point(name, target, call=call) for name, target, call in (
        ("before the meeting", "dynpipe_ds.ranks.meeting:Meeting.meet", 1),
        ("before the world", "dynpipe_ds.host.world:World.regroup", 1),
        ("in the new world", "dynpipe_ds.survive.forming:make_heartbeat", 1),
        ("before going back", "dynpipe_ds.survive.survivor:restore", 1),
        ("while going back", "dynpipe_ds.snapshots.restore:exchange_bytes", 1),
        ("while layers are taken in", "dynpipe_ds.module:DynamicPipelineModule.install", 2),
        ("before batches are repeated", "dynpipe_ds.survive.repeating:Repeating.replay", 1),
        ("while batches are repeated", "dynpipe_ds.host.pipeline:Pipeline.run_batch", 1),
    )
}  # fmt: skip


@pytest.mark.parametrize("second", [3, pytest.param(0, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("moment", [
    pytest.param(m, marks=() if m in ("before the world", "while batches are repeated") else pytest.mark.exhaustive)
    for m in AGAIN
])  # fmt: skip
def test_another_one_is_lost_while_they_go_on(
    moment: str, second: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    first = 1 if second == 3 else 2
    job = JOBS["repeating"]  # no snapshot is taken before the batch in which the first is lost
    outcomes = run_job(job, {first: FORWARD, second: AGAIN[moment]}, str(tmp_path / "note"))
    check(outcomes, undisturbed("repeating"), {first, second}, 2)
