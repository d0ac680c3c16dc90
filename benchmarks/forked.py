"""Ranks that share their imports, forked from one process that has torch and DeepSpeed: many fit on one machine."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dynpipe_ds.ranks import ANY_PORT, reserved_port

_context = multiprocessing.get_context("forkserver")
PRELOAD = ["benchmarks.preload"]
_TAIL = 3000  # characters of a failed rank's output


class RankError(RuntimeError):
    """Ranks that failed, with the end of what each wrote."""


def run_forked(
    function: Callable[..., None], num_ranks: int, *args: Any, newcomers: int = 0
) -> Iterator[Any]:
    """Call ``function(send, *args)`` in processes that have the environment of a launcher's ranks.

    Args:
        function: importable by name; what the first rank hands to its ``send`` is yielded here, as it comes.
        num_ranks: how many.
        *args: picklable arguments.
        newcomers: further processes, each alone, that knock at the door which the ranks open for them.

    Raises:
        RankError: if a rank raises or dies; the others are ended.
    """
    _context.set_forkserver_preload(PRELOAD)
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(number) for number in range(num_ranks + newcomers)]
        ours, theirs = _context.Pipe(duplex=False)
        places = [_place(rank, num_ranks, port, f"{folder}/door.json" * bool(newcomers)) for rank in range(len(logs))]
        ranks = [
            _context.Process(target=_run, args=(place, number == 0, str(log), theirs, function, args), daemon=True)
            for number, (place, log) in enumerate(zip(places, logs, strict=True))
        ]
        try:
            for rank in ranks:
                rank.start()
            theirs.close()
            running = {rank.sentinel: rank for rank in ranks}
            while running:
                ready = wait([*running, ours] if not ours.closed else [*running])
                if ours in ready:
                    yield from _received(ours)
                for sentinel in running.keys() & set(ready):
                    running.pop(sentinel).join()  # type: ignore[index]
                failed = [number for number, rank in enumerate(ranks) if rank.exitcode]
                if failed:  # one by itself, or others already by its connections: all tell
                    raise RankError("\n".join(
                        f"rank {number} of {num_ranks} ended with code {ranks[number].exitcode}:\n"
                        + logs[number].read_text(errors="replace")[-_TAIL:] for number in failed
                    ))
            if not ours.closed:
                while ours.poll():
                    yield ours.recv()
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.join()


def _received(pipe: Connection) -> Iterator[Any]:
    try:
        while pipe.poll():
            yield pipe.recv()
    except EOFError:
        pipe.close()


def _place(number: int, num_ranks: int, port: int, door: str) -> dict[str, str]:
    """What a process finds in its environment; who comes after the ranks is to join them."""
    joins = number >= num_ranks
    rank, size, meets_at = (0, 1, ANY_PORT) if joins else (number, num_ranks, port)
    place = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meets_at),
    }  # fmt: skip
    return {**place, "DYNPIPE_JOIN" if joins else "DYNPIPE_DOOR_FILE": door} if door else place


def _run(
    place: dict[str, str], leads: bool, log: str, pipe: Connection, function: Callable[..., None], args: Any
) -> None:
    file = open(log, "w", buffering=1)  # noqa: SIM115 - until the process ends
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    os.environ.update(place)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        function(pipe.send if leads else _nowhere, *args)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            os._exit(0)
        traceback.print_exc()
        file.flush()
        os._exit(1)
    file.flush()
    os._exit(0)


def _end_with_starter() -> None:
    """Who started the ranks may be killed, and then nobody else ends them."""
    starter = multiprocessing.parent_process()
    if starter is not None:
        wait([starter.sentinel])
        os._exit(1)


def _nowhere(value: Any) -> None:
    """What other ranks measured is not needed."""
