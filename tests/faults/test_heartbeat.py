"""Asking each other: three answers, strangers that are not heard, machines that can't connect, threads that end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import pytest

from dynpipe_ds import FatalError
from dynpipe_ds.ranks import answering, fatal, heartbeat, place
from dynpipe_ds.ranks.answering import Address, Answer, Listener, RunningClock, ask
from dynpipe_ds.ranks.fatal import Verdict
from dynpipe_ds.ranks.guard import Guard
from dynpipe_ds.ranks.heartbeat import Heartbeat
from tests.distributed.models import Run, data, make_engine
from tests.distributed.ranks import context, run_ranks


def listen(pipe: Connection) -> None:
    """A process that does nothing but answer."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    pipe.send(Listener().address)
    time.sleep(600)


@pytest.fixture
def other() -> Iterator[tuple[int, Address]]:
    """Another process that listens, and where."""
    pipe, theirs = context.Pipe()
    process = context.Process(target=listen, args=(theirs,), daemon=True)
    process.start()
    yield process.pid, pipe.recv()
    process.kill()
    process.join()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    made = Listener()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_verdict() -> Iterator[None]:
    """The verdict of a test is not that of the next one."""
    yield
    fatal._held = None


def test_three_answers(other: tuple[int, Address]) -> None:
    pid, address = other
    assert ask({1: address}, 60.0) == {1: Answer.LIVES}
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert ask({1: address}, 0.5) == {1: Answer.SILENT}
    assert time.monotonic() - began > 0.4
    os.kill(pid, signal.SIGCONT)
    assert ask({1: address}, 60.0) == {1: Answer.LIVES}
    os.kill(pid, signal.SIGKILL)
    assert ask({1: address}, 1e6) == {1: Answer.ENDED}, "who ended is known at once"


def test_a_stopped_process_reads_later_what_it_was_told(other: tuple[int, Address]) -> None:
    pid, address = other
    told, later = Verdict((2,), "rank 2 ended: «ä»", lost=True), Verdict((1,), "rank 1 failed", lost=False)
    os.kill(pid, signal.SIGSTOP)
    assert ask({1: address}, 0.3, told) == {1: Answer.SILENT}
    os.kill(pid, signal.SIGCONT)
    assert ask({1: address}, 60.0, later) == {1: Answer.LIVES}
    assert fatal.held() == told, "the first verdict is the one that it holds"


def test_the_time_in_which_a_process_is_stopped_does_not_count() -> None:
    with patch.object(answering.time, "monotonic", iter([100.0, 100.25, 3700.0, 3700.5]).__next__):
        clock = RunningClock()
        assert [clock.tick(), clock.tick(), clock.tick()] == [0.25, 1.25, 1.75]


def test_what_was_told_before_is_read_before_anybody_is_accused(listener: Listener) -> None:
    """A rank that goes on after a stop: those who found out why have ended meanwhile, and are not the cause."""
    told, receive = Verdict((2,), "rank 2 ended", lost=True), answering._receive

    def receive_late(connection: socket.socket) -> bytes:
        time.sleep(0.3)
        return receive(connection)

    gone = Address("127.0.0.1", 1, "secret")
    waiting = Heartbeat(listener, 0, [listener.address, gone, gone], timeout_s=60.0)
    with patch.object(answering, "_receive", receive_late):
        with socket.create_connection((listener.address.host, listener.address.port)) as teller:
            teller.sendall(answering._line(listener.address.secret, told))
        assert waiting.find_lost("batch 3 was trained", newest) == told
    waiting.stop()


def test_a_world_that_was_left_answers_at_the_same_socket(listener: Listener) -> None:
    """Whatever was told there counts no more, and it costs neither a socket nor a thread."""
    left, first = Verdict((1,), "the others went on", lost=True), listener
    told = Verdict((2,), "rank 2 ended", lost=True)
    held = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        first.last_words, first = left, Listener(first)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == held
    assert ask({0: listener.address}, 5.0, told) == {0: Answer.LIVES} and fatal.held() == left
    fatal._held = None
    assert ask({0: first.address}, 5.0, told) == {0: Answer.LIVES} and fatal.held() == told
    first.close()
    assert ask({0: listener.address}, 5.0) == {0: Answer.ENDED}, "nobody is left to answer for"


