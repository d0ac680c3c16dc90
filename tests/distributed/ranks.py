"""Run a function on several gloo ranks, each a process of its own, and bring back what they return.

The one multi-process helper of the suite. Processes are forked from a server that has already imported
torch and DeepSpeed, so that starting a rank takes milliseconds. A rank that raises is reported with its
traceback; when ranks are stuck, the error names them and where they are.
"""

from __future__ import annotations

import faulthandler
import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dynpipe_ds.ports import reserved_port

DOOR = "TEST_DOOR"
"""Environment variable of all processes of a test: the file for ``elastic.door_file``."""

_WHERE_ARE_YOU = signal.SIGUSR1
_LOOK_S = 0.2  # how often to look whether all that are left are stopped
GRACE_S = 5.0  # for the others, to show errors of their own after a rank has failed

context = multiprocessing.get_context("forkserver")


class RankFailure(AssertionError):
    """Some rank raised, died or did not finish in time."""


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 240.0,
    may_die: Collection[int] = (), may_leave: Collection[int] = (), collective_s: float | None = None,
    shares_device: bool = False, newcomers: int = 0, come_again: bool = False,
) -> list[Any]:
    """Call ``function(rank, *args)`` on every rank of a gloo world.

    Args:
        function: importable by name from a test module.
        num_ranks: world size.
        *args: picklable arguments.
        timeout_s: seconds without an answer after which the ranks that are still running are named and killed.
        may_die: ranks whose end is part of the test; when all others have answered, nobody waits for one that is
            stopped (SIGSTOP).
        may_leave: ranks that may end without an answer, with exit code 0.
        collective_s: timeout of the process group; by default DeepSpeed's.
        shares_device: whether all ranks use device 0, and what they send goes through host memory on its way to gloo.
        newcomers: processes after the ranks, each alone, that are to join; the job writes its ``DOOR`` for them.
        come_again: whether for a newcomer that left, a new process comes; what it returns comes last.

    Returns:
        What the ranks returned, by rank; ``None`` for one that died or left and was allowed to, or was not needed.

    Raises:
        RankFailure: with the traceback of each rank that failed, or the stack of each that hung.
    """
    start_fork_server()
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        stay = not may_die
        world = _World(num_ranks, port, collective_s, shares_device, f"{folder}/door.json")
        ranks = [_Rank(r, world, stay, function, args, Path(folder)) for r in range(num_ranks + newcomers)]
        _collect(ranks, timeout_s, may_die, may_leave, range(num_ranks, num_ranks + newcomers * come_again))
        failures = [r.failure() for r in ranks if r.rank not in may_die]
        if any(failures):
            raise RankFailure("\n".join(text for text in failures if text))
        return [r.result for r in ranks]


def start_fork_server() -> None:
    """Start what ranks are forked from, unless it runs; a process has one, and benchmarks preload less into theirs."""
    context.set_forkserver_preload(["tests.distributed.preload"])
    forkserver.ensure_running()


class _World(NamedTuple):
    num_ranks: int
    port: int
    collective_s: float | None
    shares_device: bool
    door: str


