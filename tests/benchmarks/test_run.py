"""The runner, what it keeps, and the README's table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ranks, readme, record
from benchmarks.overhead import every_batch, migration
from benchmarks.overhead.main import PARTS
from benchmarks.run import EXPERIMENTS, Experiment, keep, run


def test_every_command_can_be_started() -> None:
    assert len({e.name for e in EXPERIMENTS}) == len(EXPERIMENTS)
    for experiment in EXPERIMENTS:
        assert experiment.command(full=True), experiment.name
        for full in (False, True):
            for module in experiment.command(full=full)[2:3]:
                assert importlib.util.find_spec(module) is not None, module
    assert all(importlib.util.find_spec(f"benchmarks.overhead.{part}") for part in PARTS)


def test_full_is_quick_unless_it_says_otherwise() -> None:
    assert Experiment("a", "m --x").command(full=True)[1:] == ["-m", "m", "--x"]
    assert Experiment("a", "m --x", "m").command(full=True)[1:] == ["-m", "m"]
    assert Experiment("a", "", "m").command(full=False) == []


def test_output_is_kept_and_failures_are_told(tmp_path: Path) -> None:
    printing = Experiment("printing", "json.tool --help", writes=False)
    done = run(printing, printing.command(full=False), tmp_path)
    failing = Experiment("failing", "json.tool /nowhere.json", writes=False)
    failed = run(failing, failing.command(full=False), tmp_path)
    assert done["exit_code"] == 0 and "usage" in (tmp_path / "printing" / "output.md").read_text()
    assert failed["exit_code"] != 0 and not (tmp_path / "failing").exists()


def test_earlier_runs_are_remembered(tmp_path: Path) -> None:
    environment = {"commit": "abc", "date": "2026-01-01", "load": 0.1}
    first, second = (
        {"name": e.name, "command": "x", "seconds": 60.0, "exit_code": 0, "environment": environment}
        for e in EXPERIMENTS[:2]
    )
    keep([first, second], tmp_path)
    keep([{**second, "exit_code": 3}], tmp_path)
    kept = json.loads((tmp_path / "runs.json").read_text())
    assert [(r["name"], r["exit_code"]) for r in kept] == [(first["name"], 0), (second["name"], 3)]
    assert "failed (3)" in (tmp_path / "README.md").read_text()


def test_insert() -> None:
    page = f"a\n{readme.BEGIN}\nold\n{readme.END}\nb"
    once = readme.insert(page, "new")
    assert once == f"a\n{readme.BEGIN}\nnew\n{readme.END}\nb"
    assert readme.insert(once, "new") == once
    with pytest.raises(ValueError, match="the table goes between them"):
        readme.insert(f"{readme.END} {readme.BEGIN}", "new")


def test_the_readme_is_up_to_date() -> None:
    page = (record.ROOT / "README.md").read_text(encoding="utf-8")
    assert page == readme.insert(page, readme.performance()), "run python -m benchmarks.readme"


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    assert readme.performance(tmp_path) == "Not measured yet: `make bench`."


def moved(move_s: list[float], plain_s: list[float]) -> dict[str, Any]:
    return {
        "optimizer": "AdamW", "hidden": 512, "layer_bytes": 12 * 10**6, "bytes_moved": 36 * 10**6, "move_s": move_s,
        "plain_s": plain_s,
    }


def test_rate_of_a_move_is_of_pairs() -> None:
    assert migration.rate(moved([2.0, 1.0, 40.0], [1.0, 1.0, 30.0])) == 0.75


def test_share_at_20_ms_a_layer() -> None:
    overhead_s = {"profiling": 0.1, "planning": 0.1, "migrating": 0.0}
    row = {"overhead_s": overhead_s, "batches_s": [1.0, 1.0], "layer_s": 0.01}
    assert every_batch.share(row) == pytest.approx(0.1)
    assert every_batch.share_at_goal(row) == pytest.approx(0.2 / 3.8)


def test_overheads_are_written_and_read_by_the_readme(tmp_path: Path) -> None:
    environment = record.environment()
    folder = tmp_path / "overhead"
    migration.report({"environment": environment, "rows": [moved([0.05], [0.04])]}, folder)
    overhead_s = {"profiling": 0.01, "planning": 0.01, "migrating": 0.0}
    row = {"scenario": "moe", "always": False, "batches_s": [1.0], "layer_s": 0.02, "overhead_s": overhead_s}
    every_batch.report({"environment": environment, "rows": [{**row, "moves": 0, "moved_bytes": []}]}, folder)
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{ending}" for name in ("migration", "every_batch") for ending in ("json", "md", "png")
    }
    text = readme.performance(tmp_path)
    assert "AdamW 50 ms for 36 MB (80%)" in text and "moe 2.0%" in text


def test_options_survive_the_launcher() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--none", nargs="+", default=[])
    options = parser.parse_args(["--hidden", "1", "2", "--quick", "--set", "a.b=[1,2]"])
    assert parser.parse_args(ranks.argument_list(options)) == options
