"""``dynpipe watch``: a job's journal on a terminal, once and live."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from unittest.mock import patch

import pytest

from dynpipe_ds.journal import read_journal
from dynpipe_ds.journal.standing import in_columns, stages_over_time, standing
from tests.cli.conftest import Command
from tests.journal.told import Job

rich = pytest.importorskip("rich", reason="the extra 'watch' is not installed")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def words(text: str) -> str:
    """Without frames and line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─\\s]+", " ", text).split())


def test_what_is_shown(dynpipe: Command) -> None:
    """Figures that were computed by hand: five layers without backward against three with it."""
    Job(Path("runs/first")).write(range(20))
    done = dynpipe("watch", "runs/first")
    assert done.code == 0 and not done.err
    for part in (
        "batch 20 · loss 1.81 · 580 ms a batch · ", "stage 1 limits", "order planned", "0-4       280 ms",
        "5-7       360 ms", "16  [0 4 8]  [0 5 8]           12.5%  3.0  210 ms", "loss  ", "idle share ", "1 move",
        "most memory MiB",
    ):  # fmt: skip
        assert " ".join(part.split()) in words(done.out)
    assert f"4  {'1' * 16}{'0' * 4} " in done.out, "the stage of the layer that moved"
    assert max(map(len, done.out.splitlines())) <= 100


def test_what_layers_take_to_compile_where_they_arrive(dynpipe: Command) -> None:
    Job(Path("first"), compiles={0: 4.0, 16: 1.25}).write(range(20))
    shown = words(dynpipe("watch", "first").out)
    assert "MiB took compiled" in shown and "12.5% 3.0 210 ms 1.25 s" in shown
    assert "torch.compile took 5.25 s in profiled batches" in shown
    Job(Path("second")).write(range(20))
    assert "compile" not in dynpipe("watch", "second").out


