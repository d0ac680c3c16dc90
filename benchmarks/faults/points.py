"""Seconds from a kill to its detection and to the next batch, by named fault point.

python -m benchmarks.faults.points [--quick --optimizers adamw --limit-s 3000 --force]

Runs the matrix of ``tests/survive``: at each named point of the library, one rank of four is killed, and the others
must go on with the same bits. *Detection*: until the last of the others knows that a rank was lost. *Next batch*: from
then until the last of them has finished the batch that was broken off, the repeated ones before it included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import RESULTS, ROOT, add_force, environment, force, save, table

if TYPE_CHECKING:
    import pytest

NAME = "points"
DETECTION_S, NEXT_BATCH_S = 2.0, 3.0
_FILE = "FAULT_POINTS"
_SELECTED = "every_point or fewer_stages or evaluated"
_WHERE = {0: "rank 0", 1: "middle", 2: "middle", 3: "last"}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write one line for a test that ended; this file is a plug-in of the tests that it starts."""
    if report.when == "call" or report.outcome == "failed":
        line = {"test": report.nodeid, "outcome": report.outcome, **dict(report.user_properties)}
        with open(os.environ[_FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def measure(marks: str, selected: str, limit_s: float) -> list[dict[str, Any]]:
    """Run the matrix; what was found so far counts even if the rest takes too long.

    Args:
        marks: expression for pytest's ``-m``.
        selected: expression for its ``-k``.
        limit_s: seconds after which it is ended.

    Returns:
        For each test its name, outcome, and what it recorded.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "points.jsonl"
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "tests/survive/test_survive.py", "-m", marks, "-k", selected,
             "-p", "benchmarks.faults.points", "-p", "no:cacheprovider"],
            cwd=ROOT, env={**os.environ, _FILE: str(results)},
        )
        until_s = time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
        lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def row(name: str, kills: Iterable[dict[str, Any]]) -> list[str]:
    """Number of kills, median and worst of detection and of the next batch."""
    found = list(kills)
    detection_s = [kill["detection_s"] for kill in found]
    after_s = [kill["next_batch_s"] - kill["detection_s"] for kill in found]
    return [
        name, str(len(found)),
        *(f"{value:.2f}" for times in (detection_s, after_s) for value in (statistics.median(times), max(times))),
    ]


def grouped(kills: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    """A row for each group, in order of appearance."""
    names = dict.fromkeys(key(kill) for kill in kills)
    return [row(name, (kill for kill in kills if key(kill) == name)) for name in names]


def text(tests: list[dict[str, Any]]) -> str:
    """The tables: by phase, by where the rank is, by point."""
    kills = [test for test in tests if "detection_s" in test]
    failed = [test["test"] for test in tests if test["outcome"] == "failed"]
    slow = sum(kill["detection_s"] > DETECTION_S for kill in kills)
    late = sum(kill["next_batch_s"] - kill["detection_s"] > NEXT_BATCH_S for kill in kills)
    counted = (
        f"{len(tests)} tests, {len(failed)} failed; {len(kills)} kills (elsewhere the rank does not come by). "
        f"Longer than {DETECTION_S:g} s until detection: {slow} times; longer than {NEXT_BATCH_S:g} s from there to "
        f"the next batch: {late} times."
    )
    head = ["", "kills", "detection, s: median", "worst", "then to the next batch, s: median", "worst"]
    parts = [
        counted,
        *(f"FAILED: {name}" for name in failed),
        table(head, [
            *grouped(kills, lambda kill: str(kill["point"]).partition(":")[0]),
            *grouped(sorted(kills, key=lambda kill: int(kill["victim"])), lambda kill: _WHERE[kill["victim"]]),
            row("all", kills),
        ]),
        table(head, grouped(kills, lambda kill: str(kill["point"]))),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Run the matrix, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the cases of the usual suite alone")
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "zero1"), default=["adamw", "zero1"])
    parser.add_argument("--limit-s", type=float, default=10_000.0, help="after which what was found so far is kept")
    parser.add_argument("--out", type=Path, default=RESULTS / "faults")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    about = environment()
    others = {"adamw", "zero1"} - set(options.optimizers)
    selected = f"({_SELECTED})" + "".join(f" and not {name}" for name in sorted(others))
    marks = "not exhaustive" if options.quick else "exhaustive or not exhaustive"
    tests = measure(marks, selected, options.limit_s)
    if not any("detection_s" in test for test in tests):
        raise RuntimeError(f"no kill was measured: {tests}")
    save(options.out, NAME, {"environment": about, "tests": tests}, text(tests))


if __name__ == "__main__":
    main()
