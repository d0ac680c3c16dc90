"""Gantt pictures and Chrome traces of a batch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynpipe_ds.reporting import around_move, chrome_trace, save_chrome_trace, save_gantt
from dynpipe_ds.reporting.timeline import LOOKS
from dynpipe_ds.simulation import Interval, Workload, simulate


def timeline(num_stages: int = 3, num_micro_batches: int = 4, **links: float) -> tuple[Interval, ...]:
    workload = Workload([0.01] * num_stages, [0.02] * num_stages, num_micro_batches, **links)  # type: ignore[arg-type]
    return simulate(workload, timeline=True).timeline


def texts(path: Path) -> list[str]:
    """matplotlib writes every text into an SVG as a comment."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_a_picture_has_units_a_legend_and_numbers(tmp_path: Path) -> None:
    path = save_gantt(tmp_path / "new" / "gantt.svg", timeline(activation_link_s=0.005, step_s=0.01), title="replay")
    found = texts(path)
    for text in ("time (ms)", "stage", "replay", "forward", "backward", "message", "optimizer step", "idle"):
        assert text in found
    assert {"0", "1", "2", "3"} <= set(found), "micro-batches and stages"
    assert all(LOOKS[kind].colour.lower() in path.read_text() for kind in ("forward", "backward", "send", "wait"))


def test_timelines_share_one_axis_and_say_how_long_they_are(tmp_path: Path) -> None:
    before, after = timeline(), timeline(num_micro_batches=2)
    found = texts(save_gantt(tmp_path / "two.svg", {"before": before, "after": after}))
    assert "before: 180 ms" in found and "after: 120 ms" in found
    assert found.count("time (ms)") == 1 and "optimizer step" not in found


def test_a_move_stands_between_two_batches(tmp_path: Path) -> None:
    moving = around_move(timeline(), 0.05, timeline(num_micro_batches=2))
    found = texts(save_gantt(tmp_path / "move.svg", moving))
    assert "350 ms" in found and "migration" in found, "180 ms, 50 ms and 120 ms"
    moves = [i for i in moving if i.kind == "migration"]
    assert [(i.stage, i.start_s, i.end_s) for i in moves] == [
        (s, pytest.approx(0.18), pytest.approx(0.23)) for s in range(3)
    ]
    assert min(i.start_s for i in moving[moving.index(moves[-1]) + 1 :]) == pytest.approx(0.23)
    assert any(event.get("cat") == "migration" for event in chrome_trace(moving)["traceEvents"])


@pytest.mark.parametrize("scale, unit", [(1.0, "s"), (1e-2, "ms"), (1e-6, "µs")])
def test_the_unit_fits(tmp_path: Path, scale: float, unit: str) -> None:
    alone = [Interval(0, "forward", 0, 0.0, scale), Interval(0, "backward", 0, scale, 3 * scale)]
    assert f"time ({unit})" in texts(save_gantt(tmp_path / "unit.svg", alone))


def test_same_png_twice(tmp_path: Path) -> None:
    first, second = (save_gantt(tmp_path / name, timeline()) for name in ("a.png", "b.png"))
    assert first.read_bytes() == second.read_bytes() and first.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("nothing", [(), {}, {"before": timeline(), "after": ()}])
def test_nothing_to_draw_is_refused(tmp_path: Path, nothing: object) -> None:
    with pytest.raises(ValueError, match="simulate with timeline=True"):
        save_gantt(tmp_path / "none.png", nothing)  # type: ignore[arg-type]


def test_a_trace_has_a_thread_a_stage_and_an_arrow_a_message(tmp_path: Path) -> None:
    intervals = timeline(activation_link_s=0.005, gradient_link_s=0.003, step_s=0.001)
    path = save_chrome_trace(tmp_path / "new" / "trace.json", intervals, name="replay")
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace == chrome_trace(intervals, name="replay")
    events = trace["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")]
    assert names == ["replay", "stage 0", "stage 1", "stage 2"]
    slices = [e for e in events if e["ph"] == "X"]
    messages = [i for i in intervals if i.kind == "message"]
    assert len(slices) == len(intervals) - len(messages)
    assert slices[0] == {
        "ph": "X", "pid": 0, "tid": 0, "cat": "forward", "name": "forward 0", "ts": 0.0, "dur": 1e4,
        "args": {"micro_batch": 0},
    }
    assert {"recv activation 0", "recv gradient 3", "step"} <= {e["name"] for e in slices}
    begins, ends, outs, ins = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "besf")
    assert begins.keys() == ends.keys() == outs.keys() == ins.keys()
    assert len(begins) == len(messages) == 2 * 4 * 2, "2 boundaries, 4 micro-batches, 2 ways"
    for key in begins:
        link_us = 5e3 if key.startswith("activation") else 3e3
        assert ends[key]["ts"] - begins[key]["ts"] == pytest.approx(link_us)
    for key, start in outs.items():
        step, kind = (1, "forward") if key.startswith("activation") else (-1, "backward")
        assert ins[key]["tid"] == start["tid"] + step
        for event in (start, ins[key]):  # each end lies in the computation that sends or needs it
            at = [e for e in slices if e["tid"] == event["tid"] and e["ts"] <= event["ts"]]
            (over,) = [e for e in at if e["ts"] + e["dur"] > event["ts"] + 1e-6]  # sums round
            assert over["name"] == f"{kind} {key.split()[2]}"
        assert start["ts"] <= begins[key]["ts"] <= ends[key]["ts"] <= ins[key]["ts"]


def test_messages_that_take_no_time_are_arrows_alone() -> None:
    events = chrome_trace(timeline())["traceEvents"]
    assert [e["ph"] for e in events if e.get("cat") == "message"] == ["s", "f"] * 16


def test_a_trace_of_several_batches_has_a_process_for_each() -> None:
    events = chrome_trace({"1F1B": timeline(), "planned": timeline(num_micro_batches=2)})["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "1F1B", 1: "planned"}
    num_arrows = [len({e["id"] for e in events if e["ph"] == "s" and e["pid"] == pid}) for pid in names]
    assert num_arrows == [16, 8] and len({e["id"] for e in events if e["ph"] == "s"}) == 24, "none between processes"


@pytest.mark.exhaustive
def test_the_plotting_library_is_loaded_for_pictures_only() -> None:
    """Every rank imports the package."""
    code = "import sys, dynpipe_ds.reporting, dynpipe_ds.cli.main; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
