"""``python -m scenarios.report``: one page that needs nothing else, with gains that were computed by hand."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dynpipe_ds.planning import assume_halves, plan_order
from dynpipe_ds.schedule import order_of
from dynpipe_ds.simulation import Workload, simulate
from scenarios.report import __main__ as report
from scenarios.report.page import payback, timelines
from scenarios.report.results import load_results
from tests.browser import WIDTHS, browser, check_layout, shown
from tests.reporting.test_page import Parsed
from tests.scenarios.report.job import FROZEN_AT, MOVED_AT, job_profile, write_job

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _a_finished_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_job("outputs/freezing")


Told = Callable[..., str]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Run the command in this process; what it prints, and with --json nothing but that."""

    def run(*arguments: str) -> str:
        assert report.main(arguments) == 0
        out, err = capsys.readouterr()
        assert not err
        return out

    return run


def row_of(text: str, first: str) -> list[str]:
    """The other cells of the row that begins with one."""
    found = re.search(rf"<tr[^>]*><td[^>]*>{first}</td>(.*?)</tr>", text)
    assert found
    return [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", found[1])]


def test_the_page_is_whole(told: Told) -> None:
    """Well formed; five pictures inside, described; nothing is loaded from elsewhere; all is said in words."""
    out = told("outputs/freezing")
    assert "re-partition after batch 12: [0 4 8] -> [0 5 8], gain 25.0% predicted, 25.0% ± 0.0% realised" in out
    assert out.endswith("written: outputs/freezing/report.html\n")
    text = Path("outputs/freezing/report.html").read_text(encoding="utf-8")
    page = Parsed(text)
    assert not page.open and len(page.ids) == len(set(page.ids))
    assert text.count("<svg role=") == 5
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.loaded)
    assert "bit for bit" in text and "n/a" in text  # no last window
    headings = ("Throughput", "What every layer costs", "Stage times", "One batch in time", "Orders", "A batch under")
    for heading in headings:
        assert f"<h2>{heading}" in text
    moves = text[text.index("<h2>Re-partitions") :]
    assert row_of(moves, "12")[:5] == ["[0 4 8]", "[0 5 8]", "25.0%", "25.0% ± 0.0%", "25.0%"]
    predicted = text[text.index("<h2>A batch under") :]
    assert row_of(predicted, "as it began")[:2] == ["1F1B", "[0 4 8]"]
    assert row_of(predicted, "as it is now")[3] == "the same"


def test_in_a_browser(told: Told) -> None:
    told("outputs/freezing")
    with browser() as opened:
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                with shown(opened, Path("outputs/freezing/report.html"), width, scheme) as seen:
                    check_layout(seen)


def test_a_journal_of_another_run_is_not_shown(told: Told) -> None:
    """A later one that began in the same folder: its losses are others."""
    journal = Path("outputs/freezing/journal/dynamic/journal.jsonl")
    journal.write_text(journal.read_text(encoding="utf-8").replace('"loss":3.0,', '"loss":3.5,'), encoding="utf-8")
    (note,) = json.loads(told("outputs/freezing", "--json"))["notes"]
    assert "layer times" in note
    assert load_results("outputs/freezing").dynamic.journal is None


def test_realised_gain(told: Told) -> None:
    """Frozen, stages take 4 x 1 and 4 x 3 ms; one of the dear layers moves: 12 ms become 9. The machine that slows
    down in the same moment does not count, since the other run is slowed down, too."""
    (move,) = json.loads(told("outputs/freezing", "--output", "page.html", "--json"))["rebalances"]
    assert move["batch"] == MOVED_AT and move["predicted_gain"] == 0.25
    assert move["realised_gain"] == pytest.approx(1 - 9 / 12)
    assert move["same_work_gain"] == pytest.approx(1 - 9 / 12)
    assert move["realised_noise"] == pytest.approx(0)
    assert move["batch_stayed_s"] == pytest.approx(2 * 4 * 0.012 + 0.001)
    assert move["batch_moved_s"] == pytest.approx(2 * 4 * 0.009 + 0.001)
    assert Path("page.html").is_file() and not Path("outputs/freezing/report.html").exists()


def test_layers_over_time() -> None:
    """Rows are batches."""
    results = load_results("outputs/freezing")
    journal = results.dynamic.journal
    assert journal is not None and results.tokens_a_batch == 64
    first_s = [journal.profiles[batch].layer_s[0] for batch in (FROZEN_AT - 1, FROZEN_AT)]
    assert first_s == pytest.approx([0.003, 0.001])
    assert journal.partitions == [(0, (0, 4, 8)), (MOVED_AT, (0, 5, 8))]


