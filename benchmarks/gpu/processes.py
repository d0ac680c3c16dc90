"""Running a measurement's processes for a limited time, so that one that fails or hangs harms no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import Job
from benchmarks.record import ROOT
from dynpipe_ds.ranks import reserved_port

_GRACE_S = 3.0  # for the others' own errors, after one process failed
_ERROR_CHARS = 1000


@dataclass(frozen=True)
class Outcome:
    """What came of some processes.

    Attributes:
        values: what the first one measured, which may be a part; empty if nothing.
        error: why they did not end well; empty if they did.
        seconds: from start to end.
    """

    values: dict[str, Any]
    error: str
    seconds: float


def run(
    module: str, *, device: str, small: bool, size: int, budget_s: float, folder: Path, options: dict[str, str]
) -> Outcome:
    """Run one process, or several that share device 0, and end them when their time is up.

    Args:
        module: in this package, with a ``measure(job)``.
        device: ``"cuda"`` or ``"cpu"``.
        small: whether sizes are those of a rehearsal.
        size: how many processes.
        budget_s: seconds that they have.
        folder: for their files; made if it is missing.
        options: what the measurement is told.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    until_s = time.time() + budget_s
    with reserved_port() as port:
        jobs = [Job(module, device, small, rank, size, port, until_s, str(folder), options) for rank in range(size)]
        processes = [_start(job) for job in jobs]
        try:
            error = _wait(processes, jobs, budget_s)
        finally:
            for process in processes:
                _end(process)
    path = jobs[0].values_path
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return Outcome(values, error, time.monotonic() - started)


def _start(job: Job) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, "DS_ACCELERATOR": job.device, "OMP_NUM_THREADS": "1", "RANK": str(job.rank), "LOCAL_RANK": "0",
        "WORLD_SIZE": str(job.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    with open(_log(job), "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", job.to_json()], cwd=ROOT, env=environment, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,  # its compilers end with it
        )


def _log(job: Job) -> Path:
    return Path(job.folder) / f"log{job.rank}.txt"


def _wait(processes: list[subprocess.Popen[bytes]], jobs: list[Job], budget_s: float) -> str:
    """Wait for all; why they did not end well, or nothing."""
    deadline, is_up = time.monotonic() + budget_s, False
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) and not is_up:
            is_up, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    failed = [_why(process, job) for process, job in zip(processes, jobs, strict=True) if process.poll()]
    if failed:
        return "; ".join(failed)
    if any(process.poll() is None for process in processes):
        return f"not done in {budget_s:.0f} s and ended"
    return ""


def _why(process: subprocess.Popen[bytes], job: Job) -> str:
    who = f"process {job.rank}: " if job.size > 1 else ""
    if job.error_path.is_file():
        return who + job.error_path.read_text(encoding="utf-8")[:_ERROR_CHARS]
    lines = _log(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    return f"{who}ended with {process.returncode} ({' / '.join(lines)[-_ERROR_CHARS:]})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