def test_a_connection_stays_until_its_other_end_is_closed(listener: Listener) -> None:
    held = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        kept = answering.Standing(listener.address)
        assert ask({0: listener.address}, 5.0) == {0: Answer.LIVES} and not kept.is_broken
        assert len(os.listdir("/proc/self/fd")) <= held + 3, "both ends, and that of the one before"
        kept.close()


def test_who_leaves_on_purpose_is_not_missed(listener: Listener) -> None:
    gone = Address("127.0.0.1", 1, "secret")
    waiting = Heartbeat(listener, 0, [listener.address, gone, gone], timeout_s=60.0)
    with patch.object(heartbeat, "PATIENCE_S", 0.3):
        waiting.forget([1, 2])
        assert waiting.find_lost("layers were moved to fewer ranks", newest) is None
    waiting.stop()


def say(address: Address, line: bytes) -> bytes:
    """Say something to a listener; what it replies."""
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(line)
        with suppress(ConnectionResetError):
            return connection.recv(4096)
    return b""


VERDICT = {"ranks": [0], "text": "all end", "lost": False}
VERDICT_LINE = json.dumps(VERDICT)
STRANGERS: dict[str, Callable[[str], bytes]] = {
    "another protocol": lambda secret: b"GET / HTTP/1.1\r\n\r\n",
    "no secret": lambda secret: f"{VERDICT_LINE}\n".encode(),
    "an empty secret": lambda secret: f" {VERDICT_LINE}\n".encode(),
    "half a secret": lambda secret: f"{secret[:-1]} {VERDICT_LINE}\n".encode(),
    "half a line": lambda secret: f"{secret} {VERDICT_LINE}".encode(),
    "half a verdict": lambda secret: f'{secret} {{"ranks": [0]}}\n'.encode(),
    "no verdict": lambda secret: f'{secret} "all end"\n'.encode(),
    "no JSON": lambda secret: f"{secret} all end\n".encode(),
    "nested": lambda secret: b"[" * 60_000 + b"\n",
    "a line without end": lambda secret: b"x" * (1 << 17),
    "nothing": lambda secret: b"",
}


@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_are_not_heard(what: str, listener: Listener) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        assert say(listener.address, STRANGERS[what](listener.address.secret)) == b""
    assert ask({0: listener.address}, 5.0) == {0: Answer.LIVES}
    assert fatal.held() is None


def test_a_port_that_another_program_has_by_now() -> None:
    """Whatever it says; the process that had it has ended."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        def answer() -> None:
            stranger.accept()[0].sendall(b"220 mail\n")

        threading.Thread(target=answer, daemon=True).start()
        assert ask({1: Address(*stranger.getsockname(), "secret")}, 5.0) == {1: Answer.ENDED}


def test_where_a_process_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the master's machine its name may stand for loopback: others reach it by that name all the same."""
    for master, advertised, bound in (
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2", "127.0.0.2"),
        ("node1", "node1", "0.0.0.0"),
    ):  # fmt: skip
        monkeypatch.setenv("MASTER_ADDR", master)
        known = socket.getaddrinfo
        with patch.object(
            answering.socket, "getaddrinfo",
            lambda name, *args, **options: known("127.0.1.1" if name == "node1" else name, *args, **options),
        ):
            listener = Listener()
            assert ask({0: listener.address}, 5.0) == {0: Answer.LIVES}
        assert listener.address.host == advertised
        assert listener._server.socket.getsockname()[0] == bound
        listener.close()


def test_a_forked_worker_does_not_keep_the_socket(listener: Listener, tmp_path: Path) -> None:
    """Workers of a data loader outlive a process that is killed by seconds."""
    child = os.fork()
    if child == 0:
        with suppress(OSError):
            (tmp_path / "fileno").write_text(str(listener._server.socket.fileno()))
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "fileno").read_text() == "-1" != str(listener._server.socket.fileno())


# -- in a job ---------------------------------------------------------------------------------

ENDING = """
import gc, os, sys
from dynpipe_ds.ranks.heartbeat import Heartbeat
from dynpipe_ds.ranks.answering import Listener
gc.freeze()
for _ in range(4):
    child = os.fork()
    if child == 0:
        listener = Listener()
        heartbeat = Heartbeat(listener, 0, [listener.address], timeout_s=0.0)
        assert not heartbeat.unreachable()
        with heartbeat.watching("ending", lambda: None):
            sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.exhaustive
def test_a_process_ends_cleanly_with_its_threads() -> None:
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def newest() -> None:
    return None


class Beat:
    """A heartbeat of a rank that has no others to ask."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def watching(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self, verdict: Verdict) -> Verdict:
        return verdict


