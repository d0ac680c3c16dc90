"""The training entry under the launcher, as a newcomer starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from dynpipe_ds.ranks import reserved_port

ROOT = Path(__file__).parents[2]
_ports = ExitStack()  # reserved until this process ends


def launch_command(*overrides: str) -> list[str]:
    """Return the command that runs the entry on two ranks."""
    port = _ports.enter_context(reserved_port())
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [launcher, "--no_local_rank", "--num_accelerators", "2", "--master_port", port]
    command += ["--module", "scenarios.train", "model=gpt_tiny", "model.depth=4", *overrides]
    return [str(part) for part in command]


def launch(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the entry on two ranks, in a folder."""
    folder.mkdir()
    return subprocess.run(
        launch_command(*overrides),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_entry_trains_both_ways_and_reports(tmp_path: Path) -> None:
    """Table, picture, results and one line a re-partition; both runs have equal bits."""
    done = launch(
        tmp_path / "here",
        "scenario=freezing",
        "scenario.batches=[3,6]",
        "run.batches=10",
        "run.window=2",
        "partition_method=[0,1,6]",  # so bad that it must change
        "ds.dynamic_pipeline.rebalance_every=2",
        "ds.dynamic_pipeline.min_gain=0",
        "data.validation=0.05",
        "run.validate_every=4",
        "+ds.csv_monitor.enabled=true",
        f"output_dir={tmp_path / 'out'}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"re-partition after batch \d+: \[0, 1, 6\] -> .* took", done.stdout)
    assert "equal bits (10)" in done.stdout
    assert "frozen layers: 3 of 6" in done.stdout
    assert "10/10" not in done.stderr and "20/20" in done.stderr, "one progress bar"
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    static, dynamic = results["runs"]
    assert results["losses_equal_bits"] and static["losses"] == dynamic["losses"]
    assert len(static["losses"]) == 10 and static["losses"][-1] < static["losses"][0]
    assert static["boundaries"] == [0, 1, 6] != dynamic["boundaries"]
    assert static["num_rebalances"] == 0 < dynamic["num_rebalances"]
    assert 0 < static["bubble_ratio"] < 1 and dynamic["profiling_s"] > 0
    assert dynamic["tokens"] == 8 * 16 * 32
    for run in (static, dynamic):
        assert [window[:2] for window in run["windows"]] == [[2, 2], [4, 2], [6, 2], [8, 2]]
        assert run["seconds"] == pytest.approx(sum(seconds for *_, seconds in run["windows"]), rel=0.05)
        assert [run["partitions"][0], run["partitions"][-1][1]] == [[0, [0, 1, 6]], run["boundaries"]]
        assert [first for first, _ in run["partitions"][1:]] == [batch + 1 for batch in run["rebalanced_at"]]
        done_by = {(stage, kind) for stage, kind, *_ in run["timeline"]}
        assert done_by >= {(0, "forward"), (0, "message"), (1, "forward"), (1, "backward"), (1, "step")}
        ordered = {phase["first_batch"] for phase in run["recording"]["orders"]}
        assert ordered >= {first for first, _ in run["partitions"] if first < 10}, "one after the last ran nothing"
    low, high = results["speedup_interval"]
    assert not results["same_partition"] and low < results["speedup"] < high
    assert results["machine"]["others"] >= 0, "read while it trained"
    assert (tmp_path / "out" / "stage_times.png").stat().st_size > 10_000
    table = (tmp_path / "out" / "table.txt").read_text(encoding="utf-8")
    assert f"{results['speedup']:.2f}x ({low:.2f} to {high:.2f})" in table and "validation perplexity" in table
    assert re.search(r"validation losses +equal bits \(3\)", table), table
    assert [found["after"] for found in static["validations"]] == [4, 8, 10]
    assert static["validations"] == dynamic["validations"]
    assert static["validations"][-1]["loss"] < static["validations"][0]["loss"]
    assert len(re.findall(r"after batch [48]: (?:static|dynamic) validation loss \d", done.stdout)) == 4
    for label, run in (("static", static), ("dynamic", dynamic)):
        file = tmp_path / "out" / "csv_monitor" / label / "Train_Samples_train_loss.csv"
        values = [float(line.split(",")[1]) for line in file.read_text(encoding="utf-8").splitlines()[1:]]
        assert values == pytest.approx(run["losses"]), "live metrics of each run are its own"
    assert not list((tmp_path / "here").iterdir()), "no folder of Hydra's"
    ranks = done.stdout[done.stdout.rindex("spawned with command") :].partition("\n")[2]
    assert ranks.startswith("ranks:  2 (2 pipeline stages)") and "replaces" not in ranks
    assert "[WARNING]" not in ranks, "DeepSpeed's log is quiet in the ranks"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_users_mistake_is_one_line(tmp_path: Path) -> None:
    """No traceback, said once, and the launcher stops."""
    done = launch(tmp_path / "here", "data=text", f"data.path={tmp_path / 'nowhere.txt'}")
    assert done.returncode != 0
    assert done.stderr.count("nowhere.txt does not exist: give a text file") == 1
    assert "Traceback" not in done.stderr


def interrupt(folder: Path, line: str, *overrides: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Start the entry, which starts its ranks, press Ctrl-C when it has printed a line, and wait for its end."""
    command = [
        sys.executable, "-m", "scenarios.train", "model=gpt_tiny", "model.depth=4", "run.batches=14", "run.window=2",
        "run.save_every=2", f"output_dir={folder}", *overrides,
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while line not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert "Ctrl-C again ends at once" in err and process.returncode == 128 + signal.SIGINT, out + err
    for words in ("Traceback", "CalledProcessError", "Error: ", "launch.py"):
        assert words not in out + err, out + err
    return subprocess.CompletedProcess(command, process.returncode, out, err), command


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """The entry that starts its own ranks asks them to end; no stack of anybody's, exit code as of Ctrl-C."""
    ended, command = interrupt(tmp_path, "after batch 4", "scenario.batches=[2]", "scenario.frozen=[1]")
    found = re.search(r"stopped after (batch \d+.*); saved in", ended.stdout)
    assert found, ended.stdout + ended.stderr
    done = subprocess.run(command, timeout=200, check=True, cwd=ROOT, capture_output=True, text=True)
    assert f"continuing an interrupted run after {found[1]} of 14" in done.stdout
    assert "equal bits (14)" in done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ctrl_c_before_anything_trains(tmp_path: Path) -> None:
    """While ranks start there is nothing to save."""
    ended, _ = interrupt(tmp_path, "output: ")
    assert "saved" not in ended.stdout and not list(tmp_path.iterdir())
