"""So many ranks are killed that there can't be as many replicas; the others train the same batches with fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, ZERO
from tests.distributed.ranks import RankFailure, run_ranks
from tests.faults.points import Point
from tests.once import Once
from tests.survive.harness import NUM_BATCHES, Job, Outcome, run_job, train
from tests.survive.test_survive import BEGINNING, FORWARD, Undisturbed

OPTIMIZERS = {"adamw": ADAMW, "zero1": {**ADAMW, **ZERO}, "bf16": {**ADAMW, **BF16_FP32_SUMS}}
SIZES = {"1x2": (2, 2), "1x3": (3, 3), "2x2": (4, 2), "2x3": (6, 3), "3x2": (6, 2)}
JOBS = {
    f"{size} {optimizer}": Job(num_ranks, config, replicas=replicas, rereads="data_at")
    for size, (num_ranks, replicas) in SIZES.items() for optimizer, config in OPTIMIZERS.items()
}  # fmt: skip
JOBS["1x3 odd"] = replace(JOBS["1x3 zero1"], num_micro_batches=1)
CLOSE = {"adamw": 1e-6, "zero1": 1e-6, "bf16": 5e-3, "odd": 1e-6}
"""Relative difference of losses: the same gradients are added in another order (docs/lost_workers.md)."""


@pytest.fixture(scope="session")
def undisturbed() -> Callable[[str], list[Outcome | None]]:
    return Once(lambda name: run_job(JOBS[name], {}))


def kill_at(
    name: str, whole: list[Outcome | None], faults: dict[int, Point], tmp_path: Path, *, size: tuple[int, int],
    leftover: Sequence[int] = (), fewer: str = "last", saves: bool = False,
) -> list[Outcome]:
    """Kill some ranks; the others have the losses of the undisturbed run but for rounding, dropout included."""
    job = replace(JOBS[name], fewer=fewer, saves=saves)
    outcomes: list[Outcome | None] = run_ranks(
        train, job.num_ranks, job, faults, str(tmp_path / "note"), may_die=set(faults), may_leave=set(leftover)
    )
    assert all((tmp_path / f"note.{rank}").exists() for rank in faults)
    assert [rank for rank, one in enumerate(outcomes) if one is None] == sorted({*faults, *leftover}), outcomes
    first, left = whole[0], [one for one in outcomes if one is not None]
    assert first is not None
    closeness = CLOSE[name.split()[1]]
    weights = {key: value for one in whole if one is not None for key, value in one.weights.items()}
    for one in left:
        assert not one.error, one.error
        assert (one.num_stages, one.replicas) == size and one.num_steps == first.num_steps
        assert len(one.losses) == NUM_BATCHES
        numpy.testing.assert_allclose(one.losses, first.losses, rtol=closeness)
        for key, value in one.weights.items():
            numpy.testing.assert_allclose(value, weights[key], atol=100 * closeness, err_msg=key)
    assert {key for one in left for key in one.weights} == weights.keys()
    return left


@pytest.mark.parametrize(("name", "victims", "size", "leftover"), [
    ("1x3 zero1", (1,), (1, 2), ()),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("1x2 adamw", (0,), (1, 1), ()), ("1x2 zero1", (1,), (1, 1), ()), ("1x2 bf16", (0,), (1, 1), ()),
        ("1x3 adamw", (0,), (1, 2), ()), ("1x3 bf16", (2,), (1, 2), ()),
        ("1x3 odd", (1,), (1, 1), (2,)),  # a micro-batch of each of three can't be shared out between two
    )),
])  # fmt: skip
def test_fewer_ranks_than_replicas_are_left(
    name: str, victims: tuple[int, ...], size: tuple[int, int], leftover: tuple[int, ...], tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    kill_at(name, undisturbed(name), dict.fromkeys(victims, FORWARD), tmp_path, size=size, leftover=leftover)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "victims", "size", "leftover"), [
    ("2x2 zero1", (1,), (2, 1), (3,)), ("2x2 bf16", (2,), (2, 1), (1,)), ("3x2 adamw", (3,), (3, 1), (1, 5)),
    ("2x3 zero1", (5,), (2, 2), (2,)),
])  # fmt: skip
def test_the_pipeline_stays_as_long_as_it_was(
    name: str, victims: tuple[int, ...], size: tuple[int, int], leftover: tuple[int, ...], tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    kill_at(
        name, undisturbed(name), dict.fromkeys(victims, FORWARD), tmp_path, size=size, leftover=leftover, fewer="first"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "victims"), [("1x3 zero1", (0, 1)), ("2x2 adamw", (0, 1, 2))])
def test_one_rank_is_left_and_the_newest_checkpoint(
    name: str, victims: tuple[int, ...], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """A rank and the holder of its copy are lost at once."""
    kill_at(
        name, undisturbed(name), dict.fromkeys(victims, BEGINNING), tmp_path, size=(1, 1), saves=True
    )


@pytest.mark.exhaustive
def test_one_replica_is_lost_after_another(tmp_path: Path, undisturbed: Undisturbed) -> None:
    faults = {0: FORWARD, 2: BEGINNING}
    kill_at("1x3 zero1", undisturbed("1x3 zero1"), faults, tmp_path, size=(1, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("change", "why"), [
    ({"fewer": "never"}, "next time set survive.fewer_replicas to \"last\""),
    ({"rereads": ""}, "next time say by engine.data_at how to read other data"),
])  # fmt: skip
def test_where_it_is_not_wanted_or_data_cant_be_read_all_end(
    change: dict[str, str], why: str, tmp_path: Path
) -> None:
    job = replace(JOBS["1x2 adamw"], **change)
    (one,) = (each for each in run_job(job, {0: FORWARD}, str(tmp_path / "note")) if each is not None)
    assert "1 ranks are left for 2 replicas" in one.error and why in one.error


@pytest.mark.exhaustive
def test_fewer_replicas_before_fewer_stages_need_the_data_of_all_from_the_start() -> None:
    job = replace(JOBS["2x2 adamw"], fewer="first", rereads="")
    with pytest.raises(RankFailure, match='"first": the data of a lost replica can\'t be read'):
        run_job(job, {})
