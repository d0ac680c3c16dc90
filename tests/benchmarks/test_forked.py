"""Forked ranks: what the first hands over comes as it is made; who fails is named, and nobody is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.forked import RankError, run_forked

Send = Callable[[object], None]


def _tell(send: Send, first: int) -> None:
    for number in range(first, first + 2):
        send((os.environ["RANK"], os.environ["WORLD_SIZE"], number))
    if os.environ["RANK"] == "1":
        sys.exit(0)  # as a rank that leaves


def _tell_port(send: Send) -> None:
    send(int(os.environ["MASTER_PORT"]))


def _fail(_: Send, how: str) -> None:
    if os.environ["RANK"] != "2":
        time.sleep(600)
    elif how == "raises":
        raise ValueError("a layer of mine")
    else:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_first_rank_is_heard() -> None:
    assert list(run_forked(_tell, 3, 5)) == [("0", "3", 5), ("0", "3", 6)]
    assert not multiprocessing.active_children()


def test_where_ranks_meet_is_kept_for_them() -> None:
    told = run_forked(_tell_port, 1)
    port = next(told)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    assert list(told) == []


@pytest.mark.parametrize(("how", "said"), [
    ("raises", "rank 2 of 3 ended with code 1:\n(.|\n)*ValueError: a layer of mine"),
    ("dies", "rank 2 of 3 ended with code -9:\nlast words"),
])  # fmt: skip
def test_a_rank_that_fails_alone_is_named_and_ends_the_others(how: str, said: str) -> None:
    with pytest.raises(RankError, match=said) as caught:
        list(run_forked(_fail, 3, how))
    assert "rank 0" not in str(caught.value) and not multiprocessing.active_children()


STARTER = """
from benchmarks.forked import run_forked
from tests.benchmarks.test_forked import wait_for_ever

if __name__ == "__main__":
    for pid in run_forked(wait_for_ever, 2):
        print("rank", pid, flush=True)
"""


def wait_for_ever(send: Send) -> None:
    send(os.getpid())
    time.sleep(600)


@pytest.mark.exhaustive
def test_ranks_end_with_who_started_them(tmp_path: Path) -> None:
    (tmp_path / "starter.py").write_text(STARTER)
    command = [sys.executable, str(tmp_path / "starter.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}) as starter:
        assert starter.stdout is not None
        rank = next(int(line.split()[1]) for line in starter.stdout if line.startswith("rank"))
        starter.kill()
    gone_by_s = time.monotonic() + 20
    while os.path.exists(f"/proc/{rank}") and time.monotonic() < gone_by_s:
        time.sleep(0.1)
    state = Path(f"/proc/{rank}/stat").read_text().split()[2] if os.path.exists(f"/proc/{rank}") else "gone"
    assert state in ("gone", "Z")
