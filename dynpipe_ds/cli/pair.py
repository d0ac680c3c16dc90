"""Two processes of the CPU that train together, for a command that waits for them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import dynpipe_ds
from dynpipe_ds.cli.running import START, Processes, last_lines

NUM_RANKS = 2

PATIENCE_S = 60.0
"""Longest time without a word in a file; :data:`START` times that until both processes train."""

_GRACE_S = 3.0  # for the other rank to say what it thinks went wrong
_FOREIGN = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "CROSS_")  # another launcher's


def progress_file(folder: Path, rank: int) -> Path:
    """Where a rank says what it is at."""
    return folder / f"progress-{rank}"


def start(processes: Processes, folder: Path, command: Sequence[str], port: int) -> None:
    """Start both, which meet at a port; the folder is for what they leave: records, logs and signs of progress."""
    # This Python's packages, the CPU, and nothing of a launcher around this command.
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    path = [str(Path(dynpipe_ds.__file__).parents[1])]
    path += [os.path.abspath(place) for place in kept.get("PYTHONPATH", "").split(os.pathsep) if place]
    for rank in map(str, range(NUM_RANKS)):
        environment = kept | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(NUM_RANKS), "LOCAL_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        log = folder / f"rank-{rank}.log"
        processes.start(command, log, environment, cwd=folder, stdin=subprocess.PIPE)


def wait(
    processes: Processes, folder: Path, patience_s: float = PATIENCE_S, look: Callable[[], None] = lambda: None
) -> str:
    """Wait until all have ended, or one has failed, or none gets on for so many seconds; then say what went wrong.

    Meanwhile ``look`` is called over and over, and once when all is over.
    """
    signs = [progress_file(folder, rank) for rank in range(NUM_RANKS)]
    logs = [folder / f"rank-{rank}.log" for rank in range(NUM_RANKS)]
    for idle_s in processes.idle_s(lambda: [file.stat().st_mtime for file in (*signs, *logs) if file.exists()]):
        look()
        limit_s = patience_s if all(sign.exists() for sign in signs) else START * patience_s
        if idle_s > limit_s:
            return f"no progress for {limit_s:.0f} s: {_where(signs)}"
    look()
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
