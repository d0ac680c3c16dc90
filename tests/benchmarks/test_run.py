"""The runner, what it keeps, and the table of docs/results.md."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme, record
from benchmarks.overhead import every_batch, migration
from benchmarks.run import EXPERIMENTS, Experiment, keep, run
from benchmarks.scenarios.contenders import UNIFORM
from scenarios import machine
from scenarios.machine import Reading
from tests.benchmarks.test_record import BUSY, IDLE
from tests.benchmarks.test_scenarios import OURS_CUTS, example


def test_every_command_can_be_started() -> None:
    assert len({e.name for e in EXPERIMENTS}) == len(EXPERIMENTS)
    for experiment in EXPERIMENTS:
        assert experiment.command(full=True), experiment.name
        for full in (False, True):
            for module in experiment.command(full=full)[2:3]:
                assert importlib.util.find_spec(module) is not None, module


def test_full_is_quick_unless_it_says_otherwise() -> None:
    assert Experiment("a", "m --x").command(full=True)[1:] == ["-m", "m", "--x"]
    assert Experiment("a", "m --x", "m").command(full=True)[1:] == ["-m", "m"]
    assert Experiment("a", "", "m").command(full=False) == []


def test_output_is_kept_and_failures_are_told(tmp_path: Path) -> None:
    printing = Experiment("printing", "json.tool --help", writes=False)
    done = run(printing, printing.command(full=False), tmp_path, IDLE)
    failing = Experiment("failing", "json.tool /nowhere.json", writes=False)
    failed = run(failing, failing.command(full=False), tmp_path)
    keep([done, failed], tmp_path)
    assert done["exit_code"] == 0 and "usage" in (tmp_path / "printing" / "output.md").read_text()
    assert failed["exit_code"] != 0 and not (tmp_path / "failing").exists()
    assert not done["busy"] and list(json.loads((tmp_path / "machines.json").read_text()).values()) == [IDLE.kernel_s]


@pytest.mark.parametrize("told_by", ["the runner", "the benchmark"])
def test_output_of_a_busy_machine_is_kept_beside(tmp_path: Path, told_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever of both found it busy; said at the top once, and an earlier output stays."""
    monkeypatch.delenv(record.FORCE)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "output.md").write_text("of an idle machine", encoding="utf-8")
    line = machine.busy_words(["others use 1.5 of 2 processors"])[0]
    words = "hello" if told_by == "the runner" else line
    command = [sys.executable, "-c", f"print({words!r})"]
    printing = Experiment("some", "x", writes=False)
    reading = BUSY if told_by == "the runner" else IDLE
    assert run(printing, command, tmp_path, reading)["busy"]
    text = (tmp_path / "some" / "output.busy.md").read_text(encoding="utf-8")
    assert text.startswith("BUSY MACHINE: others use 1.5") and text.count("BUSY") == 1
    assert (tmp_path / "some" / "output.md").read_text(encoding="utf-8") == "of an idle machine"
    monkeypatch.setenv(record.FORCE, "1")
    assert not run(printing, command, tmp_path, reading)["busy"]
    assert (tmp_path / "some" / "output.md").read_text(encoding="utf-8").startswith("BUSY MACHINE: others")
    writing = Experiment("some", "x")
    monkeypatch.delenv(record.FORCE)
    assert run(writing, command, tmp_path, reading)["busy"] == (told_by == "the benchmark"), "it has judged itself"


def test_earlier_runs_are_remembered(tmp_path: Path) -> None:
    environment = {"commit": "abc", "date": "2026-01-01", "load": 0.1, "cores": 2}
    first, second = (
        {"name": e.name, "command": "x", "seconds": 60.0, "exit_code": 0, "environment": environment, "busy": False}
        for e in EXPERIMENTS[:2]
    )
    keep([first, second], tmp_path)
    keep([{**second, "exit_code": 3}], tmp_path)
    kept = json.loads((tmp_path / "runs.json").read_text())
    assert [(r["name"], r["exit_code"]) for r in kept] == [(first["name"], 0), (second["name"], 3)]
    assert "failed (3)" in (tmp_path / "README.md").read_text()
    keep([{**second, "exit_code": 0, "busy": True}], tmp_path)
    assert json.loads((tmp_path / "runs.json").read_text()) == kept, "what is kept is not what a busy machine ran"
    keep([{**first, "environment": {**environment, "load": 40.4}}], tmp_path)
    assert "yes, on a busy machine | abc" in (tmp_path / "README.md").read_text()


def test_insert() -> None:
    part = readme.PARTS[0]
    begin, end = part.markers
    once = part.insert(f"a\n{begin}\nold\n{end}\nb", "new")
    assert once == f"a\n{begin}\nnew\n{end}\nb"
    assert part.insert(once, "new") == once
    with pytest.raises(ValueError, match="docs/results.md needs .*: the table goes between them"):
        part.insert(f"{end} {begin}", "new")