def test_measured_batches_in_time(told: Told) -> None:
    """Of both runs, as they were stored; one process each in the trace."""
    found = timelines(load_results("outputs/freezing"))
    assert list(found) == ["static, [0 4 8], 1F1B", "dynamic, [0 5 8], planned"]
    halves = assume_halves(job_profile(23, (0, 5, 8)), 0.5)
    workload = Workload.from_profile(halves)
    assert found["dynamic, [0 5 8], planned"] == simulate(workload, plan_order(workload).order, timeline=True).timeline
    told("outputs/freezing", "--trace", "new/trace.json")
    events = json.loads(Path("new/trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == list(found)
    assert {e["pid"] for e in events if e.get("cat") == "weight"} == {1} and any(e["ph"] == "s" for e in events)
    write_job("old", recorded=False)
    assert report.main(["old", "--trace", "none.json"]) == 2 and not Path("none.json").exists()


def test_backwards_that_ran_whole(told: Told) -> None:
    """Which stages, and why."""
    assert json.loads(told("outputs/freezing", "--json"))["whole_backwards"] == {}
    values = write_job("whole")
    values["runs"][1]["whole_backwards"] = [[1, "a compiled layer", "a <function>"]]
    Path("whole/results.json").write_text(json.dumps(values), encoding="utf-8")
    line = "Stage 1 ran backwards whole, since they can't be split: a compiled layer; a <function>."
    assert line in told("whole")
    text = Path("whole/report.html").read_text(encoding="utf-8")
    assert "a compiled layer; a &lt;function&gt;." in text and "can't be split" not in told("outputs/freezing")


def test_which_order_ran_when(told: Told) -> None:
    """From the batch of the move on a planned one; what the simulator says of it, and what it took: half more."""
    usual, planned = json.loads(told("outputs/freezing", "--json"))["orders"]
    assert [usual["first_batch"], usual["order"], usual["boundaries"]] == [0, "1F1B", [0, 4, 8]]
    assert [planned["first_batch"], planned["order"], planned["boundaries"]] == [MOVED_AT, "planned", [0, 5, 8]]
    assert len(usual["predicted_s"]) == len(planned["predicted_s"]) == 8
    profile = job_profile(0, (0, 4, 8))
    batch_s = simulate(Workload.from_profile(profile), order_of("1f1b", 4, 2)).makespan_s
    assert usual["predicted_s"][0] == batch_s and usual["measured_s"][0] == pytest.approx(1.5 * batch_s)
    line = f"order from batch 0: 1F1B on [0 4 8], a batch {batch_s:.4f} s predicted, {1.5 * batch_s:.4f} s measured\n"
    assert line in told("outputs/freezing")
    text = Path("outputs/freezing/report.html").read_text(encoding="utf-8")
    cells = ["[0 4 8]", "1F1B", f"{batch_s:.3f}", f"{1.5 * batch_s:.3f}", "1.500"]
    assert row_of(text[text.index("<h2>Orders") :], "0") == cells


def test_the_noise_of_a_realised_gain() -> None:
    """Ratios of the two runs by hand: 1.0 and 1.2 before the move, 0.9 and 0.7 after it."""
    values = write_job("noisy")
    static, dynamic = values["runs"]
    for batch, ratio in ((10, 1.0), (11, 1.2), (12, 0.9), (13, 0.7)):
        dynamic["stages_s"][batch] = [0.0, ratio * max(static["stages_s"][batch])]
    for run in (static, dynamic):
        for key in ("stages_s", "batches_s", "losses"):
            run[key] = run[key][:14]
    values["settings"]["run"] = {"warmup_batches": 10}
    Path("noisy/results.json").write_text(json.dumps(values), encoding="utf-8")
    (move,) = load_results("noisy").dynamic.rebalances
    assert move.realised_gain == pytest.approx(1 - 0.8 / 1.1)
    error = 1.2533 * statistics.stdev([0.1, 0.3]) / 2**0.5
    assert move.realised_noise == pytest.approx(error * (1 + (0.8 / 1.1) ** 2) ** 0.5 / 1.1)


def test_what_a_move_pays() -> None:
    """Batches until the seconds saved exceed its cost."""
    (move,) = load_results("outputs/freezing").dynamic.rebalances
    assert payback(replace(move, batch_stayed_s=0.3, batch_moved_s=0.2, cost_s=0.25)) == "3 batches"
    assert payback(replace(move, batch_stayed_s=0.3, batch_moved_s=0.2, cost_s=0.01)) == "1 batch"
    assert payback(replace(move, batch_stayed_s=0.2, batch_moved_s=0.3)) == "not yet seen"
    assert payback(replace(move, batch_stayed_s=None)) == "n/a"
    assert payback(replace(move, realised_gain=-0.1, realised_noise=0.2)) == "lost in noise"


def test_a_folder_without_recordings(told: Told) -> None:
    """A note, and what is known: the realised gain is measured from stage times alone."""
    write_job("old", recorded=False)
    values = json.loads(told("old", "--json"))
    (note,), (move,) = values["notes"], values["rebalances"]
    assert "lacks the journals of both runs" in note
    assert move["before"] is None and move["predicted_gain"] is None
    assert move["realised_gain"] == pytest.approx(0.25)
    text = Path("old/report.html").read_text(encoding="utf-8")
    assert note in text and text.count("<svg role=") == 3
    assert "note: " in told("old/results.json")


def test_speedups_have_intervals(told: Told) -> None:
    """By windows of six, on the page and as JSON. Half of them are before the move, which counts as scatter."""
    found = json.loads(told("outputs/freezing", "--json"))
    low, high = found["speedup_interval"]
    assert not found["same_partition"] and found["speedup"] == pytest.approx(found["dynamic_tokens_per_s"] /
                                                                             found["static_tokens_per_s"])  # fmt: skip
    assert low < 1.15 < found["speedup"] < 1.25 < high
    text = Path("outputs/freezing/report.html").read_text(encoding="utf-8")
    words = f"{found['speedup']:.2f}x ({low:.2f} to {high:.2f})"
    assert f'class="lead">{words} the throughput with 1 re-partition' in text and f"<td>{words}</td>" in text
    write_job("old", recorded=False)
    json.loads(told("old", "--json"))
    assert "x (no interval) the throughput" in Path("old/report.html").read_text(encoding="utf-8")


def test_a_busy_machine_is_told_first(told: Told) -> None:
    values = write_job("busy")
    values["machine"] = {"reasons": ["others use 1.5 of 2 processors"]}
    Path("busy/results.json").write_text(json.dumps(values), encoding="utf-8")
    line = "BUSY MACHINE: others use 1.5 of 2 processors. Times are not those of an idle machine."
    assert told("busy").startswith(f"note: {line}\n")
    text = Path("busy/report.html").read_text(encoding="utf-8")
    assert f'<p class="note">{line}</p>' in text and text.index(line) < text.index("<table>")
    assert "BUSY" not in told("outputs/freezing")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_that_never_moved_is_not_faster(told: Told, recorded: bool) -> None:
    """1.54x once, between two runs of one partition: seconds are kept, no speedup is told."""
    write_job("luck", moves=False, recorded=recorded)
    found = json.loads(told("luck", "--json"))
    assert found["dynamic_tokens_per_s"] == pytest.approx(found["static_tokens_per_s"] / 0.65)
    assert found["same_partition"] and found["speedup"] is None and found["speedup_interval"] is None
    noise = "same partition: the difference is noise"
    text = Path("luck/report.html").read_text(encoding="utf-8")
    assert f"0 re-partitions, {noise}" in text and f"<td>{noise}</td>" in text and "1.54" not in text
    assert noise in (printed := told("luck")) and "1.54" not in printed


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("nowhere", "nowhere: no such file; give the output folder"),
        ("outputs", "results.json: no such file"),
        (".", "has no 'static'"),
    ],
)
def test_something_else_is_refused(folder: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line on stderr with the remedy; nothing on stdout."""
    Path("results.json").write_text('{"runs": []}', encoding="utf-8")
    assert report.main([folder]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and why in err and "output folder" in err and err.count("\n") == 1


def test_the_commands_of_help_and_documentation_run(told: Told) -> None:
    """Those of the module's own text, and of the documentation."""
    shown = "\n".join([str(report.__doc__), (ROOT / "docs" / "start.md").read_text(encoding="utf-8"),
                       (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")])  # fmt: skip
    shown = shown.replace("outputs/first_run", "outputs/freezing")  # the folder that is here
    commands = set(re.findall(r"python -m scenarios\.report ([^`#\n]+)", shown))
    assert len(commands) >= 2
    for command in commands:
        assert "written: " in (out := told(*shlex.split(command))) or json.loads(out)["page"]


def test_as_a_module_stdout_is_the_result_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scenarios.report", "outputs/freezing", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["page"] == "outputs/freezing/report.html"
