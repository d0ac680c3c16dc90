"""What is written where, by readings of the machine that are made up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.overhead import every_batch, migration, planning, profiling, section
from scenarios import machine
from scenarios.machine import Counters, Reading

IDLE = Reading(cores=2, load=0.2, others=0.0, threads=2, kernel_s=0.005, scatter=0.02)
BUSY = Reading(cores=2, load=0.2, others=1.5, programs={"cc": 1.5}, threads=2, kernel_s=0.009, scatter=0.4)
WORDS = (
    "BUSY MACHINE: others use 1.5 of 2 processors (cc 1.5); a fixed computation scatters by 40%. "
    "Times are not those of an idle machine."
)


@pytest.fixture(autouse=True)
def _not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(record.FORCE, raising=False)


def results(reading: Reading, **values: Any) -> dict[str, Any]:
    return {"environment": record.environment(reading=reading), **values}


def test_large_results_are_compressed_and_read_back(tmp_path: Path) -> None:
    small, large = {"a": 1}, {"a": list(range(20_000))}
    assert record.write_json(tmp_path / "x.json", small).name == "x.json" and record.load(tmp_path, "x") == small
    packed = record.write_json(tmp_path / "x.json", large)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json.gz"] and record.load(tmp_path, "x") == large
    first = packed.read_bytes()
    assert record.write_json(tmp_path / "x.json", large).read_bytes() == first and len(first) < record.LARGEST_JSON
    record.write_json(tmp_path / "x.json", small)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"] and record.load(tmp_path, "x") == small


def test_a_busy_machine_is_told_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    record.environment(reading=BUSY)
    assert capsys.readouterr().out == f"{WORDS}\n\n"
    record.environment(reading=IDLE)
    assert not capsys.readouterr().out


def test_results_of_an_idle_machine_are_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = record.save(tmp_path, "a", results(IDLE, seconds=1.0), "one second")
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(kept) == {"a.json", "a.md"} and idle == tmp_path / "a"
    capsys.readouterr()
    beside = record.save(tmp_path, "a", results(BUSY, seconds=2.0), "two seconds")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "a.md", "a.busy.json", "a.busy.md"}
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    text = (tmp_path / "a.busy.md").read_text(encoding="utf-8")
    assert text.startswith(f"{WORDS}\n\nWritten as a.busy.*, beside the results of an idle machine") and "two" in text
    assert text in capsys.readouterr().out
    assert json.loads((tmp_path / "a.busy.json").read_text())["environment"]["machine"]["others"] == 1.5
    assert record.load(tmp_path, "a") == json.loads(kept["a.json"]), "what the README is made of"
    assert record.save_figure(record.new_figure(1, 1), beside) == tmp_path / "a.busy.png"
    assert record.save_figure(record.new_figure(1, 1), idle) == tmp_path / "a.png"


def test_it_can_be_forced_and_is_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(record.FORCE, "")  # so that it is taken back
    parser = argparse.ArgumentParser()
    record.add_force(parser)
    record.force(parser.parse_args([]))
    assert record.stem("a", results(BUSY)["environment"]) == "a.busy"
    record.force(parser.parse_args(["--force"]))
    record.save(tmp_path, "a", results(BUSY), "two seconds")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "a.md"}
    assert (tmp_path / "a.md").read_text(encoding="utf-8").startswith(f"{WORDS}\n\ntwo seconds")


def test_a_machine_that_gets_busy_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was idle when the benchmark looked; while it ran, a compiler took a processor. Its own load does not count."""
    values = results(IDLE)
    values["environment"]["began"] = began = Counters(0.0, 0.0, 0.0, {}, None)
    later = Reading(cores=2, load=9.0, others=0.9, programs={"cc": 0.9})
    monkeypatch.setattr(machine, "since", lambda before: later if before is began else IDLE)
    assert record.save(tmp_path, "a", values, "text").name == "a.busy"
    text = (tmp_path / "a.busy.md").read_text(encoding="utf-8")
    assert text.startswith("BUSY MACHINE: while it ran, others use 0.9 of 2 processors (cc 0.9). Times")
    kept = json.loads((tmp_path / "a.busy.json").read_text())["environment"]
    assert kept["machine"]["others_meanwhile"] == 0.9 and "began" not in kept
    monkeypatch.setattr(machine, "since", lambda _: Reading(cores=2, load=9.0, others=0.1))
    assert record.save(tmp_path, "b", values, "text").name == "b"