def test_it_fits_a_narrow_terminal(dynpipe: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(Path("first")).write(range(200))
    monkeypatch.setenv("COLUMNS", "50")
    done = dynpipe("watch", "first", "--once")
    assert max(map(len, done.out.splitlines())) <= 50 and "stage 1 limits" in words(done.out)


def test_values_for_scripts(dynpipe: Command) -> None:
    """The same as is shown; rich is not needed."""
    Job(Path("first")).write(range(14))
    with patch("importlib.util.find_spec", return_value=None):
        values = dynpipe("watch", "first", "--json").json
        refused = dynpipe("watch", "first")
    assert refused.code == 1 and "pip install 'dynpipe_ds[watch]'" in refused.err
    assert values["num_batches"] == 14 and values["limiting_stage"] == 1 and values["boundaries"] == [0, 4, 8]
    assert [stage["busy_s"] for stage in values["stages"]] == [0.16, 0.48]
    assert values["samples_per_s"] == pytest.approx(8 / 0.58) and values["moves"] == [] and not values["is_late"]


def test_of_several_runs_one_that_moves(dynpipe: Command) -> None:
    Job(Path("job/journal/dynamic")).write(range(20))
    Job(Path("job/journal/static"), moved_at=99, settings={"rebalance_every": "never"}).write(range(20))
    assert dynpipe("watch", "job", "--json").json["journal"].endswith("dynamic/journal.jsonl")
    out = dynpipe("watch", "job", "--run", "static").out
    assert "no move yet" in out and "--run NAME: dynamic" in out
    done = dynpipe("watch", "job", "--run", "best", "--once")
    assert done.code == 2 and "--run best: job has static, dynamic; give one of these" in done.err


def test_without_a_journal(dynpipe: Command) -> None:
    done = dynpipe("watch", "nowhere", "--once")
    assert done.code == 2 and "nowhere: no such folder; give the folder" in done.err and done.err.count("\n") == 1


def test_before_the_first_profile(dynpipe: Command) -> None:
    Job(Path("first")).write(range(1, 3), profile_every=10)
    done = dynpipe("watch", "first")
    assert done.code == 0 and "3 · loss" in done.out and "no move yet" in done.out


def killed(folder: str) -> None:
    """Take away what a process writes when it ends in order."""
    file = Path(folder, "journal.jsonl")
    text = file.read_text(encoding="utf-8")
    assert text.endswith('{"kind":"end"}\n')
    file.write_text(text.removesuffix('{"kind":"end"}\n'), encoding="utf-8")


def test_a_run_that_is_silent_for_long(dynpipe: Command) -> None:
    Job(Path("first")).write(range(3))
    os.utime("first/journal.jsonl", (time.time() - 70,) * 2)
    assert not standing(read_journal("first"))["is_late"] and "ago: the job has ended" in dynpipe("watch", "first").out
    killed("first")
    journal = read_journal("first")
    assert not standing(journal)["is_late"]
    os.utime(journal.file, (time.time() - 70,) * 2)
    assert standing(journal)["is_late"], "more than a minute and five batches"
    assert "ago: the job was killed, or it hangs" in words(dynpipe("watch", "first").out)


@pytest.mark.parametrize("was_killed", [False, True])
def test_the_run_before_is_not_shown_as_live(dynpipe: Command, *, was_killed: bool) -> None:
    """From a job's beginning to the end of its first batch; then this job alone, or what it continues."""
    for goes_on_at, moves in ((0, 0), (18, 1)):
        Job(Path("first")).write(range(20))
        if was_killed:
            killed("first")
        writer = Job(Path("first")).begin()
        done = dynpipe("watch", "first")
        assert "a job began" in done.out and "its first batch is not done yet" in done.out
        assert "the journal has 20 batches of the run before it" in words(done.out)
        assert "loss" not in done.out and "limits" not in done.out and "ended" not in done.out
        values = dynpipe("watch", "first", "--json").json
        assert values["is_starting"] and values["num_batches"] == 0 and values["num_batches_before"] == 20
        assert values["loss"] is None and values["moves"] == [] and "stages" not in values
        Job(Path("first")).write([goes_on_at], writer=writer)
        values = dynpipe("watch", "first", "--json").json
        assert not values["is_starting"] and values["num_batches"] == goes_on_at + 1 and len(values["moves"]) == moves
        assert values["loss"] == 2.0 - 0.01 * goes_on_at


def test_a_new_folder_whose_first_batch_is_not_done(dynpipe: Command) -> None:
    writer = Job(Path("first")).begin()
    out = dynpipe("watch", "first").out
    assert "its first batch is not done yet" in out and "run before" not in out
    writer.close()
    assert "ago before its first batch was done" in dynpipe("watch", "first").out


@contextmanager
def terminal(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command on a terminal of its own, of 100 columns and 40 rows."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 80, 100, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "LINES": "80", "COLUMNS": "100"}
    started = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )  # fmt: skip
    os.close(its)
    try:
        yield started, ours
    finally:
        started.kill()
        started.wait()
        os.close(ours)


def until(screen: int, wanted: str) -> str:
    """What is written to a terminal, without colours, until some words were."""
    text, end = "", time.monotonic() + 120
    while wanted not in text and time.monotonic() < end:
        if select.select([screen], [], [], 0.5)[0]:
            text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(screen, 2**16).decode(errors="replace"))
    assert wanted in text, text[-2000:]
    return text


def test_live(tmp_path: Path) -> None:
    """It waits for the job's first batch, shows what is added, then the next job, and ends well by Ctrl-C."""
    job = Job(tmp_path / "first")
    with terminal(sys.executable, "-m", "dynpipe_ds", "watch", "first", "--every", "0.05") as (watching, screen):
        until(screen, "no such folder")
        job.write(range(3))
        until(screen, "batch\N{NO-BREAK SPACE}3 ")
        job.write(range(3, 20))
        until(screen, "12.5%")
        writer = job.begin()
        until(screen, "batches of the run before it")
        job.write(range(2), writer=writer)
        until(screen, "batch\N{NO-BREAK SPACE}2 ")
        os.kill(watching.pid, signal.SIGINT)
        until(screen, "batches")
        assert watching.wait(60) == 0


def test_long_series_fit() -> None:
    assert in_columns([1.0, 2.0], 5) == [1.0, 2.0]
    assert in_columns([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], 3) == [1.0, 5.0, 9.0]
    Job(Path("first")).write(range(40))
    rows = stages_over_time(read_journal("first"), 4, 10)
    assert [len(row) for row in rows] == [10] * 4 and rows[0] == [0] * 10 and rows[-1] == [1] * 10