@pytest.mark.parametrize("part", readme.PARTS, ids=lambda part: part.name)
def test_a_page_with_results_is_up_to_date(part: readme.Part) -> None:
    page = part.page.read_text(encoding="utf-8")
    assert page == part.insert(page, part.text(record.RESULTS)), "run python -m benchmarks.readme"


@pytest.mark.parametrize("part", readme.PARTS, ids=lambda part: part.name)
def test_without_results_nothing_is_claimed(part: readme.Part, tmp_path: Path) -> None:
    assert part.text(tmp_path).startswith("Not measured yet: `")


def moved(move_s: list[float], plain_s: list[float], *, cross_memory: bool = True) -> dict[str, Any]:
    return {
        "optimizer": "AdamW", "cross_memory": cross_memory, "hidden": 512, "layer_bytes": 12 * 10**6,
        "bytes_moved": 36 * 10**6, "move_s": move_s, "plain_s": plain_s,
        "new_s": [1.25 * seconds for seconds in plain_s],
    }


def test_rate_of_a_move_is_of_pairs() -> None:
    row = moved([2.0, 1.0, 40.0], [1.0, 1.0, 30.0])
    assert migration.rate(row).value == 0.75 and migration.rate(row, "new_s").value == 0.9375


def test_share_at_20_ms_a_layer() -> None:
    overhead_s = {"profiling": 0.1, "planning": 0.1, "migrating": 0.0}
    row = {"overhead_s": overhead_s, "batches_s": [1.0, 1.0], "layer_s": 0.01}
    assert every_batch.share(row) == pytest.approx(0.1)
    assert every_batch.share_at_goal(row) == pytest.approx(0.2 / 3.8)


def test_overheads_are_written_and_read_by_the_page_of_results(tmp_path: Path) -> None:
    environment = record.environment(reading=IDLE)
    folder = tmp_path / "overhead"
    rows = [moved([0.05], [0.04]), moved([0.08], [0.04], cross_memory=False)]
    migration.report({"environment": environment, "rows": rows}, folder)
    table = (folder / "migration.md").read_text(encoding="utf-8")
    assert "| AdamW | read | 12.0 | 36.0 | 50.0 (50.0) |" in table and "| AdamW | sent | 12.0 | 36.0 | 80.0" in table
    overhead_s = {"profiling": 0.01, "planning": 0.01, "migrating": 0.0}
    row = {"scenario": "moe", "always": False, "batches_s": [1.0], "layer_s": 0.02, "overhead_s": overhead_s}
    every_batch.report({"environment": environment, "rows": [{**row, "moves": 0, "moved_bytes": []}]}, folder)
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{ending}" for name in ("migration", "every_batch") for ending in ("json", "md", "png")
    }
    text = readme.performance(tmp_path)
    assert "AdamW 50 ms for 36 MB (80%)" in text and "80 ms" not in text and "moe 2.0%" in text


def test_the_table_of_results_has_intervals_and_tells_what_has_none(tmp_path: Path) -> None:
    """From windows, three and more; none where the best static run had the same partition, and of replays."""
    values = example()
    slow = {**values, "runs": {**values["runs"], UNIFORM: {**values["runs"][UNIFORM], "boundaries": OURS_CUTS}}}
    about = {**record.environment(reading=IDLE), "load": 0.1}
    scenarios = {"environment": about, "scenarios": {"moved": values, "stayed": slow}}
    row = {"scenario": "mod", "stages": 2, "speedups": {}, "reached": 0.9}
    for name, found in (("scenarios/scenarios", scenarios), ("paper/throughput", {"values": [row]})):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir()
        path.write_text(json.dumps(found), encoding="utf-8")
    text = readme.performance(tmp_path)
    moved, stayed = (line for line in text.splitlines() if line.startswith(("| `moved`", "| `stayed`")))
    assert "1.45x (no interval)" in moved and "1.14x (0.00 to 2.53)" in moved
    assert stayed.count("same partition: the difference is noise") == 2
    assert "Two runs give the same cells" in text and "BUSY" not in text
    assert sum(line.startswith("| ---") for line in text.splitlines()) == 1, "one table of results"
    about.pop("machine")
    about["load"] = 40.4
    (tmp_path / "scenarios" / "scenarios.json").write_text(json.dumps(scenarios), encoding="utf-8")
    assert readme.performance(tmp_path).startswith("BUSY MACHINE: the load is 40.4 on ")


def test_a_machine_that_becomes_busy_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a benchmark that only prints; once, and nothing that it has told at its start."""
    monkeypatch.setattr(machine, "since", lambda _: Reading(cores=2, others=0.9, programs={"cc": 0.9}))
    for before in (IDLE, BUSY):
        about = {**record.environment(reading=before), "began": machine.count()}
        assert record.ending(about) == machine.busy_words(["while it ran, others use 0.9 of 2 processors (cc 0.9)"])
    monkeypatch.setattr(machine, "since", lambda _: Reading(cores=2, others=0.1))
    assert record.ending(about) == []
