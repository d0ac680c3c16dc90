"""Seconds from a kill to its detection and to the next batch, by named fault point.

python -m benchmarks.faults.points [--minutes 7.5 --whole --force]

Runs the matrix of ``tests/survive``: at a named point of the library, one rank of four is killed, and the others must
go on with the same bits. *Detection*: until the last of the others knows that a rank was lost. *Next batch*: from then
until the last of them has finished the batch that was broken off, the repeated ones before it included.

Each point is measured once, with plain AdamW, and the rank that is killed differs from point to point. Where a rank
does not come by a point, another one is tried. ``--whole`` kills rank 0, a rank in the middle and the last one at every
point, with and without ZeRO-1, and takes hours.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import RESULTS, ROOT, add_force, environment, force, save, table

if TYPE_CHECKING:
    import pytest

NAME = "points"
DETECTION_S, NEXT_BATCH_S = 2.0, 3.0
_FILE = "FAULT_POINTS"
"""Environment variable: the file that takes what tests recorded."""
_UNTIL = "FAULT_POINTS_UNTIL"
"""Environment variable: when no test is begun any more, in seconds since 1970."""
_ONCE = "FAULT_POINTS_ONCE"
"""Environment variable: whether one rank a point is enough; else empty."""
_SELECTED = "every_point or fewer_stages or evaluated"
_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 10.0
_WHERE = {0: "rank 0", 1: "middle", 2: "middle", 3: "last"}

# -- a plug-in of the tests that this file starts ---------------------------------------------

_measured: set[str] = set()
"""Points at which a rank was killed."""


def _point(item: pytest.Item) -> str:
    """Of a test the point at which a rank is killed; empty if it has none of the matrix."""
    point = _parameter(item, "point")
    return "" if point is None else str(point.name)


def _parameter(item: pytest.Item, name: str) -> Any:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin each point with another rank, and tell of all points."""
    points = list(dict.fromkeys(name for item in items if (name := _point(item))))
    _tell({"points": points})
    if not os.environ.get(_ONCE):
        return
    others = [item for item in items if _parameter(item, "optimizer") not in (None, "adamw")]
    config.hook.pytest_deselected(items=others)
    left = [item for item in items if item not in others]
    by_point = {name: [item for item in left if _point(item) == name] for name in points}
    numbered = list(enumerate(points))
    every_phase_first = numbered[::2] + numbered[1::2]  # the time may not suffice for all
    turned = [item for number, name in every_phase_first for item in _turned(by_point[name], number)]
    items[:] = [item for item in left if not _point(item)] + turned


def _turned(items: list[pytest.Item], by: int) -> list[pytest.Item]:
    first = by % len(items) if items else 0
    return items[first:] + items[:first]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what was measured already, and what the time does not suffice for."""
    import pytest

    if time.time() > float(os.environ.get(_UNTIL, "inf")):
        pytest.skip("the time is over")
    if os.environ.get(_ONCE) and _point(item) in _measured:
        pytest.skip("another rank was killed there")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write one line for a test that ended."""
    if report.when == "call" or report.outcome == "failed":
        seen = dict(report.user_properties)
        _measured.add(str(seen.get("point", "")))
        _tell({"test": report.nodeid, "outcome": report.outcome, **seen})


def _tell(line: dict[str, Any]) -> None:
    with open(os.environ[_FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# -- what starts them -------------------------------------------------------------------------


def measure(limit_s: float, *, whole: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the matrix.

    Args:
        limit_s: seconds after which no test is begun.
        whole: whether every rank is killed at every point.

    Returns:
        For each test its name, outcome, and what it recorded; and the names of all points.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "points.jsonl"
        more = {_FILE: str(results), _UNTIL: str(time.time() + limit_s), _ONCE: "" if whole else "1"}
        _adopt_orphans()
        subprocess.run(
            [sys.executable, "-m", "pytest", "tests/survive/test_survive.py", "-m", "exhaustive or not exhaustive",
             "-k", _SELECTED, "-p", "benchmarks.faults.points", "-p", "no:cacheprovider"],
            cwd=ROOT, env={**os.environ, **more}, check=False,
        )  # fmt: skip
        _wait_for_orphans()
        lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    told = [json.loads(line) for line in lines]
    points = [name for line in told for name in line.get("points", ())]
    return [line for line in told if "test" in line], points


def _adopt_orphans() -> None:
    """Make what outlives its parent a child of this process, so that its seconds count as this benchmark's own.

    The ranks' are those of the server that forks them, which ends after the tests. Only Linux knows this.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wait_for_orphans() -> None:
    until = time.monotonic() + _PATIENCE_S
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)


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


def text(tests: list[dict[str, Any]], points: Sequence[str] = ()) -> str:
    """The tables: by phase, by where the rank is, by point.

    Args:
        tests: for each its name, outcome, and what it recorded.
        points: names of all points that there are.
    """
    order = {name: number for number, name in enumerate(points)}
    kills = sorted((test for test in tests if "detection_s" in test), key=lambda kill: order.get(kill["point"], -1))
    failed = [test["test"] for test in tests if test["outcome"] == "failed"]
    slow = sum(kill["detection_s"] > DETECTION_S for kill in kills)
    late = sum(kill["next_batch_s"] - kill["detection_s"] > NEXT_BATCH_S for kill in kills)
    left = [name for name in order if name not in {kill["point"] for kill in kills}]
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
        *([f"Not measured, since no rank came by or the time was over: {'; '.join(left)}."] if left else []),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Run the matrix, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.5, help="after which nothing new is begun")
    parser.add_argument("--whole", action="store_true", help="every rank at every point, with ZeRO-1 as well")
    parser.add_argument("--out", type=Path, default=RESULTS / "faults")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    about = environment()
    tests, points = measure(float("inf") if options.whole else 60 * options.minutes, whole=options.whole)
    if not any("detection_s" in test for test in tests):
        raise RuntimeError(f"no kill was measured: {tests}")
    save(options.out, NAME, {"environment": about, "tests": tests}, text(tests, points))


if __name__ == "__main__":
    main()
