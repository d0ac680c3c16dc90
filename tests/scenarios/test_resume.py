"""The training entry, interrupted: it goes on where it was, says so, and refuses to go on as another job."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dynpipe_ds import RankLostError
from scenarios.data import DataSettings
from scenarios.gpt import GPTConfig
from scenarios.settings import RunSettings, Settings, load_deepspeed_json, merge
from tests.distributed.ranks import run_ranks
from tests.faults.points import Point
from tests.once import Once
from tests.scenarios.test_train import ROOT, launch_command

BATCHES, FEW = 60, 20
Uninterrupted = Callable[[int], dict[str, Any]]


def settings_for(folder: Path, *, stages: int = 2, batches: int = BATCHES, **changes: Any) -> Settings:
    """A tiny job that freezes and unfreezes layers while its dynamic run moves them; saved about every 6 batches."""
    data = folder.parent / "tokens.npy"
    if not data.exists():
        np.save(data, np.random.default_rng(0).integers(32, size=3000))
    changes = {"scenario_settings": {"batches": [10, 30, 45], "frozen": [1, 2, 1]}, **changes}
    deepspeed = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "dynamic_pipeline": {"rebalance_every": 7, "min_gain": 0.0, "cost": "parameters"},
    }  # fmt: skip
    run = {"save_every": 6, "window": 3, "batches": batches, "num_stages": stages, "validate_every": 7}
    run |= changes.pop("run", {})
    return Settings(
        model=GPTConfig(depth=2, hidden=8, heads=1, seq_len=8, vocab_size=32), scenario="freezing", seed=5,
        data=DataSettings(path=str(data), validation=0.02),
        deepspeed=merge(load_deepspeed_json("fp32_adamw"), deepspeed),
        partition_method=[0, *range(5 - stages, 5)], run=RunSettings(**run), output_dir=folder,
        **changes,
    )  # fmt: skip


@dataclass(frozen=True)
class Stop:
    """A signal that one rank sends itself at some point."""

    rank: int
    number: int
    point: Point

    def send(self) -> None:
        """Send it."""
        signal.raise_signal(self.number)


def in_batch(call: int) -> Point:
    """Between backward and step, counted over both runs."""
    return Point("in a batch", "dynpipe_ds.host.hooks:Hooks._take_model_step", call=call)


def run_entry(rank: int, settings: Settings, stop: Stop | None = None) -> tuple[str, str]:
    """Run the entry on this rank; tell how it ended, and what was printed and warned about."""
    from scenarios.resume import InterruptedRunError
    from scenarios.train import run

    printed = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(printed))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        if stop is not None and stop.rank == rank:
            stack.enter_context(stop.point.arm(stop.send))
        try:
            run(settings)
            ended = "done"
        except (InterruptedRunError, RankLostError, ValueError) as error:
            ended = f"{type(error).__name__}: {error}"
    return ended, printed.getvalue() + "".join(str(warning.message) for warning in caught)


def finish(settings: Settings, ranks: int) -> tuple[dict[str, Any], str]:
    """Run to the end; return the results and what was printed. No checkpoint is left."""
    outcomes = run_ranks(run_entry, ranks, settings)
    assert {ended for ended, _ in outcomes} == {"done"}
    assert not (settings.output_dir / "checkpoints").exists()
    return json.loads((settings.output_dir / "results.json").read_text(encoding="utf-8")), outcomes[0][1]


def kill(settings: Settings, ranks: int, rank: int, point: Point) -> None:
    """Kill one rank; the others say so."""
    outcomes = run_ranks(run_entry, ranks, settings, Stop(rank, signal.SIGKILL, point), may_die={rank})
    assert outcomes[rank] is None
    for other, outcome in enumerate(outcomes):
        assert other == rank or f"rank {rank} ended" in outcome[0], outcome


def assert_same_losses(results: dict[str, Any], reference: dict[str, Any]) -> None:
    whole_validations = {found["after"]: found for found in reference["runs"][0]["validations"]}
    for run, whole in zip(results["runs"], reference["runs"], strict=True):
        assert run["losses"] == whole["losses"][: len(run["losses"])]
        assert run["reports"] == whole["reports"][: len(run["losses"])]
        assert len(run["batches_s"]) == len(run["losses"])
        found = [found["after"] for found in run["validations"]]
        assert found == sorted({*range(7, len(run["losses"]), 7), len(run["losses"])})
        for validation in run["validations"]:
            assert whole_validations.get(validation["after"], validation) == validation


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """Results of the job's first batches on two ranks, without checkpoints; each number of batches runs once."""

    def run(batches: int) -> dict[str, Any]:
        settings = settings_for(tmp_path_factory.mktemp("job") / "whole", batches=batches, run={"save_every": 0})
        results, printed = finish(settings, 2)
        assert "continuing" not in printed and "resumed" not in printed
        return results

    return Once(run)


