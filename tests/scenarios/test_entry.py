"""The shared entry: mistakes said once with the choices, ranks started, sweeps gathered into one table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from scenarios import entry, sweep
from scenarios.launch import LaunchSettings, launch_command
from scenarios.opening import TOLD
from scenarios.settings import Settings, config_folder
from tests.scenarios.test_opening import interrupted

ROOT = Path(__file__).parents[2]
Result = tuple[int, list[Settings], list[tuple[str, list[str], LaunchSettings]]]


class Entry:
    """Runs the entry in this process, with a launcher that only notes what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[Settings] = []
        self.launched: list[list[str]] = []
        self.settings: list[LaunchSettings] = []
        self.exit_codes = [0]
        self.patch = monkeypatch
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        monkeypatch.setattr(entry, "_GRACE_S", 0.0)
        for module in (entry, sweep):
            monkeypatch.setattr(module, "launch", self._launch)
        for name in ("RANK", "OMPI_COMM_WORLD_RANK", "WORLD_SIZE", TOLD):
            monkeypatch.delenv(name, raising=False)

    def _launch(
        self, module: str, overrides: Sequence[str], settings: LaunchSettings, *, told: str = ""
    ) -> int:
        print(told)
        assert module == "scenarios.train"
        self.launched.append(list(overrides))
        self.settings.append(settings)
        code = self.exit_codes[(len(self.launched) - 1) % len(self.exit_codes)]
        folder = next((Path(one.partition("=")[2]) for one in overrides if one.startswith("output_dir=")), None)
        if folder is not None and not code:
            write_results(folder, speed=100 * len(self.launched))
        return code

    def __call__(self, *words: str, rank: int | None = None, sweeps: bool = True) -> int:
        if rank is not None:
            self.patch.setenv("RANK", str(rank))
        self.patch.setattr(sys, "argv", ["train.py", *words])
        with pytest.raises(SystemExit) as ended:
            entry.start(self.jobs.append, "scenarios.train", sweeps=sweeps, resumes=True)
        assert isinstance(ended.value.code, int)
        return ended.value.code


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Entry:
    return Entry(monkeypatch)


def write_results(folder: Path, *, speed: float) -> None:
    def run(factor: float) -> dict[str, Any]:
        return {
            "tokens_per_s": factor * speed, "bubble_ratio": 0.25, "stages_s": [[0.0, 0.0], [3.0, 1.0], [3.0, 1.0]],
            "num_rebalances": 2, "final_loss": 2.5,
        }  # fmt: skip

    folder.mkdir(parents=True, exist_ok=True)
    moved = speed != 200
    values = {
        "runs": [run(1), run(1.5)], "same_partition": not moved, "speedup": 1.5 if moved else None,
        "speedup_interval": [1.44, 1.56] if moved else None, "losses_equal_bits": True,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(values), encoding="utf-8")


def test_wrong_overrides_are_told_together_with_the_choices(start: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "run.batchs=3", "scenario=freesing", "partition=best", "ds.dynamic_pipeline.min_gains=0", "model.depth=3",
        "scenaro=none", "ds.zero_optimization.stage=1", "experiment=none",
    )  # fmt: skip
    assert start(*words) == 2
    told = capsys.readouterr().err
    assert told.count("error: ") == 1 and told.count("\n") == 1
    for part in (
        "run.batchs=3: run has no 'batchs': did you mean 'batches'? choose one of batches, window, ",
        "scenario=freesing: did you mean 'freezing'? choose one of early_exit, ",
        "partition=best: choose one of balanced, diffusion, optimal, parameters, simulated, uniform",
        "ds.dynamic_pipeline.min_gains=0: ds.dynamic_pipeline has no 'min_gains': did you mean 'min_gain'? choose",
        "scenaro=none: the configuration has no 'scenaro': did you mean 'scenario'? choose one of",
        "ds has no 'zero_optimization': choose one of", "another key of DeepSpeed's JSON takes a + before it",
        "experiment=none: choose one of bf16_zero1, ",
    ):  # fmt: skip
        assert part in told
    assert "model.depth=3" not in told and not start.launched


