"""The check itself: start the processes, train the reference meanwhile, compare, and say what was found."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import dynpipe_ds
from dynpipe_ds._versions import DEEPSPEED_RANGE, LEAST_DEEPSPEED, TESTED_DEEPSPEED, is_older
from dynpipe_ds.cli.checks import Check
from dynpipe_ds.cli.numerics.compare import compare, merge
from dynpipe_ds.cli.numerics.model import COURSES, MODES, NUM_BATCHES, NUM_STAGES, Course, Mode
from dynpipe_ds.cli.numerics.rank import progress_file, record_file
from dynpipe_ds.cli.numerics.record import Record, load
from dynpipe_ds.cli.numerics.reference import train_undivided
from dynpipe_ds.cli.running import START, Processes, last_lines

COMMAND = (sys.executable, "-m", "dynpipe_ds.cli.numerics.rank")

PATIENCE_S = 60.0
"""Longest time without a word in a file; :data:`START` times that until both processes train."""

_GRACE_S = 3.0  # for the other rank to say what it thinks went wrong
_FOREIGN = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "CROSS_")  # another launcher's


def check_numerics(command: Sequence[str] = COMMAND, patience_s: float = PATIENCE_S) -> list[Check]:
    """Train a small model on two processes, cut at several places, and compare it with the undivided model.

    Args:
        command: of one of the processes; a folder is appended.
        patience_s: seconds without progress after which they count as stuck, once they train.

    Returns:
        One check for each way to train, or one for each problem.
    """
    with tempfile.TemporaryDirectory(prefix="dynpipe-numerics-") as name:
        folder = Path(name)
        with Processes(folder) as processes:
            start(processes, folder, command)
            references = {mode: train_undivided(mode) for mode in MODES}
            failure = wait(processes, folder, patience_s)
        checks = [check for mode in MODES for check in check_mode(folder, mode, references[mode])]
    if failure or len({check.name for check in checks}) < len(MODES):
        checks.append(Check("numerics", "problem", failure or "the processes ended before all was trained", remedy()))
    return checks


def check_mode(folder: Path, mode: Mode, reference: Record) -> Iterator[Check]:
    """Compare the runs of one mode, as far as they were finished, with what the undivided model gave.

    One check that is ok, or all problems; nothing while runs are missing and the others agree.
    """
    runs: dict[Course, Record] = {}
    problems = []
    for course in COURSES:
        files = [record_file(folder, mode, course, rank) for rank in range(NUM_STAGES)]
        if all(file.exists() for file in files):
            runs[course], wrong = merge((load(files[0]), load(files[1])))
            problems += [f"cut {course}: {problem}" for problem in wrong]
    verdict = compare(mode, reference, runs)
    name = f"numerics {mode.name}"
    for problem in (*problems, *verdict.problems):
        yield Check(name, "problem", problem, remedy())
    if not problems and not verdict.problems and len(runs) == len(COURSES):
        yield Check(name, "ok", (
            f"{len(runs)} cuts, {NUM_BATCHES} batches: as the undivided model within {verdict.largest:.0e} "
            f"(allowed {mode.tolerance:.0e}), equal bits for every cut"
        ))  # fmt: skip


def remedy() -> str:
    """What helps against wrong numbers, by the DeepSpeed that is installed."""
    version = importlib.metadata.version("deepspeed")
    if is_older(version, LEAST_DEEPSPEED):
        return f"don't train with DeepSpeed {version}: pip install '{DEEPSPEED_RANGE}'"
    return (
        "don't train with this installation: look for changed files of DeepSpeed, torch and dynpipe_ds, or install "
        f"what was tested: pip install --force-reinstall 'deepspeed=={TESTED_DEEPSPEED}'"
    )


def start(processes: Processes, folder: Path, command: Sequence[str] = COMMAND) -> None:
    """Start both; the folder, for records, logs and signs of progress, is appended to the command."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # This Python's packages, the CPU, and nothing of a launcher around this command.
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    path = [str(Path(dynpipe_ds.__file__).parents[1])]
    path += [os.path.abspath(place) for place in kept.get("PYTHONPATH", "").split(os.pathsep) if place]
    for rank in map(str, range(NUM_STAGES)):
        environment = kept | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(NUM_STAGES), "LOCAL_SIZE": str(NUM_STAGES),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        log = folder / f"rank-{rank}.log"
        processes.start([*command, str(folder)], log, environment, cwd=folder, stdin=subprocess.PIPE)


def wait(processes: Processes, folder: Path, patience_s: float = PATIENCE_S) -> str:
    """Wait until all have ended, or one has failed, or none gets on for so many seconds; then say what went wrong."""
    signs = [progress_file(folder, rank) for rank in range(NUM_STAGES)]
    logs = [folder / f"rank-{rank}.log" for rank in range(NUM_STAGES)]
    for idle_s in processes.idle_s(lambda: [file.stat().st_mtime for file in (*signs, *logs) if file.exists()]):
        limit_s = patience_s if all(sign.exists() for sign in signs) else START * patience_s
        if idle_s > limit_s:
            return f"no progress for {limit_s:.0f} s: {_where(signs)}"
    first, where = processes.codes(), _where(signs)
    deadline_s = time.monotonic() + _GRACE_S
    while any(first) and None in processes.codes() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    # The first to end is the cause, or is told of it: both are shown.
    ended = sorted(enumerate(processes.codes()), key=lambda item: not first[item[0]])
    told = [f"rank {rank} ended with code {code}: {last_lines(logs[rank])}" for rank, code in ended if code]
    return f"{where}: {'; '.join(told)}" if told else ""


def _where(signs: Sequence[Path]) -> str:
    written = [sign.read_text(encoding="utf-8") if sign.exists() else "" for sign in signs]
    told = [text or "the start of the processes" for text in written]
    return told[0] if len(set(told)) == 1 else "; ".join(f"rank {rank} at {text}" for rank, text in enumerate(told))
