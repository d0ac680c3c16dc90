"""Blocks cut into attention and MLP train as whole blocks do: the same losses, on any cut, from any checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.scenarios.exactness import Job, Trained, go_on, train, train_and_save
from tests.scenarios.test_resume_on_ranks import JOBS

DROPPING = Job("none", model=replace(Job("none").model, dropout=0.3, positions="rotary"))
STATES = Job("early_exit", {**JOBS["early_exit"].settings, "confidence": "state"})
OURS = {"none": DROPPING, **JOBS, "early_exit-states": STATES}
OURS.pop("freezing_egeria")  # judges each half by its own answers, so it freezes at other batches
TYPICAL = ("none", "pruning", "freezing_autofreeze", "early_exit", "moe", "sparse_attention")


def cut(job: Job) -> Job:
    return replace(job, model=replace(job.model, split_blocks=True))


def train_each(_rank: int, jobs: dict[str, Job]) -> dict[str, tuple[Trained, Trained]]:
    """Whole blocks that stay, and halves that move."""
    return {name: (train(job, moves=False), train(cut(job), moves=True)) for name, job in jobs.items()}


def compare(names: tuple[str, ...], stages: int, optimizer: str | None = None) -> None:
    jobs = {
        name: replace(OURS[name], stages=stages, optimizer=optimizer or OURS[name].optimizer, num_batches=9)
        for name in names
    }
    for rank in run_ranks(train_each, stages, jobs, timeout_s=240):
        for name, (whole, halves) in rank.items():
            assert halves.losses == whole.losses, name
            assert len(whole.losses) == 9


def test_halves_train_as_whole_blocks() -> None:
    compare(TYPICAL, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stages", "optimizer"), [(2, None), (3, None), (2, "zero1_adamw"), (3, "bf16_zero1"), (4, None)]
)
def test_halves_of_all_scenarios(stages: int, optimizer: str | None) -> None:
    compare(tuple(OURS), stages, optimizer)


def train_egeria(_rank: int) -> list[str]:
    job = cut(replace(JOBS["freezing_egeria"], num_batches=9))
    return [report["frozen layers"] for report in train(job, moves=True).reports]


def test_blocks_freeze_as_a_whole() -> None:
    first, second = run_ranks(train_egeria, 2)
    assert first == second and all(report.endswith(" of 6") for report in first)
    assert first[-1] != "0 of 6"


def convert(names: tuple[str, ...], stages: tuple[int, int], folder: Path, *, to_halves: bool, optimizer: str) -> None:
    jobs = {name: replace(OURS[name], stages=stages[0], optimizer=optimizer) for name in names}
    before, after = (jobs, {name: cut(job) for name, job in jobs.items()})[:: 1 if to_halves else -1]
    reference = run_ranks(train_and_save, stages[0], before, str(folder), timeout_s=240)
    after = {name: replace(job, stages=stages[1]) for name, job in after.items()}
    resumed = run_ranks(go_on, stages[1], after, str(folder), timeout_s=240)
    for name in names:
        assert resumed[0][name].losses == reference[0][name].losses, name


@pytest.mark.parametrize(
    ("names", "stages", "to_halves", "optimizer"),
    [
        (("none", "pruning", "freezing_autofreeze"), (2, 3), True, "fp32_adamw"),
        (("freezing", "early_exit", "moe"), (3, 2), False, "bf16_zero1"),
    ],
    ids=["cut", "joined"],
)
def test_checkpoints_convert(
    names: tuple[str, ...], stages: tuple[int, int], to_halves: bool, optimizer: str, tmp_path: Path
) -> None:
    convert(names, stages, tmp_path, to_halves=to_halves, optimizer=optimizer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("to_halves", [True, False], ids=["cut", "joined"])
@pytest.mark.parametrize("stages", [(2, 2), (2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("optimizer", ["fp32_adamw", "zero1_adamw", "bf16_zero1"])
def test_checkpoints_of_all_scenarios_convert(
    stages: tuple[int, int], to_halves: bool, optimizer: str, tmp_path: Path
) -> None:
    convert(tuple(OURS), stages, tmp_path, to_halves=to_halves, optimizer=optimizer)