def test_the_figure_of_an_idle_machine_is_kept_and_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machines.json"
    asked: list[tuple[int, float | None]] = []
    monkeypatch.setattr(machine, "look", lambda *asks: asked.append(asks) or Reading(**{**vars(IDLE), "cores": 8}))
    monkeypatch.setattr(machine, "count", lambda: Counters(0.0, 0.0, 0.0, {}, None))
    monkeypatch.setattr(record.os, "cpu_count", lambda: 8)
    about = record.environment(machines=file)
    record.remember({**about, "machine": machine.as_values(BUSY)}, file)
    assert not file.exists(), "a busy machine's figure is none"
    record.remember(about, file)
    slower = {**about, "machine": {**about["machine"], "kernel_s": 0.0052}}
    record.remember(slower, file)
    record.environment(machines=file)
    record.environment(threads=1, machines=file)
    assert asked == [(2, None), (2, 0.005), (1, None)], "by the threads that compute, and the first one stays"
    (name,) = json.loads(file.read_text(encoding="utf-8"))
    assert name.endswith("2 threads") and about["cpu"] in name


def test_an_idle_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, slept = tmp_path / "machines.json", list[float]()
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(machine, "count", lambda: Counters(0.0, 0.0, 0.0, {}, None))

    def reasons_of(readings: list[Reading], looks: int = record.LOOKS) -> list[str]:
        slept.clear()
        monkeypatch.setattr(machine, "look", lambda *_: readings.pop(0))
        return record.reasons(record.environment(machines=file, looks=looks))

    assert not reasons_of([BUSY, BUSY, IDLE, BUSY]) and slept == [record.PAUSE_S] * 2
    assert reasons_of([BUSY] * record.LOOKS) and len(slept) == record.LOOKS - 1, "the last look counts"
    assert reasons_of([BUSY, IDLE], looks=1) and not slept
    monkeypatch.setenv(record.FORCE, "1")
    assert reasons_of([BUSY, IDLE]) and not slept, "who forces results does not wait"


def test_of_older_results_the_load_is_known() -> None:
    kept = {"cores": 2, "load": 40.4}
    assert record.reasons(kept) == ["the load is 40.4 on 2 processors"] and record.head(kept)
    assert not record.reasons({"cores": 2, "load": 1.6}) and not record.reasons({"cores": 2, "load": None})


def test_every_overhead_is_written_beside(tmp_path: Path) -> None:
    """With its pictures, and with intervals where there are ratios of pairs."""
    times = [1.0, 1.1, 0.9, 1.05, 0.95, 1.2, 1.0]
    spent = {"profiling": 0.01, "planning": 0.01, "migrating": 0.0}
    kinds = {name: times for name in (section.PLAIN, *section.SECTIONS)}
    rows: dict[Any, list[dict[str, Any]]] = {
        migration: [{"optimizer": "AdamW", "cross_memory": True, "layer_bytes": 10**7, "bytes_moved": 3 * 10**7,
                     "move_s": times, "plain_s": times, "new_s": times}],
        section: [{"model": "1x2x3", "wall_s": kinds, "cpu_s": kinds, "num_profiles": dict.fromkeys(kinds, 7),
                   "spent_s": dict.fromkeys(kinds, [0.01, 0.01])}],
        every_batch: [{"scenario": "moe", "always": False, "batches_s": times, "layer_s": 0.02, "overhead_s": spent,
                       "moves": 0, "moved_bytes": []}],
        planning: [{"layers": 4, "stages": 2, "seconds": dict.fromkeys(
            [*planning.PLANNERS, planning.SIMULATED, planning.BALANCED], 0.001)}],
    }  # fmt: skip
    for part, found in rows.items():
        part.report(results(BUSY, rows=found), tmp_path)
    own = {"with_s": times, "without_s": times, "accounted_s": 0.01, "layer_s": 0.02}
    profiling.report(results(BUSY, **own), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{part.NAME}.busy.{ending}" for part in (*rows, profiling) for ending in ("json", "md", "png")
    }
    moves = (tmp_path / "migration.busy.md").read_text(encoding="utf-8")
    assert "| 100% (100% to 100%) | 100% (100% to 100%) |" in moves
    for name in ("section", "profiling"):
        assert "+0.0% (+0.0% to +0.0%)" in (tmp_path / f"{name}.busy.md").read_text(encoding="utf-8")


def test_no_run_of_another_version_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def folder(version: str) -> Path:
        monkeypatch.setattr(record, "commit", lambda: version)
        found = record.finished_runs("paper")
        found.mkdir(parents=True, exist_ok=True)
        return found

    first = folder("0dae64412527")
    (first / "runs.jsonl").write_text("{}")
    assert not list(folder("b8b3ae88336b").iterdir()), "another commit has its own"
    assert folder("0dae64412527") == first and list(first.iterdir()), "an interrupted command goes on"
    for unknown in ("0dae64412527+", "unknown"):
        (folder(unknown) / "runs.jsonl").write_text("{}")
        assert not list(folder(unknown).iterdir()), "nobody knows of which version they are"