@pytest.mark.parametrize(("words", "message"), [
    (["model.depth=["], "'model.depth=[' can't be read: "),
    (["+scenario=moe"], "+scenario=moe: "),
    (["data=text"], "data.path is missing: give data.path=…"),
    (["run.batches=few"], "run.batches='few' must be a whole number"),
    (["scenario=moe", "scenario.routing=random"], "scenario.routing='random' must be one of token_choice, "),
    (["launch.num_accelerators=0", "launch.hostfile=nowhere"], "launch.num_accelerators=0 must be at least 1; launch"),
    (["--multirun", "partition=uniform,best"], "partition=best: choose one of balanced"),
    (["--multirun", "run.batches=3,4", "output_dir=here"], "give hydra.sweep.dir=…"),
])  # fmt: skip
def test_mistakes_end_in_one_line(
    start: Entry, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert start(*words) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1 and not start.launched


def test_what_is_started_is_said_first(start: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before ranks are started, or by the first of those that a launcher has started; only once."""
    assert start(f"output_dir={tmp_path}", "model=gpt_tiny", "launch.num_accelerators=4") == 0
    told = capsys.readouterr().out
    assert told.startswith("ranks:  4 (4 pipeline stages)\nmodel:  GPT, 6 blocks") and f"output: {tmp_path}\n" in told
    assert len(start.launched) == 1
    start(f"output_dir={tmp_path}", "model=gpt_tiny", rank=0)
    assert capsys.readouterr().out.startswith("ranks:  1 (1 pipeline stages)\n")
    start(f"output_dir={tmp_path}", "model=gpt_tiny", rank=1)
    assert capsys.readouterr().out == ""


def test_other_settings_than_the_interrupted_run_had_start_no_rank(
    start: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"output_dir={tmp_path / 'out'}", "model=gpt_tiny", "run.batches=20")
    start(*words, rank=0)
    interrupted(start.jobs[0], num_ranks=2)
    start.patch.delenv("RANK")
    assert start(*words, "run.batches=30") == 0 and len(start.launched) == 1
    assert "continues the run that was interrupted there after batch 6" in capsys.readouterr().out
    assert start(*words, "seed=7") == 2 and len(start.launched) == 1
    err = capsys.readouterr().err
    assert "holds an interrupted run with other settings: seed was 1234 and is 7. To continue it" in err
    assert start(*words, "seed=7", "run.resume=false") == 0 and len(start.launched) == 2


def test_an_export_that_is_in_the_way_starts_no_rank(
    start: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").touch()
    assert start("model=gpt_tiny", f"run.export={tmp_path / 'kept'}") == 2 and not start.launched
    assert "kept exists and is not an empty folder: give another name, or remove it" in capsys.readouterr().err


def test_help_has_examples() -> None:
    """Every one composes; what it lists are the choices that there are."""
    done = subprocess.run(
        [sys.executable, "-m", "scenarios.train", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not done.stderr and "scenario: early_exit, " in done.stdout and "experiment: " in done.stdout
    examples = re.findall(r"^ +python -m scenarios\.train(.*?)(?:   .*)?$", done.stdout, re.MULTILINE)
    assert len(examples) >= 5
    with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
        for example in examples:
            words = [word for word in example.split() if "=" in word]
            compose("config", overrides=[re.sub(r"=(\w+),.*", r"=\1", word) for word in words])


def test_a_mistake_is_told_by_the_first_rank(start: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    """Another one speaks only if nobody has ended it meanwhile: then it is the only one with this error."""
    assert start("run.batches=0", rank=0) == 2
    assert capsys.readouterr().err.startswith("error: run.batches=0 must be at least 1")
    assert start("run.batches=0", rank=1) == 2
    assert capsys.readouterr().err.startswith("error: rank 1: run.batches=0 must be at least 1")
    assert start("run.batches=3,4", "--multirun", rank=0) == 2
    told = capsys.readouterr().err
    assert "a sweep starts the ranks of each job itself: python -m scenarios.train --multirun run.batches=3,4" in told
    assert not start.jobs and not start.launched


def test_a_rank_runs_the_job_and_any_other_process_starts_ranks(start: Entry) -> None:
    assert start("model=gpt_tiny", "launch.num_accelerators=3") == 0
    assert start.launched == [["model=gpt_tiny", "launch.num_accelerators=3"]] and not start.jobs
    assert start.settings == [LaunchSettings(num_accelerators=3)]
    start.exit_codes = [7]
    assert start("model=gpt_tiny") == 7
    assert start("model=gpt_tiny", rank=1) == 0
    assert len(start.launched) == 2 and [job.model.depth for job in start.jobs] == [6]


def test_launch_command(tmp_path: Path) -> None:
    command = launch_command("scenarios.train", ["run.batches=3"], LaunchSettings(num_accelerators=4), 29617)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert " --num_accelerators 4 --master_port 29617 " in " ".join(command) and "--quiet" in command
    assert command[-3:] == ["--module", "scenarios.train", "run.batches=3"]
    (tmp_path / "hosts").write_text("worker-1 slots=4\n", encoding="utf-8")
    command = launch_command("scenarios.train", [], LaunchSettings(hostfile=str(tmp_path / "hosts")), 29617)
    assert f"--hostfile {tmp_path / 'hosts'} --module" in " ".join(command) and "--master_port" not in command


def test_a_sweep_makes_one_table(start: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=gpt_tiny", "--multirun", "partition=uniform,optimal", "seed=1,2", f"hydra.sweep.dir={tmp_path}")
    assert start(*words) == 0
    assert [job[1:] for job in start.launched] == [
        [f"partition={partition}", f"seed={seed}", f"output_dir={tmp_path / str(number)}"]
        for number, (partition, seed) in enumerate(
            [("uniform", 1), ("uniform", 2), ("optimal", 1), ("optimal", 2)]
        )
    ]
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]
    assert rows[2] == [
        "partition=uniform seed=1", "100", "150", "1.50x (1.44 to 1.56)", "25.0%", "25.0%", "1.50", "1.50", "2",
        "2.500000", "equal",
    ]
    assert rows[3][:4] == ["partition=uniform seed=2", "200", "300", "same partition: the difference is noise"]
    assert [row[0] for row in rows[3:]] == [
        "partition=uniform seed=2", "partition=optimal seed=1", "partition=optimal seed=2"
    ]
    assert len({line.count("|") for line in text.splitlines()}) == len({len(line) for line in text.splitlines()}) == 1
    values = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert [job["tokens_per_s"]["dynamic"] for job in values] == [150, 300, 450, 600]
    assert values[0]["slowest_to_mean_stage"] == {"static": 1.5, "dynamic": 1.5}


def test_a_failed_job_is_named_and_the_others_go_on(
    start: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "1", speed=1)  # of an earlier sweep: not this job's
    start.exit_codes = [0, 3]
    assert start("--multirun", "run.batches=3,4,0", f"hydra.sweep.dir={tmp_path}") == 1
    told = capsys.readouterr()
    assert "run.batches=0 must be at least 1" in told.err and told.err.endswith("error: job 1, 2 failed\n")
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    assert "failed (3)" in text and "failed (2)" in text and "run.batches=3 |" in text
    assert [job["exit_code"] for job in json.loads((tmp_path / "sweep.json").read_text())] == [0, 3, 2]


def test_a_sweep_that_is_asked_to_end_starts_no_more(start: Entry, tmp_path: Path) -> None:
    start.exit_codes = [0, 143]
    assert start("--multirun", "seed=1,2,3", f"hydra.sweep.dir={tmp_path}") == 1
    assert len(start.launched) == 2


def test_only_training_is_swept(start: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--multirun", "seed=1,2", sweeps=False) == 2
    assert "--multirun is for scenarios.train" in capsys.readouterr().err


def run_entry(*words: str) -> subprocess.CompletedProcess[str]:
    """Start the entry by hand, as a newcomer does."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "DS_ACCELERATOR")}
    return subprocess.run(
        [sys.executable, "-m", "scenarios.train", *words], cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_real_sweep_prints_nothing_of_deepspeeds(tmp_path: Path) -> None:
    done = run_entry(
        "--multirun", "model=gpt_tiny", "model.depth=4", "run.batches=8", "run.window=2", "scenario.batches=[2,4]",
        "partition=uniform,optimal", "partition_method=[0,1,6]", f"hydra.sweep.dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert [job["overrides"][-2] for job in jobs] == ["partition=uniform", "partition=optimal"]
    assert all(job["losses_equal_bits"] and (job["same_partition"] or job["speedup"] > 0) for job in jobs)
    assert jobs[0]["final_loss"] == jobs[1]["final_loss"], "the cut does not change it"
    dynamic = json.loads((tmp_path / "0" / "results.json").read_text(encoding="utf-8"))["runs"][1]
    assert dynamic["boundaries"] == [0, 3, 6] and dynamic["num_rebalances"] == 0
    assert "partition=optimal |" in done.stdout
    for noise in ("[INFO]", "[WARNING]", "launch.py", "runner.py", "Warning"):
        assert noise not in done.stdout + done.stderr
