"""Who can't join is refused, and who dies while joining costs the others nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dynpipe_ds import RepackError
from dynpipe_ds.joining.newcomer import RefusedError
from tests.distributed.configs import BY_HAND
from tests.distributed.models import Run, data, digest, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.faults.points import Point, kill
from tests.joining.runs import elastic, resized, wait_for_newcomers

RUN = Run(2, num_batches=5, config={"gradient_clipping": 0.5})

POINTS = [
    Point("waiting", "dynpipe_ds.joining.newcomer:Newcomer.wait"),
    Point("invited", "dynpipe_ds.joining.newcomer:Newcomer.wait", after=True),
    Point("taken over", "dynpipe_ds.joining.entering:adopt", after=True),
    Point("it said that it comes", "dynpipe_ds.host.world:World.check"),
    Point("while it is connected", "dynpipe_ds.host.world:World._try_to_connect"),
    Point("connected for a trial", "dynpipe_ds.host.world:World.check", after=True),
    Point("all have said yes", "dynpipe_ds.host.world:World.hear", after=True, call=2),
    Point("its own groups are gone", "dynpipe_ds.host.world:_destroy", after=True),
]


def no_room() -> None:
    raise MemoryError("no room")


def grow_or_not(rank: int, point: Point | None, fault: Any) -> Any:
    """Train; after the second batch let a worker join that fails on its way; losses, layers, what was said."""
    with ExitStack() as stack:
        if rank >= RUN.num_stages and point is not None:
            stack.enter_context(point.arm(fault))
        engine = make_engine(elastic(RUN))
        batches, losses, said = data(0, RUN.micro_batches), [], []
        for batch in range(RUN.num_batches):
            losses.append(float(engine.train_batch(batches)))
            if batch == 1:
                if point is not None:
                    wait_for_newcomers(engine, 1)
                try:
                    engine.repack(3)
                except RepackError as error:
                    said.append(str(error))
        group = engine.dynamic.stage.guard.heartbeat
        return losses, digest(engine), engine.partition, said, group is not None


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    return run_ranks(grow_or_not, 2, None, None)


def test_nobody_waits(undisturbed: list[Any]) -> None:
    text = "num_stages = 3: the pipeline has 2 stages, and no workers wait"
    assert undisturbed[0][3] == undisturbed[1][3] and all(text in said for said in undisturbed[0][3])
    assert len(undisturbed[0][3]) == 1


@pytest.mark.parametrize(
    "point", [pytest.param(p, id=p.name, marks=() if i in (2, 4, 7) else pytest.mark.exhaustive)
              for i, p in enumerate(POINTS[1:], start=1)]
)  # fmt: skip
def test_who_dies_while_joining_costs_nothing(point: Point, undisturbed: list[Any]) -> None:
    """Training goes on with the ranks that it had, and the same bits."""
    results = run_ranks(grow_or_not, 2, point, partial(kill, os.devnull), newcomers=1, may_die={2})
    for result, expected in zip(results, undisturbed, strict=False):
        assert result[:3] == expected[:3] and result[4]
        (said,) = result[3]
        assert "training goes on without" in said
    assert results[0][3] == results[1][3]


def with_a_fellow(rank: int, point: Point, fault: Any) -> Any:
    """Let two workers join, of which the first fails on its way; then the other one alone."""
    with ExitStack() as stack:
        if rank == RUN.num_stages:
            stack.enter_context(point.arm(fault))
        engine = make_engine(elastic(RUN))
        batches, losses, said = data(0, RUN.micro_batches), {}, []
        for _ in range(engine.global_steps * RUN.micro_batches):
            next(batches)
        while engine.global_steps < RUN.num_batches:
            batch = engine.global_steps
            losses[batch] = float(engine.train_batch(batches))
            if batch == 1:
                wait_for_newcomers(engine, 2)
                with pytest.raises(RepackError) as failed:
                    engine.repack(4)
                said.append(str(failed.value))
            if batch == 2:
                wait_for_newcomers(engine, 1)
                engine.repack(3)
        return losses, digest(engine), engine.partition, said


@pytest.mark.parametrize(
    "point", [pytest.param(p, id=p.name, marks=() if i in (1, 7) else pytest.mark.exhaustive)
              for i, p in enumerate(POINTS[1:], start=1)]
)  # fmt: skip
def test_who_joins_with_one_that_dies_comes_later(point: Point, undisturbed: list[Any]) -> None:
    """At every point, also after the last vote: the fellow waits again, and the bits are those of two ranks."""
    kill_it = partial(kill, os.devnull)
    first, second, dead, fellow = run_ranks(with_a_fellow, 2, point, kill_it, newcomers=2, may_die={2})
    assert dead is None
    assert len(first[3]) == len(second[3]) == 1 and not fellow[3]
    for rank, batches in ((first, range(5)), (second, range(5)), (fellow, range(3, 5))):
        assert rank[0] == {batch: undisturbed[0][0][batch] for batch in batches}
        assert len(rank[2]) == 4
    expected = {item for rank in undisturbed for item in rank[1].items()}
    assert {item for rank in (first, second, fellow) for item in rank[1].items()} == expected


@pytest.mark.exhaustive
def test_who_has_no_room_says_so(undisturbed: list[Any]) -> None:
    results = run_ranks(grow_or_not, 2, POINTS[2], no_room, newcomers=1, may_die={2})
    for result, expected in zip(results, undisturbed, strict=False):
        assert result[:3] == expected[:3]
        assert "a newcomer can't come: MemoryError: no room" in result[3][0]


def join_with_another(rank: int, runs: dict[int, Run]) -> Any:
    """Newcomers of several kinds; what each was told. The job waits for those that fit."""
    try:
        return resized(rank, runs.get(rank, RUN), {1: 3})
    except RefusedError as error:
        return str(error)


def test_who_does_not_fit_is_refused_with_the_difference() -> None:
    others = {
        2: replace(RUN, num_blocks=5), 3: replace(RUN, width=24), 4: replace(RUN, config={"gradient_clipping": 0.4}),
        5: replace(RUN, config={**RUN.config, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}),
    }
    results = run_ranks(join_with_another, 2, others, newcomers=5)
    assert "model: 8 of them in the job, 7 here" in results[2]
    assert "model[1].of[1][0]: 16 in the job, 24 here" in results[3]
    assert "config.gradient_clipping: '0.5' in the job, '0.4' here" in results[4]
    assert "optimizer.kind: 'AdamW' in the job, 'SGD' here" in results[5]
    expected = run_ranks(resized, 2, RUN, {})[0].losses
    for outcome in (results[0], results[1], results[6]):
        assert outcome.losses == {batch: expected[batch] for batch in outcome.losses}
        assert len(outcome.partition) == 4


def warned_while_it_waits(_rank: int) -> Any:
    """A worker that nobody needs yet is told that it is taken away; the job hears of nothing."""
    config = {**RUN.config, "dynamic_pipeline": {**BY_HAND, "repack": {"leave_on": "SIGUSR2"}}}
    with POINTS[0].arm(warn_soon):
        engine = make_engine(elastic(replace(RUN, config=config)))
    wait_for_newcomers(engine, 1)
    while engine.num_waiting():
        time.sleep(0.05)
    return train(engine, RUN)


def warn_soon() -> None:
    threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()


def test_who_is_warned_while_it_waits_ends(undisturbed: list[Any]) -> None:
    """With exit code 0, which the helper takes for "was not needed"."""
    first, second, gone = run_ranks(warned_while_it_waits, 2, newcomers=1)
    assert first == second == undisturbed[0][0] and gone is None
