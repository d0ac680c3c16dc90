"""The processes of one run: started, waited for as long as they get on, and none of them left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

START = 5
"""How many times longer than anything else the start may take: importing, loading a model, the first batch."""

_MARK = "DYNPIPE_RUN"  # an environment variable with the folder: by it every process of the run is known
_POLL_S = 0.1
_SWEEPS, _SWEEP_S = 20, 0.05  # looks for processes that are left, and pause between them
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Processes:
    """Processes that are started for a run, and all that they start; they have ended when the block is left.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processes:
        return self

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str], **options: Any) -> None:
        """Start one, which prints into a file; further options are those of ``Popen``."""
        with log.open("wb") as stream:
            self._started.append(subprocess.Popen(
                command, env={**environment, _MARK: str(self._folder)}, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True, **options,
            ))  # fmt: skip

    def codes(self) -> list[int | None]:
        """Exit codes in the order of the starts; ``None`` of those that still run."""
        return [process.poll() for process in self._started]

    def idle_s(self, progress: Callable[[], object]) -> Iterator[float]:
        """Seconds in which nothing went on, 0 where it just did, until all have ended or one has failed.

        Args:
            progress: gives something else, and never None, whenever the processes get on.
        """
        last: object = None
        since_s = 0.0
        while None in (codes := self.codes()) and not any(codes):
            found, now_s = progress(), time.monotonic()
            if found != last:
                last, since_s = found, now_s
            yield now_s - since_s
            time.sleep(_POLL_S)

    def living(self) -> list[psutil.Process]:
        """All processes of the run, also those that a launcher has put into a session of their own."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # another user's, or gone
                if process.environ().get(_MARK) == str(self._folder):
                    found.append(process)
        return found

    def __exit__(self, *raised: object) -> None:
        """End all, and what they would leave for others to wait for."""
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDING))  # a second Ctrl-C waits
        locks: set[Path] = set()
        for _ in range(_SWEEPS):
            ended = self.living()
            for one in ended:
                with contextlib.suppress(psutil.Error):
                    locks.update(_compile_locks(one))
                with contextlib.suppress(psutil.Error):
                    one.kill()
            if not ended:
                break
            time.sleep(_SWEEP_S)  # then once more: one of them may have started another meanwhile
        for process in self._started:
            with process, contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # those that were started with an environment of their own
        for lock in locks:
            lock.unlink(missing_ok=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _compile_locks(process: psutil.Process) -> Iterator[Path]:
    """Locks of compilations that a process holds: torch keeps them open, and every later start would wait for them."""
    compiled = extensions_folder(process.environ()).resolve()
    opened = [Path(file.path) for file in process.open_files()]
    yield from (path for path in opened if path.name == "lock" and path.is_relative_to(compiled))


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """The folder that torch compiles extensions into, by its own rule; not asked of it, since it takes long to import.

    Args:
        environment: of the process that compiles.
    """
    if given := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    return Path(environment.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_extensions"


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the block as Ctrl-C does, so that nothing is left of it."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_lines(log: Path) -> str:
    """The last two lines that a process printed, as one."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-2:])[-600:] or "it printed nothing"
