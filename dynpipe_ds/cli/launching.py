"""Processes of a training on this machine: started, their output forwarded, and survivors left alone if wanted.

Other launchers end all processes of a machine as soon as one fails, and know of no process that comes later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

from dynpipe_ds.joining.address import JOIN
from dynpipe_ds.ports import ANY_PORT

_POLL_S = 0.1
_GRACE_S = 10.0  # for the others, to show errors of their own and to end by themselves
_SCRIPT = ".py"


class Launched:
    """Processes that belong together.

    Args:
        command: a script and its arguments; what does not end in ``.py`` is run as it is.
        survivors_stay: whether the others go on when one fails.
        write: takes lines of output, each with the name of the process before it.
    """

    def __init__(
        self, command: Sequence[str], *, survivors_stay: bool = False, write: Callable[[str], object] | None = None
    ) -> None:
        is_script = command[0].endswith(_SCRIPT)
        self._command = [sys.executable, "-u", *command] if is_script else list(command)
        self._survivors_stay = survivors_stay
        self._write = write or _print
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []

    def start(self, name: str, environment: Mapping[str, str]) -> None:
        """Start one.

        Args:
            name: stands before its lines.
            environment: variables besides those of this process.
        """
        process = subprocess.Popen(
            self._command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", bufsize=1,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=self._forward, args=(name, process.stdout), daemon=True)
        reader.start()
        self._processes[name] = process
        self._readers.append(reader)

    def _forward(self, name: str, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._write(f"[{name}] {line.rstrip()}")

    @contextmanager
    def passing_on(self, *signals: signal.Signals) -> Iterator[None]:
        """Inside, what a scheduler tells this process goes to those that were started, which know what to do."""
        before = {number: signal.signal(number, self._tell) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self, number: int, _frame: FrameType | None) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def wait(self) -> int:
        """Wait until all have ended.

        Returns:
            0 if training came to its end: nobody failed, or, where survivors stay, the last to end did not. Else the
            exit code of who failed, as a shell counts signals.
        """
        running, last = dict(self._processes), 0
        try:
            while running:
                for name, process in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[name]
                    last = code if self._survivors_stay else last or code
                    if code and not self._survivors_stay:
                        self._end(list(running.values()))
                        running = {}
                        break
                time.sleep(_POLL_S)
        except BaseException:
            self._end(list(running.values()))
            raise
        for reader in self._readers:
            reader.join(_GRACE_S)
        return 128 - last if last < 0 else last

    def _end(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        """Let those that still run end, then end them."""
        until = time.monotonic() + _GRACE_S
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with suppress(ProcessLookupError):
                    process.send_signal(number)
            while any(process.poll() is None for process in processes) and time.monotonic() < until:
                time.sleep(_POLL_S)
        for process in processes:
            process.wait()


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What a rank of a job on this machine finds in its environment.

    Args:
        rank: its number.
        num_ranks: of the job.
        port: where the ranks meet.
    """
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }


def newcomer_environment(door: str, local_rank: int) -> dict[str, str]:
    """What a process finds that is to join.

    Args:
        door: where to knock.
        local_rank: which of this machine's devices it uses.
    """
    alone = rank_environment(0, 1, ANY_PORT)
    return {**alone, "LOCAL_RANK": str(local_rank), JOIN: door}


_lock = threading.Lock()


def _print(line: str) -> None:
    with _lock:
        print(line, flush=True)
