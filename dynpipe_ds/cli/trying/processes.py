"""Starting the user's command, waiting as long as batches get finished, and leaving no process behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

import dynpipe_ds
from dynpipe_ds.cli.checks import extensions_folder
from dynpipe_ds.cli.command import UsageError, last_lines
from dynpipe_ds.cli.trying import startup
from dynpipe_ds.cli.trying.outcome import Outcome, read
from dynpipe_ds.cli.trying.record import WHERE_ARE_YOU
from dynpipe_ds.cli.trying.settings import Settings

_MARK = "DYNPIPE_TRY"  # an environment variable with the folder: by it every process of the run is known
START = 5
"""How many times longer than a batch the start may take: importing, loading a model, the first batch."""

_POLL_S = 0.2
_GRACE_S = 15.0  # for processes to end by themselves, after an error or after the last batch
_WRITE_S = 1.0  # for stacks to be written
_SWEEPS, _SWEEP_S = 20, 0.05  # looks for processes that are left, and pause between them
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def run(
    command: Sequence[str], settings: Settings, folder: Path, *, timeout_s: float, tell: Callable[[str], None]
) -> Outcome:
    """Run the user's command once.

    Args:
        command: as the user starts the script.
        settings: of the run.
        folder: for what is recorded; made.
        timeout_s: longest time in which nothing is finished, :data:`START` times that up to the first batch.
        tell: given a line about how far it is.

    Returns:
        What was recorded.

    Raises:
        UsageError: if there is no such command.
    """
    folder.mkdir(parents=True)
    shutil.copy(startup.__file__, folder / "sitecustomize.py")
    (folder / "package.txt").write_text(str(Path(dynpipe_ds.__file__).parents[1]), encoding="utf-8")
    settings.save(folder)
    process = None
    try:
        process = _start(command, folder)
        failure = _wait(process, settings, folder, timeout_s, tell)
    finally:
        _end(process, folder)
    outcome = read(folder, settings)
    outcome.failure = failure or _failure(outcome, process.returncode, folder / "output.log")
    return outcome


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the block as Ctrl-C does, so that nothing is left of it."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output.log").open("wb") as log:
        try:
            return subprocess.Popen(
                command, env=_environment(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"{command[0]}: {error.strerror}; give the command that starts your script after --"
            ) from error


def _environment(folder: Path) -> dict[str, str]:
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), _MARK: str(folder)}


def _wait(
    process: subprocess.Popen[bytes], settings: Settings, folder: Path, timeout_s: float, tell: Callable[[str], None]
) -> str:
    """Until the command has ended, or need not go on, or does not: then why."""
    size, since = -1, time.monotonic()
    outcome = Outcome(settings)
    while process.poll() is None:
        time.sleep(_POLL_S)
        now, found = time.monotonic(), sum(file.stat().st_size for file in folder.glob("*.events"))
        if found != size:
            size, since, outcome = found, now, read(folder, settings)
            tell(f"{settings.named}: batch {outcome.num_batches} of {settings.batches}")
        if (outcome.complete or outcome.errors) and now - since > min(_GRACE_S, timeout_s):
            return ""
        limit_s = timeout_s if outcome.num_batches else START * timeout_s
        if now - since > limit_s:
            _ask_for_stacks(folder, outcome)
            return f"nothing was finished for {limit_s:.0f} s, after {_finished(outcome)}"
    return ""


def _finished(outcome: Outcome) -> str:
    if not outcome.ranks:
        return "the start: no pipeline engine has been built"
    return f"batch {outcome.num_batches}" if outcome.num_batches else "the engine was built"


def _ask_for_stacks(folder: Path, outcome: Outcome) -> None:
    for rank in outcome.ranks:
        host, _, pid = rank.name.rpartition("-")
        if int(pid) in {process.pid for process in _processes(folder)} and host == os.uname().nodename:
            os.kill(int(pid), WHERE_ARE_YOU)
    time.sleep(_WRITE_S)


def _processes(folder: Path) -> list[psutil.Process]:
    """All processes of the run, also those that a launcher has put into a session of their own."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == str(folder):
                found.append(process)
        except psutil.Error:  # another user's, or gone
            continue
    return found


def _end(process: subprocess.Popen[bytes] | None, folder: Path) -> None:
    """End all processes of the run, and what they would leave for others to wait for."""
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDING))  # a second Ctrl-C waits
    locks: set[Path] = set()
    for _ in range(_SWEEPS):
        ended = _processes(folder)
        for one in ended:
            locks.update(_compile_locks(one))
            with contextlib.suppress(psutil.Error):
                one.kill()
        if not ended:
            break
        time.sleep(_SWEEP_S)  # then once more: one of them may have started another meanwhile
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # those that were started with an environment of their own
        process.wait()
    for lock in locks:
        lock.unlink(missing_ok=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _compile_locks(process: psutil.Process) -> Iterator[Path]:
    """Locks of compilations that a process holds: torch keeps them open, and every later start would wait for them."""
    try:
        opened = [Path(file.path) for file in process.open_files()]
    except psutil.Error:
        return
    compiled = extensions_folder().resolve()
    yield from (path for path in opened if path.name == "lock" and path.is_relative_to(compiled))


def _failure(outcome: Outcome, code: int, log: Path) -> str:
    """Why a run whose command has ended has not shown what it should; empty if it has."""
    if outcome.errors:
        return outcome.errors[0]
    if outcome.settings.dynamic and not all(rank.facts["ours"] for rank in outcome.ranks):
        return (
            f"the script's module is a {outcome.facts['module']}, which is not derived from PipelineModule by the "
            "script itself; derive it from dynpipe_ds.DynamicPipelineModule"
        )
    if outcome.complete:
        return "" if outcome.num_batches else "the script trained no batch: train_batch of its engine was not called"
    if not outcome.ranks:
        return (
            f"the command ended with code {code} and no pipeline engine was built in a Python process that reads "
            f"PYTHONPATH; last lines: {last_lines(log)}"
        )
    return f"the command ended with code {code} after batch {outcome.num_batches}; last lines: {last_lines(log)}"