def test_a_rank_is_named_by_the_number_that_it_had_when_the_code_began() -> None:
    guard = Guard(newest)
    guard.heartbeat = Beat(2)
    with pytest.raises(FatalError, match="^rank 2 failed while layers were moved") as caught:
        with guard.no_way_back("layers were moved"):
            guard.heartbeat = Beat(1)  # re-packing has begun to watch anew, among fewer
            raise ValueError("mine")
    assert caught.value.ranks == [2]


def test_an_error_that_undid_everything_passes() -> None:
    guard = Guard(newest)
    for error in (KeyError("all is as before"), FatalError([1], "rank 1 said so")):
        with pytest.raises(type(error)) as caught, guard.unless_undone("layers were moved", KeyError):
            raise error
        assert caught.value is error and fatal.held() is None


def start_behind_a_firewall(rank: int) -> tuple[list[str], bool, str]:
    """Rank 2 can't be connected to; what is told, whether there is a heartbeat, and what a failure says."""
    original = Listener.__init__

    def init(self: Listener) -> None:
        original(self)
        if rank == 2:
            self.address = self.address._replace(port=1)

    with patch.object(Listener, "__init__", init), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guard = Guard(newest)
        guard.start()
    with pytest.raises(FatalError) as error, guard.no_way_back("layers were moved"):
        raise ValueError("mine")
    told = [str(w.message) for w in caught if "dynamic_pipeline" in str(w.message)]
    return told, guard.heartbeat is None, str(error.value)


def test_ranks_that_cannot_connect_to_each_other_are_told_what_it_means() -> None:
    results = run_ranks(start_behind_a_firewall, 3)
    assert all(none for _, none, _ in results)
    (warning,) = results[0][0]
    assert "(rank 0: no connection to rank 2)" in warning and "0:10:00" in warning
    assert not results[1][0] and not results[2][0]
    for rank, (*_, text) in enumerate(results):
        assert text.startswith(f"rank {rank} failed while layers were moved (ValueError: mine), which can't be undone")


def fail_alone(_rank: int) -> tuple[bool, str, str]:
    guard = Guard(newest)
    guard.start()
    with pytest.raises(FatalError) as first, guard.no_way_back("layers were moved"):
        raise ValueError("mine")
    engine = make_engine(Run(1))
    with pytest.raises(FatalError) as second:
        engine.train_batch(data(0, 4))
    return guard.heartbeat is None, str(first.value), str(second.value)


def test_a_single_rank() -> None:
    ((none, first, second),) = run_ranks(fail_alone, 1)
    assert none and first == second
    assert "rank 0 failed while layers were moved (ValueError: mine)" in first


def ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("dynpipe_ds"))



def shrink(rank: int) -> tuple[list[str], list[str], bool, list[str]]:
    engine = make_engine(Run(3))
    engine.train_batch(data(0, 4))
    first, before = engine.dynamic.stage.guard.heartbeat, ours()
    engine.repack(2)
    second = engine.dynamic.stage.guard.heartbeat
    assert second is not first and second.listener is first.listener and not second.unreachable()
    engine.train_batch(data(0, 4))
    between = ours()
    engine.repack(1)
    engine.dynamic.repacker.giving_back.wait()
    return before, between, engine.dynamic.stage.guard.heartbeat is None, ours()


def test_nothing_is_left_after_re_packing() -> None:
    results = [result for result in run_ranks(shrink, 3, may_leave={1, 2}) if result is not None]
    both = ["dynpipe_ds listener", "dynpipe_ds watch"]
    ((before, between, none, after),) = results
    assert before == between == both and none and not after


def test_a_store_that_does_not_answer() -> None:
    with patch.object(place, "STORE_S", 0.5), pytest.raises(RuntimeError, match="did not answer for 0.5 s") as caught:
        place.bounded(lambda: time.sleep(60))
    assert fatal.broke_connection(caught.value)
    with pytest.raises(KeyError):
        place.bounded(lambda: {}["nothing"])
