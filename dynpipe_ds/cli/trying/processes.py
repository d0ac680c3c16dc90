"""Starting the user's command, waiting as long as batches get finished, and leaving no process behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

import dynpipe_ds
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
    with (folder / "output.log").open("wb") as log:
        try:
            process = subprocess.Popen(
                command, env=_environment(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(
                f"{command[0]}: {error.strerror}; give the command that starts your script after --"
            ) from error
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        failure = _wait(process, settings, folder, timeout_s, tell)
    finally:
        _end(process, folder)
        signal.signal(signal.SIGTERM, before)
    outcome = read(folder, settings)
    outcome.failure = failure or _failure(outcome, process.returncode, folder / "output.log")
    return outcome


def _leave(number: int, _frame: object) -> None:
    """End as an interrupted command does, so that the processes of the run are ended, too."""
    raise SystemExit(128 + number)


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


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    for one in _processes(folder):
        try:
            one.kill()
        except psutil.Error:
            continue
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # those that were started with an environment of their own
    process.wait()


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
