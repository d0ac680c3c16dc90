"""The processes of one run of the fault storm: started, killed, joined, and all that they tell.

Processes are forked from one that has imported torch and DeepSpeed. A worker that joins then costs the others on this
machine little processor time; in a cluster, its imports run on a machine of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.forked import PRELOAD
from dynpipe_ds.ranks import ANY_PORT, reserved_port

_context = multiprocessing.get_context("forkserver")
_JOIN = "DYNPIPE_JOIN"
_PATIENCE_S = 300.0
_LOOK_S = 0.1
_CALM_END = 50  # nobody is killed in the last fiftieth of the batches: what is lost then can't be made up for


class StormRun:
    """One run, and all that its workers have told.

    Args:
        name: of the run, for messages.
        workers: that it starts with.
        num_batches: that it trains.
        wait_s: seconds that a layer's forward waits.

    Attributes:
        told: messages of all workers, in the order in which they came.
        kills: when who was killed.
    """

    def __init__(self, name: str, workers: int, num_batches: int, wait_s: float) -> None:
        self.name, self.num_batches = name, num_batches
        self.told: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []
        self._workers, self._wait_s = workers, wait_s
        self._processes: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._temporary = tempfile.TemporaryDirectory()
        self._port = ExitStack()
        self._folder = Path(self._temporary.name)
        (self._folder / "tmp").mkdir()

    def start(self) -> None:
        """Start the workers."""
        _context.set_forkserver_preload(PRELOAD)
        port = self._port.enter_context(reserved_port())
        for rank in range(self._workers):
            self._run({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._workers)}, port)

    def join(self) -> None:
        """Start a worker that joins."""
        door = str(self._folder / "door.json")
        self._run({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", _JOIN: door}, ANY_PORT)

    def _run(self, variables: dict[str, str], port: int) -> None:
        ours, theirs = _context.Pipe(duplex=False)
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables}
        training = (self.num_batches, self._wait_s, str(self._folder / "door.json"))
        process = _context.Process(
            target=_work, args=(theirs, str(self._folder), variables, training), daemon=True
        )
        process.start()
        theirs.close()
        assert process.pid is not None, "it was started"
        self._processes[process.pid] = process
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()

    def _read(self, pipe: Connection) -> None:
        while True:
            try:
                message = pipe.recv()
            except Exception:  # noqa: BLE001 - its end; of one that is killed while it tells, half a message
                return
            with self._lock:
                self.told.append(message)

    def lines(self, key: str) -> list[dict[str, Any]]:
        """What was told that has a key."""
        with self._lock:
            return [line for line in self.told if key in line]

    def newest_batch(self) -> int:
        """The last batch that some worker has told of; 0 before the first."""
        return max((line["batch"] for line in self.lines("batch")), default=0)

    def training(self) -> list[int]:
        """Process numbers of the workers that train now, by rank."""
        last = self.newest_batch()
        now = {line["rank"]: line["pid"] for line in self.lines("batch")[-200:] if line["batch"] >= last - 1}
        alive = [pid for _, pid in sorted(now.items()) if self._processes[pid].is_alive()]
        return list(dict.fromkeys(alive))

    def follow(self, choice: random.Random | None, every_s: float) -> None:
        """Wait until all processes have ended; meanwhile kill workers, and let others join.

        Args:
            choice: of whom to kill; ``None``: nobody.
            every_s: seconds between two kills.

        Raises:
            RuntimeError: if nothing is trained for a long time, or the run ends before its last batch.
        """
        due, newest, last_s = None, 0, time.monotonic()
        if choice is not None:
            self.join()
        while any(process.is_alive() for process in self._processes.values()):
            time.sleep(_LOOK_S)
            if (batch := self.newest_batch()) > newest:
                newest, last_s = batch, time.monotonic()
            if time.monotonic() - last_s > _PATIENCE_S:
                raise RuntimeError(f"{self.name}: nothing was trained for {_PATIENCE_S:g} s\n{self.errors()}")
            if choice is None or not newest:
                continue
            due = time.monotonic() + every_s if due is None else due
            if time.monotonic() >= due and self.num_batches - newest > self.num_batches // _CALM_END:
                due += every_s
                self._kill_one(choice)
        if not self.lines("digest"):
            raise RuntimeError(f"{self.name}: the run did not come to its end\n{self.errors()}")

    def _kill_one(self, choice: random.Random) -> None:
        workers = self.training()
        if len(workers) < 2:  # nobody would be left
            return
        rank = choice.randrange(len(workers))
        now_s = time.time()
        os.kill(workers[rank], signal.SIGKILL)
        self.kills.append({"time": now_s, "rank": rank, "workers": len(workers), "pid": workers[rank]})
        self.join()

    def errors(self) -> str:
        """The end of what each process wrote."""
        files = sorted(self._folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"-- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files[-8:])

    def keep_logs(self, folder: Path) -> None:
        """Write what each process wrote.

        Args:
            folder: made if it is missing.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.log"):
            (folder / f"{self.name}.{path.name}").write_bytes(path.read_bytes())

    def temporary_files(self) -> list[str]:
        """What the processes have left in their folder for temporary files."""
        return sorted(path.name for path in (self._folder / "tmp").iterdir())

    def end(self) -> None:
        """End what is left."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._temporary.cleanup()
        self._port.close()


def _work(pipe: Connection, folder: str, variables: dict[str, str], training: tuple[int, float, str]) -> None:
    file = open(f"{folder}/{os.getpid()}.log", "w", buffering=1)  # noqa: SIM115 - until the process ends
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    os.environ.update(variables, TMPDIR=f"{folder}/tmp")
    tempfile.tempdir = None  # it may have been looked up before
    threading.Thread(target=_end_with_starter, daemon=True).start()
    from benchmarks.faults.storm_job import Training, train

    code = 0
    try:
        train(Training(*training), pipe.send)
    except BaseException as error:
        code = 0 if isinstance(error, SystemExit) and not error.code else 1
        traceback.print_exc()
    file.flush()
    os._exit(code)


def _end_with_starter() -> None:
    """Who started the workers may be killed, and then nobody else ends them."""
    starter = multiprocessing.parent_process()
    if starter is not None:
        starter.join()
        os._exit(1)
