"""So many ranks are killed that there can't be as many replicas; the others train the same batches with fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, ZERO
from tests.distributed.ranks import run_ranks
from tests.faults.points import Point
from tests.once import Once
from tests.survive.harness import NUM_BATCHES, Job, Outcome, run_job, train
from tests.survive.test_survive import FORWARD, Undisturbed

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
    leftover: Sequence[int] = (), fewer: str = "last",
) -> list[Outcome]:
    """Kill some ranks; the others have the losses of the undisturbed run but for rounding, dropout included."""
    job = replace(JOBS[name], fewer=fewer)
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


@pytest.mark.parametrize(("name", "victims", "size"), [
    ("1x2 adamw", (0,), (1, 1)),
    ("1x3 zero1", (1,), (1, 2)),
])
def test_fewer_ranks_than_replicas_are_left(
    name: str, victims: tuple[int, ...], size: tuple[int, int], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    kill_at(name, undisturbed(name), dict.fromkeys(victims, FORWARD), tmp_path, size=size)
