"""``dynpipe run`` and ``dynpipe join``: a job with spares, one that others join, and one that refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynpipe_ds.cli.launching import Launched
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "joining" / "script.py")


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dynpipe_ds", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def losses(output: str) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for batch, loss in re.findall(r"batch (\d+) stages \d+ loss (\S+)", output):
        found.setdefault(int(batch), set()).add(loss)
    return found


@pytest.mark.exhaustive  # docs/elastic.md runs always
def test_a_job_with_spares() -> None:
    """Two of three spares join; the third hears that the job is over. The bits are those of one rank."""
    alone = started("run", "--", SCRIPT, "1", "8").communicate(timeout=400)[0]
    process = started("run", "--workers", "1", "--spares", "3", "--", SCRIPT, "3", "8")
    output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    assert losses(output) == losses(alone) and len(losses(alone)) == 8
    assert all(len(values) == 1 for values in losses(output).values())
    assert len(re.findall(r"\[s\d\] joined with {'told': 3}", output)) == 2
    assert re.search(r"\[0\] event re-packed after batch 3 from 1 to 3 stages: .* ranks \[1, 2\] joined", output)


@pytest.mark.exhaustive
def test_freed_workers_stay_and_come_back() -> None:
    """The same process, under its old name, with no spare started; the bits are those of one rank."""
    alone = started("run", "--", SCRIPT, "1", "8").communicate(timeout=400)[0]
    process = started("run", "--workers", "2", "--", SCRIPT, "2", "8", "stay")
    output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    assert losses(output) == losses(alone) and len(losses(alone)) == 8
    assert re.findall(r"\[0\] batch (\d) stages 1 ", output) == ["3"], output
    assert "[1] joined with {'told': 3}" in output
    pids = re.findall(r"\[1\] process (\d+)", output)
    assert len(pids) == 2 and pids[0] == pids[1], output


def test_nobody_can_stay_where_nobody_may_join() -> None:
    environment = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, SCRIPT, "1", "8", "stay"], env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=300, check=False,
    )
    assert done.returncode == 1
    assert 'repack.release.backend = "stay", elastic.enabled = False: freed workers are to wait' in done.stderr


@contextmanager
def job(door: Path, token: str, wanted: int) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, str(wanted), "8"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DYNPIPE_DOOR_FILE": str(door), "DYNPIPE_TOKEN": token,
        },
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
    reader.start()
    try:
        yield process, lines
    finally:
        process.kill()
        reader.join()
        process.stdout.close()
        process.wait()


@pytest.mark.exhaustive
def test_who_fits_may_join_and_who_does_not_is_told_why(tmp_path: Path) -> None:
    door = tmp_path / "door.json"
    with job(door, "word", 2) as (training, lines):
        until = time.monotonic() + 300
        while not door.exists():
            assert time.monotonic() < until and training.poll() is None, lines
            time.sleep(0.1)
        refused = started("join", str(door), "--", SCRIPT, "2", "9", DYNPIPE_TOKEN="word")
        guessed = started("join", str(door), "--", SCRIPT, "2", "8", DYNPIPE_TOKEN="guess")
        said, tried = refused.communicate(timeout=400)[0], guessed.communicate(timeout=400)[0]
        assert refused.returncode == 1 and "model[0].of[1][0]: 8 in the job, 9 here" in said, said
        assert guessed.returncode == 1 and "the token is another one" in tried, tried
        joins = started("join", str(door), "--", SCRIPT, "2", "8", DYNPIPE_TOKEN="word")
        output = joins.communicate(timeout=400)[0]
        assert joins.returncode == 0 and "[j0] joined with {'told': 3}" in output, output
        training.wait(timeout=200)
        assert training.returncode == 0, lines
    assert set(losses(output)) == {4, 5, 6, 7, 8}
    together = losses("".join(lines))
    assert all(together[batch] == values for batch, values in losses(output).items())


def test_usage(dynpipe: Command) -> None:
    for line, text in [
        (("run",), "there is no script to run"), (("join", "nowhere", "--", SCRIPT), "neither HOST:PORT nor a file"),
        (("join", "host:80"), "there is no script to run"),
    ]:
        done = dynpipe(*line)
        assert text in done.err and done.code == 2


@pytest.mark.parametrize(("survivors_stay", "code", "ended"), [(False, 3, False), (True, 0, True)])
def test_survivors(tmp_path: Path, survivors_stay: bool, code: int, ended: bool) -> None:
    """One fails, the other would need two seconds more."""
    script = tmp_path / "script.py"
    note = tmp_path / "ended"
    script.write_text(
        "import os, sys, time\nif os.environ['WHO'] == '0': sys.exit(3)\n"
        f"time.sleep(2)\nprint('through')\nopen({str(note)!r}, 'w').close()\n"
    )
    lines: list[str] = []
    launched = Launched([str(script)], survivors_stay=survivors_stay, write=lines.append)
    for who in "01":
        launched.start(who, {"WHO": who})
    assert launched.wait() == code
    assert note.exists() is ended and lines == ["[1] through"] * ended


def test_a_warning_reaches_the_workers_which_end_when_they_can(tmp_path: Path) -> None:
    """Nobody kills them after ten seconds, and their exit code counts."""
    script, ready = tmp_path / "script.py", tmp_path / "ready"
    script.write_text(
        "import signal, sys, time\nheard = []\nsignal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
        f"open({str(ready)!r}, 'w').close()\nwhile not heard: time.sleep(0.05)\n"
        "time.sleep(0.5)\nprint('left in order')\n"
    )
    lines: list[str] = []
    launched = Launched([str(script)], survivors_stay=True, write=lines.append)

    def warn() -> None:
        until = time.monotonic() + 100
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with launched.passing_on(signal.SIGTERM):
        launched.start("j0", {})
        warning = threading.Thread(target=warn)
        warning.start()
        assert launched.wait() == 0
        warning.join()
    assert lines == ["[j0] left in order"] and signal.getsignal(signal.SIGTERM) == before
