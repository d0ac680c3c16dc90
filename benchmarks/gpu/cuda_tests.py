"""The tests that are marked ``cuda``, which are skipped without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.job import Job
from benchmarks.gpu.processes import Outcome
from benchmarks.record import ROOT, table

if TYPE_CHECKING:
    import pytest

_FILE = "GPU_TEST_RESULTS"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MARKS = ("mark.cuda", "ON_DEVICES")


def files(root: Path) -> list[str]:
    """Test files in which something is marked."""
    found = (root / "tests").rglob("test_*.py")
    texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in found}
    return sorted(name for name, text in texts.items() if any(mark in text for mark in _MARKS))


def measure(job: Job) -> dict[str, Any]:
    """Run them; what was found so far counts even if the rest takes too long."""
    results = Path(job.folder) / "tests.jsonl"
    command = [
        sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "benchmarks.gpu.cuda_tests", "-p", "no:cacheprovider",
        *(files(ROOT)[:1] if job.small else files(ROOT)),
    ]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    process = subprocess.Popen(command, cwd=ROOT, env={**environment, _FILE: str(results)})
    while True:
        try:
            code = process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            job.keep({"tests": read(results), "exit_code": None})
            continue
        if code not in (0, 1):  # 1: some failed
            raise RuntimeError(f"pytest ended with {code}")
        return {"tests": read(results), "exit_code": code}


def read(path: Path) -> list[dict[str, Any]]:
    """What the plug-in has written so far."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write one line for a test that ended."""
    if report.when == "call" or report.outcome != "passed" and report.when == "setup":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        why = "".join(why.strip().splitlines()[-1:])[:300]
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "why": why}
        with open(os.environ[_FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def is_wrong(parts: dict[str, Outcome]) -> bool:
    """Whether a test failed."""
    return any(test["outcome"] == "failed" for test in parts["tests"].values.get("tests", []))


def text(parts: dict[str, Outcome]) -> str:
    """The table of the report."""
    tests = parts["tests"].values.get("tests", [])
    counts = {outcome: sum(test["outcome"] == outcome for test in tests) for outcome in ("passed", "failed", "skipped")}
    rows = [
        [f"`{test['test']}`", test["outcome"], f"{test['seconds']:.1f}", test["why"].replace("|", "\\|")]
        for test in tests
    ]
    return (
        f"`pytest -m cuda`: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}.\n\n"
        + table(("test", "outcome", "seconds", "why"), rows)
    )
