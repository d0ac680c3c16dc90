"""What a run says before it trains, what it replaces, and what it refuses before ranks are started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scenarios.begun import as_values, check, expected, found
from scenarios.export import check_target
from scenarios.launch import LaunchSettings
from scenarios.opening import RESULTS, clear, opening
from scenarios.settings import RunSettings, Settings
from scenarios.train import telling
from tests.scenarios.test_resume import settings_for


def interrupted(settings: Settings, *, num_ranks: int = 2, trained: int = 6) -> dict[str, Any]:
    """Leave behind what an interrupted run of these settings writes down."""
    job = expected(settings, num_ranks)
    stored = {
        "tag": "batches_6_6", "settings": as_values(job.settings), "num_stages": job.num_stages,
        "samples": job.samples, "trained": {"static": trained, "dynamic": trained},
    }  # fmt: skip
    file = settings.output_dir / "checkpoints" / "job.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(stored), encoding="utf-8")
    return stored


def test_ranks_model_and_folder(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out", run={"export": "kept"})
    assert opening(expected(settings, 4), 4, resumes=True).splitlines() == [
        "ranks:  4 (2 pipeline stages x 2 replicas)",
        "model:  GPT, 2 blocks, hidden 8, 8 tokens; scenario: freezing; batches: 60",
        f"output: {tmp_path / 'out'}",
        "export: kept",
    ]
    halves = replace(settings, model=replace(settings.model, split_blocks=True))
    assert "2 blocks, each cut into attention and MLP, hidden 8" in opening(expected(halves, 2), 2, resumes=True)


def test_it_says_what_it_replaces_and_replaces_it(tmp_path: Path) -> None:
    """Also a report of then, which would be taken for one on this run; nothing else in the folder."""
    settings = settings_for(tmp_path / "out")
    settings.output_dir.mkdir()
    for name in (*RESULTS, "mine.txt"):
        (settings.output_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (settings.output_dir / name).touch()
    told = opening(expected(settings, 2), 2, resumes=True)
    assert "(replaces the results of 20" in told and "stage_times.png, workers.png, report.html, " in told
    assert "mine.txt" not in told
    clear(settings.output_dir)
    assert [file.name for file in settings.output_dir.rglob("*") if file.is_file()] == ["mine.txt"]
    assert "(replaces" not in opening(expected(settings, 2), 2, resumes=True)


def test_it_says_that_it_goes_on(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out")
    interrupted(settings)
    told = "(continues the run that was interrupted there after batch 6)"
    assert told in opening(expected(settings, 2), 2, resumes=True)
    assert told not in opening(expected(settings, 2), 2, resumes=False), "an entry that can't"
    anew = replace(settings, run=replace(settings.run, resume=False))
    assert found(anew) is None and told not in opening(expected(anew, 2), 2, resumes=True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 6}, "seed was 5 and is 6"),
        ({"scenario_settings": {"batches": [10], "frozen": [1]}}, r"scenario.batches was \[10, 30, 45\] and is \[10\]"),
        ({"run": RunSettings(batches=4, window=3)}, "6 batches are trained and run.batches is 4"),
    ],
)
def test_another_job_is_refused_from_values_alone(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    settings = settings_for(tmp_path / "out")
    stored = interrupted(settings)
    check(stored, expected(settings, 2))
    with pytest.raises(ValueError, match=f"holds an interrupted run with other settings: .*{told}"):
        check(stored, expected(replace(settings, **changes), 2))


def test_other_samples_a_batch_are_refused_and_an_export_is_free(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out")
    stored = interrupted(settings)
    assert stored["samples"] == 2
    check(stored, expected(replace(settings, run=replace(settings.run, export="kept", threads=1)), 2))
    with pytest.raises(ValueError, match="samples a batch were 2 and are 4 .* number of replicas, now 2, differs"):
        check(stored, expected(settings, 4))


def test_what_was_left_open_is_decided_as_the_interrupted_run_did(tmp_path: Path) -> None:
    """On another number of ranks, "auto" would decide otherwise; that is no other job."""
    settings = settings_for(tmp_path / "out")
    auto = replace(settings, model=replace(settings.model, split_blocks="auto"), partition_method="parameters")
    stored = interrupted(auto)
    assert stored["settings"]["model"]["split_blocks"] is True
    job = expected(replace(auto, run=replace(auto.run, num_stages=1)), 1)
    assert job.settings.model.split_blocks is True
    check(stored, job)


def test_an_export_must_have_a_folder_of_its_own(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out", run={"export": str(tmp_path / "kept")})
    check_target(settings)
    (tmp_path / "kept").mkdir()
    check_target(settings)
    (tmp_path / "kept" / "model.json").touch()
    with pytest.raises(ValueError, match="run.export=.*kept exists and is not an empty folder: give another name"):
        check_target(settings)
    check_target(replace(settings, run=replace(settings.run, export=None)))
    sharded = replace(settings, scenario_settings={"expert_weights": "sharded"})
    (tmp_path / "kept" / "model.json").unlink()
    with pytest.raises(ValueError, match="expert_weights=sharded no rank has all experts; set it to replicated"):
        check_target(sharded)


def test_ranks_of_all_machines(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# mine\nworker-1 slots=4\n\nworker-2 slots=4  # new\n", encoding="utf-8")
    assert LaunchSettings(num_accelerators=3).num_ranks == 3
    assert LaunchSettings(num_accelerators=4, hostfile=str(hosts)).num_ranks == 8


def test_notes_that_say_nothing_are_left_out() -> None:
    notes = {
        "frozen layers": "0 of 14", "sparsity": 0.0, "dropped": "0%", "copied": "0.00 MB", "copies": 0,
        "threshold": 0.25, "unfrozen": "10 of 14", "share": "0.5%", "kernel": "dense",
    }  # fmt: skip
    assert list(telling(notes)) == ["threshold", "unfrozen", "share", "kernel"]
