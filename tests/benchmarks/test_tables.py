"""The paper's tables, from simulated runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import experiments, published, tables
from benchmarks.paper.report import Report
from benchmarks.replay.case import Case, Result
from benchmarks.replay.predict import predict

SIZE = replace(experiments.QUICK, pipelines=((2, 24),), scenarios=("freezing",), batches=8)


@pytest.fixture(scope="module")
def runs() -> list[Result]:
    return [predict(case) for case in experiments.throughput(SIZE)]


def _report(folder: Path, name: str) -> Report:
    return Report(name, folder, "simulation", quick=True, title="A title")


def test_the_throughput_table_says_what_it_is_and_compares_with_the_best_static(
    tmp_path: Path, runs: list[Result]
) -> None:
    tables.throughput(_report(tmp_path, "throughput"), runs)
    text = (tmp_path / "throughput_quick.md").read_text()
    assert "SIMULATION: nothing ran" in text and "DeepSpeed" in text and "commit" in text
    assert "1.36x over Egeria" in text and "Quick run" in text
    (row,) = json.loads((tmp_path / "throughput_quick.json").read_text())["values"]
    by_label = {run.case.method: run.throughput for run in runs}
    static = max(by_label["static uniform"], by_label["static parameters"])
    assert row["speedups"]["optimal:time"] == pytest.approx(by_label["optimal:time"] / static) and static > 0
    assert row["speedups"]["optimal:time"] > 1.05
    assert 0.8 < row["reached"] <= 1.0
    assert (tmp_path / "throughput_quick.png").read_bytes()[:4] == b"\x89PNG"


def test_the_papers_idleness_stands_beside_ours(tmp_path: Path, runs: list[Result]) -> None:
    tables.bubbles(_report(tmp_path, "bubbles"), runs)
    row = (tmp_path / "bubbles_quick.md").read_text().split("| freezing |")[1].split("\n")[0]
    assert row.rstrip(" |").endswith(published.idleness("freezing"))


def test_overheads_stand_beside_the_papers_of_the_same_depth(tmp_path: Path, runs: list[Result]) -> None:
    tables.overhead(_report(tmp_path, "overhead"), runs)
    text = (tmp_path / "overhead_quick.md").read_text()
    assert "| <0.1% |" in text and "n/a" not in text
    assert "pruning 2300 to 4400, freezing 300" in text


def test_conditions_are_compared_with_the_undisturbed_run(tmp_path: Path) -> None:
    results = [predict(case) for case in experiments.workers(SIZE)]
    tables.conditions(_report(tmp_path, "workers"), results, plain="equal workers")
    equal, slow = json.loads((tmp_path / "workers_quick.json").read_text())["values"]
    assert equal["kept"] == {"static uniform": 1.0, "optimal:time": 1.0}
    assert slow["kept"]["static uniform"] < 0.75 < slow["kept"]["optimal:time"]
    first, second, *others = np.diff(slow["partitions"]["optimal:time"])
    assert second < min(first, *others), "the second stage is slow and should hold fewer layers"


def test_finished_runs_are_not_made_again(tmp_path: Path) -> None:
    cases = [Case(f"model:{name}:8", "static uniform", 2, 4, 4, replicas=n) for name, n in (("dense", 1), ("moe", 2))]
    first = experiments.simulate_all(cases[:1], tmp_path / "raw.jsonl")
    both = experiments.simulate_all(cases, tmp_path / "raw.jsonl")
    assert both[0] == first[0] and [run.case for run in both] == cases
    assert len((tmp_path / "raw.jsonl").read_text().splitlines()) == 2


def test_intervals_follow_the_scenario() -> None:
    size = replace(experiments.FULL, batches=100)
    cases = {name: experiments.case(f"model:{name}:24", "optimal:time", 2, size) for name in experiments.SCENARIOS}
    every = {name: case.every for name, case in cases.items()}
    assert every == {"pruning": 23, "freezing": 3, "early_exit": 1, "moe": 1, "mod": 1, "sparse_attention": 1}


def test_the_full_set_has_the_papers_pipelines() -> None:
    cases = experiments.throughput(experiments.FULL)
    assert {case.num_stages for case in cases} == {4, 8, 16, 24}
    assert {case.trace for case in cases if case.num_stages == 16} == {"model:moe_cost:32"}
    assert {case.num_micro_batches // case.num_stages for case in cases} == {4}
    assert experiments.scenario_of("model:early_exit_cost:24") == "early_exit"
    assert {"partition:time", "contiguous diffusion:time", "balanced:time"} <= {case.method for case in cases}


@pytest.mark.parametrize(("reasons", "name"), [([], "simulator_quick"), (["a neighbour"], "simulator_quick.busy")])
def test_what_sleeps_on_a_busy_machine_is_written_beside(tmp_path: Path, reasons: list[str], name: str) -> None:
    report = _report(tmp_path, "simulator")
    report.machine = {"machine": {"reasons": reasons}, "cores": 2}
    report.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json", f"{name}.md"]
    assert (tmp_path / f"{name}.md").read_text().startswith("BUSY MACHINE: a neighbour") == bool(reasons)
