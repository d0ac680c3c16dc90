"""``dynpipe demo``: layers move between two processes, with equal bits, and what is said of it is what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynpipe_ds.cli import demo
from dynpipe_ds.cli.demonstration.course import FREEZE_AT, NUM_BATCHES, NUM_FROZEN
from dynpipe_ds.cli.demonstration.model import LAYERS
from dynpipe_ds.cli.demonstration.outcome import line, text_of, values_of
from tests.cli.conftest import Command


def test_layers_move_with_equal_bits(dynpipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole demonstration; everything is in the one folder that it names, and no process is left."""
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children())
    done = dynpipe("demo")
    assert done.code == 0, done.err
    folder = tmp_path / "dynpipe-demo"
    assert list(tmp_path.iterdir()) == [folder] and f"output: {folder}" in done.err
    values = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    assert values["good"] and values["num_layers"] == len(LAYERS)
    static, dynamic = values["runs"]["static"], values["runs"]["dynamic"]
    assert len(dynamic["losses"]) == NUM_BATCHES and static["losses"] == dynamic["losses"]
    assert len(set(dynamic["losses"])) == NUM_BATCHES and dynamic["losses"][-1] < dynamic["losses"][0]
    assert static["boundaries_after"] == static["boundaries_before"] == dynamic["boundaries_before"]
    assert values["moves"] and values["moves"][0]["batch"] > FREEZE_AT
    assert values["moves"][0]["after"][1] > NUM_FROZEN  # the stage that freezes gets more layers
    for move in values["moves"]:
        assert f"batch {move['batch']}: layers move, [0 {move['before'][1]} {len(LAYERS)}]" in done.err
    assert done.out.count("equal bits") == 2 and "DIFFER" not in done.out
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert set(psutil.Process().children()) <= before


def events(**changed: Any) -> list[dict[str, Any]]:
    """Of a run in which nothing goes wrong; ``changed`` goes into the dynamic run's batches."""
    found: list[dict[str, Any]] = [{"kind": "start", "num_layers": 12, "num_parameters": 2_100_000, "boundaries": []}]
    for run in ("static", "dynamic"):
        for batch in range(NUM_BATCHES):
            values = {"boundaries": [0, 6, 12], "seconds": 0.1, "loss": (5.0 - 0.01 * batch).hex()}
            values |= changed if run == "dynamic" else {}
            found.append({"kind": "batch", "run": run, "batch": batch, **values})
    found.append({
        "kind": "move", "run": "dynamic", "batch": 11, "before": [0, 6, 12], "after": [0, 8, 12], "seconds": 0.02,
    })  # fmt: skip
    return [*found, {"kind": "end", "equal": True, "num_tensors": 314}]


def test_a_difference_is_told() -> None:
    """In losses, or in weights and optimizer state; it is never good."""
    assert values_of(events())["good"]
    assert "DIFFER" not in text_of(values_of(events()), "here")
    other = values_of(events(loss=(5.0).hex()))
    assert not other["good"] and text_of(other, "here").count("DIFFER") == 1
    unequal = events()
    unequal[-1]["equal"] = False
    assert not values_of(unequal)["good"] and text_of(values_of(unequal), "here").count("DIFFER") == 1


def test_a_busy_machine_is_told() -> None:
    """Where others compute as well, the seconds are no measurement."""
    values = {**values_of(events()), "num_processors": 2}
    assert "say nothing about speed" in text_of({**values, "load": 9.0}, "here")
    assert "speed" not in text_of({**values, "load": 2.0}, "here")


def test_no_move_is_not_a_success() -> None:
    stayed = [event for event in events() if event["kind"] != "move"]
    values = values_of(stayed)
    assert not values["good"] and "No layer moved" in text_of(values, "here")


def test_lines_while_it_runs() -> None:
    start, *_, move, end = events()
    assert "12 layers, 2.1 million parameters" in str(line(start))
    assert line(move) == "batch 11: layers move, [0 6 12] -> [0 8 12], in 0.020 s"
    assert line(end) is None and line({"kind": "freeze", "run": "static", "batch": 8}) is None


def test_every_demonstration_has_a_folder_of_its_own(
    dynpipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [demo._folder(None).name for _ in range(3)]
    assert names == ["dynpipe-demo", "dynpipe-demo-2", "dynpipe-demo-3"]
    Path("full").mkdir()
    Path("full/file").touch()
    done = dynpipe("demo", "--folder", "full")
    assert done.code == 2 and "--folder full: must be an empty folder or not there yet" in done.err


def test_a_process_that_fails_is_one_line(dynpipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import sys; sys.exit('no space')", encoding="utf-8")
    monkeypatch.setattr(demo, "COMMAND", (demo.sys.executable, str(script)))
    done = dynpipe("demo", "--folder", str(tmp_path / "out"))
    assert done.code == 1 and "ended with code 1: no space; 'dynpipe doctor' looks for the cause" in done.err
    assert "Traceback" not in done.err and not done.out
