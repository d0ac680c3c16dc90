"""Starting the two processes, waiting for them as long as they get on, and leaving none behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

import dynpipe_ds
from dynpipe_ds.cli.command import last_lines
from dynpipe_ds.cli.numerics.cases import NUM_STAGES
from dynpipe_ds.cli.numerics.rank import progress_file

COMMAND = (sys.executable, "-m", "dynpipe_ds.cli.numerics.rank")

PATIENCE_S = 60.0
"""Longest time without progress: a word in a file, or a second of computing at the start, for slow imports."""

LIMIT_S = 900.0
"""Longest time in all, for a machine that is busy with other things."""


_GRACE_S = 3.0  # for the other rank to say what it thinks went wrong
_POLL_S = 0.05
_FOREIGN = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "CROSS_")  # another launcher's


class Ranks:
    """The processes of one check.

    Args:
        folder: for records, logs and signs of progress; empty.
        command: of one rank; the folder is appended.
        patience_s: seconds without progress after which they count as stuck.
    """

    def __init__(self, folder: Path, command: Sequence[str], patience_s: float) -> None:
        self._folder, self._patience_s = folder, patience_s
        self._start_s = self._last_sign_s = time.monotonic()
        self._written_s = self._computed_s = 0.0
        port = _free_port()
        self._logs = [folder / f"rank-{rank}.log" for rank in range(NUM_STAGES)]
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self._logs):
            with log.open("wb") as stream:
                self._processes.append(subprocess.Popen(
                    [*command, str(folder)], cwd=folder, env=_environment(rank, port),
                    stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT,
                ))  # fmt: skip

    def wait(self) -> str:
        """Wait until all have ended, or one has failed, or none gets on.

        Returns:
            What went wrong, in one line; empty if nothing.
        """
        while True:
            codes = [process.poll() for process in self._processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return self._failure(failed[0])
            if not any(code is None for code in codes):
                return ""
            now_s = time.monotonic()
            if self._gets_on():
                self._last_sign_s = now_s
            if now_s - self._last_sign_s > self._patience_s:
                return f"no progress for {self._patience_s:.0f} s: {self._where()}"
            if now_s - self._start_s > LIMIT_S:
                return f"not done after {LIMIT_S:.0f} s: {self._where()}"
            time.sleep(_POLL_S)

    def _gets_on(self) -> bool:
        """Whether a process wrote something, or computed for a second while it starts, since that was last so."""
        signs = [progress_file(self._folder, rank) for rank in range(NUM_STAGES)]
        written_s = max(file.stat().st_mtime for file in (*self._logs, *signs) if file.exists())
        # Once it trains, a process that waits for ever computes a little, too: its heartbeat does.
        starting = not all(sign.exists() for sign in signs)
        computed_s = sum(map(_processor_s, self._processes)) if starting else 0.0
        if written_s <= self._written_s and computed_s < self._computed_s + 1.0:
            return False
        self._written_s, self._computed_s = written_s, computed_s
        return True

    def _failure(self, first: int) -> str:
        where = self._where()
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(_POLL_S)
        told = []
        # The first to end is the cause, or is told of it: both are shown.
        for rank in sorted(range(NUM_STAGES), key=lambda rank: rank != first):
            code = self._processes[rank].poll()
            if code:
                told.append(f"rank {rank} ended with code {code}: {last_lines(self._logs[rank])}")
        return f"{where}: {'; '.join(told)}"

    def _where(self) -> str:
        signs = [self._progress(rank) for rank in range(NUM_STAGES)]
        return signs[0] if len(set(signs)) == 1 else "; ".join(f"rank {r} at {sign}" for r, sign in enumerate(signs))

    def _progress(self, rank: int) -> str:
        file = progress_file(self._folder, rank)
        return (file.read_text(encoding="utf-8") if file.exists() else "") or "the start of the processes"

    def end(self) -> None:
        """End those that still run."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


@contextmanager
def started(folder: Path, command: Sequence[str] = COMMAND, patience_s: float = PATIENCE_S) -> Iterator[Ranks]:
    """The processes, which have ended when the block is left.

    Args:
        folder: for records, logs and signs of progress; empty.
        command: of one rank; the folder is appended.
        patience_s: seconds without progress after which they count as stuck.
    """
    ranks = Ranks(folder, command, patience_s)
    try:
        yield ranks
    finally:
        ranks.end()


def _processor_s(process: subprocess.Popen[bytes]) -> float:
    """Seconds that a process has computed; 0 when it has ended."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(rank: int, port: int) -> dict[str, str]:
    """Of one rank: this Python's packages, the CPU, and nothing of a launcher around this command."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    here = Path(dynpipe_ds.__file__).parents[1]
    path = [str(here), *(os.path.abspath(p) for p in kept.get("PYTHONPATH", "").split(os.pathsep) if p)]
    return kept | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_STAGES), "LOCAL_SIZE": str(NUM_STAGES),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
