"""The check itself: start the processes, train the reference meanwhile, compare, and say what was found."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dynpipe_ds._versions import DEEPSPEED_RANGE, LEAST_DEEPSPEED, TESTED_DEEPSPEED, is_older
from dynpipe_ds.cli.checks import Check
from dynpipe_ds.cli.numerics.compare import compare, merge
from dynpipe_ds.cli.numerics.model import COURSES, MODES, NUM_BATCHES, NUM_STAGES, Course, Mode
from dynpipe_ds.cli.numerics.rank import record_file
from dynpipe_ds.cli.numerics.record import Record, load
from dynpipe_ds.cli.numerics.reference import train_undivided
from dynpipe_ds.cli.pair import PATIENCE_S, start, wait
from dynpipe_ds.cli.running import Processes
from dynpipe_ds.ports import reserved_port

COMMAND = (sys.executable, "-m", "dynpipe_ds.cli.numerics.rank")


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
        with reserved_port() as port, Processes(folder) as processes:
            start(processes, folder, [*command, str(folder)], port)
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