@pytest.mark.exhaustive
def test_killed_twice_and_continued_on_more_ranks(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """Also the timing is honest: what was lost is not counted, nor the first window after a start."""
    draw, folder = random.Random(7), tmp_path / "out"
    for _ in range(2):
        kill(settings_for(folder), 2, draw.randrange(2), in_batch(draw.randrange(30, 55)))
    results, printed = finish(settings_for(folder, stages=3), 3)
    assert_same_losses(results, uninterrupted(BATCHES))
    static, dynamic = results["runs"]
    assert len(static["losses"]) == BATCHES and results["losses_equal_bits"]
    first, second = static["resumed_at"]
    assert 0 < first < second < BATCHES
    assert f"continuing an interrupted run after batch {second} of 60" in printed
    assert "resumed after batch" in (folder / "table.txt").read_text(encoding="utf-8")
    for run in (static, dynamic):
        assert run["tokens"] == 2 * 8 * (BATCHES - 2 - 3 - 3), "warm-up, and the first window after each start"
        assert run["resumed_at"] == [first, second] and run["seconds"] < sum(run["batches_s"]) * 1.5 + 1
    assert len(dynamic["boundaries"]) == 4 and dynamic["num_rebalances"] > 0


def test_asked_to_end(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """One rank is told; all end together after the turn, and nothing is lost."""
    settings = settings_for(tmp_path / "out", batches=14)
    stop = Stop(1, signal.SIGTERM, in_batch(6))  # in the second batch of the static run's first timed window
    for ended, _ in run_ranks(run_entry, 2, settings, stop):
        told = "InterruptedRunError: stopped after batch 2 (static) and batch 5 (dynamic); saved in"
        assert ended.startswith(told), ended
    results, printed = finish(settings, 2)
    assert "continuing an interrupted run after batch 2 (static) and batch 5 (dynamic) of 14" in printed
    assert_same_losses(results, uninterrupted(FEW))
    assert [run["resumed_at"] for run in results["runs"]] == [[2], [5]]


@pytest.mark.exhaustive
def test_killed_between_the_two_saves(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """The run that was saved goes back to the moment of the other one."""
    settings = settings_for(tmp_path / "out", batches=FEW)
    kill(settings, 2, 0, Point("between the saves", "scenarios.compare:Contender.save", after=True, call=3))
    folders = {label: sorted((tmp_path / f"out/checkpoints/{label}").iterdir()) for label in ("static", "dynamic")}
    assert [len(found) for found in folders.values()] == [2, 1]
    results, _ = finish(settings, 2)
    assert [run["resumed_at"] for run in results["runs"]] == [[8], [8]]
    assert_same_losses(results, uninterrupted(FEW))


@pytest.mark.exhaustive
def test_what_is_found_decides(tmp_path: Path) -> None:
    """An interrupted run of other settings is refused, unless it shall be discarded; a finished one is no obstacle."""
    settings = settings_for(tmp_path / "out", stages=1, batches=14)
    ended, _ = run_ranks(run_entry, 1, settings, Stop(0, signal.SIGTERM, in_batch(6)))[0]
    assert ended.startswith("InterruptedRunError")
    other = replace(settings, seed=6, scenario_settings={"batches": [10], "frozen": [1]}, run=RunSettings(batches=4))
    ended, _ = run_ranks(run_entry, 1, other)[0]
    for part in (
        "holds an interrupted run with other settings: scenario.batches was [10, 30, 45] and is [10]",
        "scenario.frozen was [1, 2, 1] and is [1]", "run.window was 3 and is 6", "seed was 5 and is 6",
        "5 batches are trained and run.batches is 4", "give the settings of then", "run.resume=false",
    ):  # fmt: skip
        assert part in ended, ended
    as_written_before(tmp_path / "out/checkpoints/job.json")
    longer = settings_for(tmp_path / "out", stages=1, batches=17, run={"save_every": 3})
    results, printed = finish(longer, 1)
    assert "continuing" in printed and len(results["runs"][0]["losses"]) == 17, "more batches are no other settings"
    again, printed = finish(longer, 1)
    assert "continuing" not in printed and again["runs"][0]["resumed_at"] == []
    assert_same_losses(again, results)


def as_written_before(file: Path) -> None:
    """Bring a job's file into the form it had when each setting of the data stood by itself."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    data = stored["settings"].pop("data")
    assert data["validation"] == 0.02
    stored["settings"] |= {f"data_{name}": value for name, value in data.items()}
    file.write_text(json.dumps(stored), encoding="utf-8")


def test_a_checkpoint_that_is_not_wanted_or_cannot_be_used(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out", stages=1, batches=8)
    stop = Stop(0, signal.SIGTERM, in_batch(6))
    assert run_ranks(run_entry, 1, settings, stop)[0][0].startswith("InterruptedRunError")
    (damaged,) = (tmp_path / "out/checkpoints/dynamic").glob("*/layer_01-model_states.pt")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    ended, _ = run_ranks(run_entry, 1, settings)[0]
    assert ended.startswith("ValueError") and damaged.name in ended and "run.resume=false" in ended
    (tmp_path / "out/checkpoints/job.json").write_text("{", encoding="utf-8")
    ended, _ = run_ranks(run_entry, 1, settings)[0]
    assert ended.startswith("ValueError") and "job.json can't be used" in ended and "run.resume=false" in ended
    results, printed = finish(replace(settings, run=replace(settings.run, resume=False)), 1)
    assert "continuing" not in printed and len(results["runs"][1]["losses"]) == 8


def test_a_save_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    """Nothing can be written where a file is in the way."""
    settings = settings_for(tmp_path / "out", stages=1, batches=10)
    settings.output_dir.mkdir()
    (settings.output_dir / "checkpoints").write_text("in the way", encoding="utf-8")
    ended, told = run_ranks(run_entry, 1, settings)[0]
    assert ended == "done" and "saving checkpoint" in told


# -- real processes ---------------------------------------------------------------------------


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the entry under the launcher, on two ranks."""
    return subprocess.Popen(
        launch_command(
            "scenario=pruning", "scenario.crossover=0.5", "run.batches=60", "run.save_every=6", "run.window=3",
            "ds.dynamic_pipeline.rebalance_every=5", "ds.dynamic_pipeline.min_gain=0", f"output_dir={folder}",
        ),
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def kill_a_rank(launcher: subprocess.Popen[str], draw: random.Random, saved: Path) -> str:
    """Wait until something new is saved and a moment longer, then kill one rank; return what was printed."""
    before, deadline_s = saved.read_text() if saved.exists() else "", time.monotonic() + 100
    while (saved.read_text() if saved.exists() else "") == before and time.monotonic() < deadline_s:
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 0.5))
    children = psutil.Process(launcher.pid).children(recursive=True)
    ranks = [child for child in children if child.cmdline()[1:4] == ["-u", "-m", "scenarios.train"]]
    assert len(ranks) == 2
    draw.choice(ranks).kill()
    printed, _ = launcher.communicate(timeout=100)
    assert launcher.returncode != 0
    return printed


@pytest.mark.slow
@pytest.mark.exhaustive
def test_killed_twice_under_the_launcher(tmp_path: Path) -> None:
    """The whole way, as a user goes it: start, lose a rank, start again, lose one again, start again."""
    results = {}
    for name in ("whole", "killed"):
        draw, folder, printed = random.Random(11), tmp_path / name, ""
        for _ in range(2 if name == "killed" else 0):
            printed = kill_a_rank(start(folder), draw, folder / "checkpoints" / "job.json")
        launcher = start(folder)
        last, _ = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, last
        assert ("continuing an interrupted run" in printed and "continuing" in last) == (name == "killed"), printed
        assert not (folder / "checkpoints").exists()
        results[name] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for whole, killed in zip(results["whole"]["runs"], results["killed"]["runs"], strict=True):
        assert len(killed["losses"]) == 60 and killed["losses"] == whole["losses"]
        assert len(killed["resumed_at"]) == 2 and whole["resumed_at"] == []
