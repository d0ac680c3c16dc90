"""Replicas of stages are killed; the others go on with as many replicas, on fewer stages, and with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, ZERO
from tests.distributed.ranks import run_ranks
from tests.faults.points import Point
from tests.matrix import mostly
from tests.once import Once
from tests.survive.harness import Job, Outcome, run_job, state_of, train
from tests.survive.test_survive import BEGINNING, FORWARD, Undisturbed
from tests.test_public_api import ROOT

OPTIMIZERS = {"adamw": ADAMW, "zero1": {**ADAMW, **ZERO}, "bf16": {**ADAMW, **BF16_FP32_SUMS}}
SIZES = {"2x2": (4, 2), "3x2": (6, 2), "2x3": (6, 3)}
JOBS = {
    f"{size} {optimizer}": Job(num_ranks, config, replicas=replicas)
    for size, (num_ranks, replicas) in SIZES.items() for optimizer, config in OPTIMIZERS.items()
}  # fmt: skip
JOBS |= {
    "saving": replace(JOBS["2x2 zero1"], saves=True), "evaluating": replace(JOBS["2x2 zero1"], evaluates=True),
    "moving": replace(
        JOBS["2x2 zero1"], section={"rebalance_every": 4, "min_gain": 0.0, "cost": "parameters"}
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def undisturbed() -> Callable[[str], list[Outcome | None]]:
    return Once(lambda name: run_job(replace(JOBS[name], saves=False), {}))


def kill_at(
    job: Job, whole: list[Outcome | None], faults: dict[int, Point], tmp_path: Path, *, num_stages: int,
    leftover: tuple[int, ...],
) -> None:
    """Kill some ranks; ranks that have no place then leave, and the others have the bits of the undisturbed run."""
    outcomes: list[Outcome | None] = run_ranks(
        train, job.num_ranks, job, faults, str(tmp_path / "note"), may_die=set(faults), may_leave=set(leftover)
    )
    assert all((tmp_path / f"note.{rank}").exists() for rank in faults)
    assert [rank for rank, one in enumerate(outcomes) if one is None] == sorted({*faults, *leftover}), outcomes
    first = whole[0]
    assert first is not None
    for one in outcomes:
        if one is not None:
            assert not one.error, one.error
            assert one.losses == first.losses and one.evaluated == first.evaluated
            assert one.num_stages == num_stages and one.num_steps == first.num_steps
    if not first.evaluated:  # blocks count their forwards, and evaluations are not repeated
        assert state_of(outcomes) == state_of([one for one in whole if one is not None][: len(whole)])


@pytest.mark.parametrize(("name", "victims", "num_stages", "leftover"), [
    ("2x2 zero1", (1,), 1, (0,)),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("3x2 adamw", (0,), 2, (1,)),
        ("2x2 adamw", (0,), 1, (1,)), ("2x2 adamw", (3,), 1, (2,)), ("2x2 zero1", (0,), 1, (1,)),
        ("2x2 zero1", (2,), 1, (3,)), ("2x2 bf16", (0,), 1, (1,)), ("2x2 bf16", (3,), 1, (2,)),
        ("3x2 zero1", (0,), 2, (1,)), ("3x2 zero1", (3,), 2, (2,)), ("3x2 bf16", (5,), 2, (4,)),
        ("2x3 adamw", (0,), 1, (1, 2)), ("2x3 zero1", (4,), 1, (3, 5)), ("2x3 bf16", (1,), 1, (0, 2)),
    )),
])  # fmt: skip
def test_a_replica_is_lost(
    name: str, victims: tuple[int, ...], num_stages: int, leftover: tuple[int, ...], tmp_path: Path,
    undisturbed: Undisturbed,
) -> None:
    kill_at(
        JOBS[name], undisturbed(name), dict.fromkeys(victims, FORWARD), tmp_path, num_stages=num_stages,
        leftover=leftover,
    )


@pytest.mark.parametrize(("name", "victims", "rereads"), [
    ("2x2 zero1", (1, 2), ""),
    pytest.param("2x2 zero1", (1, 3), "data_at", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_replicas_of_two_stages_are_lost_at_once(
    name: str, victims: tuple[int, ...], rereads: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """What is left of the stages forms one, with its replicas as they were, or as others that read other data."""
    job = replace(JOBS[name], saves=True, save_every=5, rereads=rereads or "data_at")
    kill_at(job, undisturbed(name), dict.fromkeys(victims, BEGINNING), tmp_path, num_stages=1, leftover=())


BETWEEN = {
    "saving": Point("saving", "dynpipe_ds.checkpoint.folder:publish", victim=0),
    "evaluating": Point("evaluating", "dynpipe_ds.host.hooks:Hooks._evaluate", call=3),
    "moving": Point("moving", "dynpipe_ds.migration.transport:Transfer.finish"),
}


@pytest.mark.parametrize("name", mostly(BETWEEN, ["moving"]))
def test_a_replica_is_lost_between_batches(name: str, tmp_path: Path, undisturbed: Undisturbed) -> None:
    point = BETWEEN[name]
    victim = point.victim or 0
    kill_at(JOBS[name], undisturbed(name), {victim: point}, tmp_path, num_stages=1, leftover=(1 - victim,))


def run_script(victim: int, folder: Path, spares: int) -> list[dict[str, Any]]:
    """What the processes of a job saw that was started by ``dynpipe run``."""
    folder.mkdir()
    ended = subprocess.run(
        [
            sys.executable, "-m", "dynpipe_ds", "run", "--workers", "4", "--spares", str(spares), "--survivors-stay",
            "--", str(ROOT / "tests/survive/script.py"), str(victim), str(folder),
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


@pytest.mark.exhaustive
def test_who_has_no_place_and_a_spare_fill_the_stage_again(tmp_path: Path) -> None:
    """The left-over rank runs its script anew; with the spare it is a stage, and all bits are as without the loss."""
    whole = run_script(-1, tmp_path / "whole", 0)
    seen = run_script(1, tmp_path / "killed", 1)
    assert len(whole) == len(seen) == 4 and sum(one["joined"] for one in seen) == 2
    losses = whole[0]["losses"]
    for one in seen:
        assert one["losses"].items() <= losses.items() and one["num_stages"] == 2
    assert all(one["losses"] == losses for one in seen if not one["joined"])
    assert states(seen) == states(whole)


def states(seen: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """All digests of all layers: with ZeRO-1, replicas must agree as well."""
    return {item for one in seen for item in one["state"].items()}