class _Rank:
    def __init__(
        self, rank: int, world: _World, stay: bool, function: Callable[..., Any], args: Any, folder: Path
    ) -> None:
        self.rank, self.result, self.error, self.stuck = rank, None, "", False
        self.again = partial(_Rank, rank, world, stay, function, args, folder)
        self.log = folder / f"rank{rank}.log"
        self.pipe, theirs = context.Pipe(duplex=True)
        self.process = context.Process(
            target=_run, daemon=True,
            args=(theirs, str(self.log), rank, world, stay, function, args),
        )
        self.process.start()
        theirs.close()

    def receive(self) -> bool:
        """Take the rank's answer; false if it failed."""
        try:
            ok, payload = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            ok, payload = False, f"died with exit code {self.process.exitcode}\n{self.tail()}"
        if ok:
            self.result = pickle.loads(payload)
        else:
            self.error = payload
        return bool(ok)

    def is_stopped(self) -> bool:
        """Whether it was stopped, so that it will neither answer nor end."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        return False

    def write_stack(self) -> None:
        """Make the rank write to its log where it is."""
        size = self.log.stat().st_size if self.log.exists() else 0
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, _WHERE_ARE_YOU)  # type: ignore[arg-type]
        patience = time.monotonic() + 2
        while self.log.exists() and self.log.stat().st_size == size and time.monotonic() < patience:
            time.sleep(0.02)
        time.sleep(0.05)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def failure(self) -> str:
        if self.stuck:
            return f"rank {self.rank} did not finish in time; it was here:\n{self.tail()}"
        return f"rank {self.rank}: {self.error}" if self.error else ""


def _collect(
    ranks: list[_Rank], timeout_s: float, may_die: Collection[int], may_leave: Collection[int],
    come_again: Collection[int],
) -> None:
    pending = {r.pipe: r for r in ranks}
    deadline, grace = time.monotonic() + timeout_s, math.inf
    while pending and (left := deadline - time.monotonic()) > 0:
        if all(rank.rank in may_die and rank.is_stopped() for rank in pending.values()):
            break
        for pipe in wait(list(pending), timeout=min(left, _LOOK_S) if may_die else left):
            rank = pending.pop(pipe)  # type: ignore[call-overload]
            good = rank.receive()
            deadline = time.monotonic() + timeout_s
            if not good and rank.rank in may_leave and rank.process.exitcode == 0:
                rank.error = ""
                if rank.rank in come_again:
                    ranks.append(rank.again())
                    pending[ranks[-1].pipe] = ranks[-1]
            elif not good and rank.rank not in may_die:
                grace = time.monotonic() + GRACE_S  # the others may wait for it for ever
        deadline = min(deadline, grace)
    for r in pending.values():
        if r.rank in may_die:
            continue
        # After another rank's failure, those left are its victims, not the cause.
        r.stuck = not any(other.error for other in ranks if other.rank not in may_die)
        r.write_stack()
    for r in pending.values():
        r.process.kill()
    for r in ranks:
        r.pipe.close()
        r.process.join()


def _run(
    pipe: Any, log: str, rank: int, world: _World, stay: bool, function: Callable[..., Any], args: Any
) -> None:
    stream = open(log, "w", buffering=1)
    os.chdir(Path(log).parent)  # what a rank writes beside itself goes with the folder
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    faulthandler.register(_WHERE_ARE_YOU, file=stream)
    try:
        _init(rank, world)
        buffer = io.BytesIO()
        pickle.dump(function(rank, *args), buffer)
        pipe.send((True, buffer.getvalue()))
    except SystemExit as end:  # as of a worker that nobody needs
        pipe.send((end.code == 0, pickle.dumps(None) if end.code == 0 else traceback.format_exc()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        # A rank that left early would break the connections of those that are still at work.
        with suppress(EOFError, OSError):
            if stay:
                pipe.recv()
        stream.flush()
        os._exit(0)


def _init(rank: int, world: _World) -> None:
    import torch

    from dynpipe_ds.host.install import init_distributed

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world.num_ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(world.port),
    )
    os.environ[DOOR] = world.door
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    if rank >= world.num_ranks:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DYNPIPE_JOIN=world.door)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        return init_distributed("gloo")
    if world.shares_device:
        from benchmarks.gpu import staged

        staged.start(staged.NAME, rank, world.num_ranks, world.port)
        return init_distributed(staged.NAME)
    if world.collective_s is not None:  # meeting may take longer; gloo takes no other timeout later
        store = torch.distributed.TCPStore("127.0.0.1", world.port, world.num_ranks, rank == 0)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world.num_ranks, timeout=timedelta(seconds=world.collective_s)
        )
    init_distributed("gloo")
