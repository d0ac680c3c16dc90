"""One run of the user's command: started with a folder of ours, watched, and read."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import dynpipe_ds
from dynpipe_ds.cli.command import UsageError
from dynpipe_ds.cli.running import START, Processes, last_lines
from dynpipe_ds.cli.trying import startup
from dynpipe_ds.cli.trying.outcome import Outcome, read
from dynpipe_ds.cli.trying.record import WHERE_ARE_YOU
from dynpipe_ds.cli.trying.settings import Settings

_GRACE_S = 15.0  # for processes to end by themselves, after an error or after the last batch
_WRITE_S = 1.0  # for stacks to be written


def run(
    command: Sequence[str], settings: Settings, folder: Path, *, timeout_s: float, tell: Callable[[str], None]
) -> Outcome:
    """Run the user's command once, and read what was recorded.

    Args:
        command: as the user starts the script.
        settings: of the run.
        folder: for what is recorded; made.
        timeout_s: longest time in which nothing is finished, :data:`START` times that up to the first batch.
        tell: given a line about how far it is.

    Raises:
        UsageError: if there is no such command.
    """
    folder.mkdir(parents=True)
    shutil.copy(startup.__file__, folder / "sitecustomize.py")
    (folder / "package.txt").write_text(str(Path(dynpipe_ds.__file__).parents[1]), encoding="utf-8")
    settings.save(folder)
    log = folder / "output.log"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Processes(folder) as processes:
        try:
            processes.start(command, log, {**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL)
        except OSError as error:
            remedy = "give the command that starts your script after --"
            raise UsageError(f"{command[0]}: {error.strerror}; {remedy}") from error
        failure = _wait(processes, settings, folder, timeout_s, tell)
    outcome = read(folder, settings)
    outcome.failure = failure or _failure(outcome, processes.codes()[0], log)
    return outcome


def _wait(
    processes: Processes, settings: Settings, folder: Path, timeout_s: float, tell: Callable[[str], None]
) -> str:
    """Until the command has ended, or need not go on, or does not: then why."""
    outcome = Outcome(settings)
    for idle_s in processes.idle_s(lambda: sum(file.stat().st_size for file in folder.glob("*.events"))):
        if not idle_s:
            outcome = read(folder, settings)
            tell(f"{settings.named}: batch {outcome.num_batches} of {settings.batches}")
        if (outcome.complete or outcome.errors) and idle_s > min(_GRACE_S, timeout_s):
            return ""
        limit_s = timeout_s if outcome.num_batches else START * timeout_s
        if idle_s > limit_s:
            _ask_for_stacks(processes, outcome)
            return f"nothing was finished for {limit_s:.0f} s, after {_finished(outcome)}"
    return ""


def _finished(outcome: Outcome) -> str:
    if not outcome.ranks:
        return "the start: no pipeline engine has been built"
    return f"batch {outcome.num_batches}" if outcome.num_batches else "the engine was built"


def _ask_for_stacks(processes: Processes, outcome: Outcome) -> None:
    living = {f"{os.uname().nodename}-{process.pid}": process for process in processes.living()}
    for rank in outcome.ranks:
        if rank.name in living:
            living[rank.name].send_signal(WHERE_ARE_YOU)
    time.sleep(_WRITE_S)


def _failure(outcome: Outcome, code: int | None, log: Path) -> str:
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
    so_far = f"after batch {outcome.num_batches}"
    if not outcome.ranks:
        so_far = "and no pipeline engine was built in a Python process that reads PYTHONPATH"
    return f"the command ended with code {code} {so_far}; last lines: {last_lines(log)}"
