"""All of it in order: the three ways, each started with a folder of ours and watched, the comparison, the reasons."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import dynpipe_ds
from dynpipe_ds.cli.command import UsageError
from dynpipe_ds.cli.running import START, Processes, last_lines
from dynpipe_ds.cli.trying import startup
from dynpipe_ds.cli.trying.outcome import Difference, Outcome, compare, read
from dynpipe_ds.cli.trying.reasons import Reason, explain
from dynpipe_ds.cli.trying.record import WHERE_ARE_YOU
from dynpipe_ds.cli.trying.settings import DEEPSPEED, MOVING, STILL, WAYS, Settings

_GRACE_S = 15.0  # for processes to end by themselves, after an error or after the last batch
_WRITE_S = 0.25  # between two looks at what ranks write when they are asked where they are
_MOST_S = 20.0  # for that, on a busy machine


@dataclass
class Trial:
    """What was found: outcomes, as far as no run failed, differences to DeepSpeed's class by way, and their reasons.

    ``moved`` is between ours with and without moves; ``None`` if one of the two failed.
    """

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    moved: Difference | None = None
    reasons: list[Reason] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the script ran all ways."""
        return len(self.outcomes) == len(WAYS) and not any(outcome.failure for outcome in self.outcomes.values())

    @property
    def equal(self) -> bool:
        """Whether all bits are, as far as the script ran."""
        return all(difference.equal for difference in self.differences.values())

    @property
    def good(self) -> bool:
        """Whether all is equal, or differs for a reason that was shown, and every layer could be carried."""
        shown = bool(self.reasons) and all(reason.shown for reason in self.reasons)
        if not self.complete or not (self.equal or shown):
            return False
        return not any(refused["failed"] for refused in self.outcomes[MOVING].told("refused"))


def carry_out(
    command: Sequence[str], settings: Settings, folder: Path, *, timeout_s: float, ask_why: bool,
    tell: Callable[[str], None],
) -> Trial:
    """Run the script all ways, compare, and run it more often to ask why something differs; one folder a run."""

    def once(way: str, changes: tuple[str, ...] = (), batches: int | None = None) -> Outcome:
        place = folder / f"run-{1 + sum(1 for _ in folder.glob('run-*'))}"
        wanted = replace(settings, way=way, changes=changes, batches=batches or settings.batches)
        return run(command, wanted, place, timeout_s=timeout_s, tell=tell)

    trial = Trial()
    for way in WAYS:
        trial.outcomes[way] = once(way)
        if trial.outcomes[way].failure:  # the next one would only fail the same way
            break
    done = {way: outcome for way, outcome in trial.outcomes.items() if not outcome.failure}
    trial.differences = {way: compare(done[DEEPSPEED], done[way]) for way in done if way != DEEPSPEED}
    if MOVING in done:
        trial.moved = compare(done[STILL], done[MOVING])
    if ask_why and not trial.equal:
        trial.reasons = explain(done, once)
    return trial


def run(
    command: Sequence[str], settings: Settings, folder: Path, *, timeout_s: float, tell: Callable[[str], None]
) -> Outcome:
    """Run the user's command once, and read what was recorded.

    It ends when nothing is finished for ``timeout_s``; :data:`START` times that up to the first batch.
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
            _ask_for_stacks(processes, outcome, folder)
            built = "the engine was built" if outcome.ranks else "the start: no pipeline engine has been built"
            last = f"batch {outcome.num_batches}" if outcome.num_batches else built
            return f"nothing was finished for {limit_s:.0f} s, after {last}"
    return ""


def _ask_for_stacks(processes: Processes, outcome: Outcome, folder: Path) -> None:
    """Let every rank that lives write where it is, and wait until all have."""
    living = {f"{os.uname().nodename}-{process.pid}": process for process in processes.living()}
    asked = [rank.name for rank in outcome.ranks if rank.name in living]
    for name in asked:
        living[name].send_signal(WHERE_ARE_YOU)
    written = [folder / f"{name}.stacks" for name in asked]
    until_s, before = time.monotonic() + _MOST_S, [-1]
    while time.monotonic() < until_s:
        time.sleep(_WRITE_S)
        sizes = [file.stat().st_size for file in written]
        if sizes == before and all(sizes):  # nothing was added since the last look
            return
        before = sizes


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
    so_far = f"after batch {outcome.num_batches};"
    if not outcome.ranks:
        so_far = "and no pipeline engine was built in a Python process that reads PYTHONPATH;"
    return f"the command ended with code {code} {so_far} last lines: {last_lines(log)}"
