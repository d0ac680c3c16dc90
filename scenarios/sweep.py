"""A sweep: jobs one after the other, each on ranks of its own, and one table of what they found.

    python -m scenarios.train --multirun scenario=freezing partition=uniform,parameters,optimal

Hydra makes the jobs out of the overrides; each has a folder ``0``, ``1``, … in ``hydra.sweep.dir``.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scenarios.launch import LaunchSettings, launch
from scenarios.report.comparison import UNKNOWN
from scenarios.report.interval import SAME_PARTITION, Estimate

_HEAD = (
    "tokens/s static", "dynamic", "speedup", "bubble static", "dynamic", "slowest / mean stage static", "dynamic",
    "re-partitions", "final loss", "bits",
)  # fmt: skip
_LAST = 5  # profiled batches at the end whose stages are compared
_ENDED = {-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT}


@dataclass
class Job:
    """One job of a sweep.

    Attributes:
        overrides: what it was started with.
        folder: its output folder.
        exit_code: the launcher's.
        results: what it wrote; ``None`` if it failed.
    """

    overrides: list[str]
    folder: Path
    exit_code: int
    results: Mapping[str, Any] | None


@dataclass
class Sweep:
    """Runs jobs, and says at the end what came out.

    Attributes:
        module: the entry that the ranks run.
        folder: of all jobs' folders.
        jobs: those that have ended.
    """

    module: str
    folder: Path = Path()
    jobs: list[Job] = field(default_factory=list)

    def run(self, folder: str, overrides: Sequence[str], settings: LaunchSettings) -> None:
        """Run one more job and wait for it; none after one that was asked to end.

        Args:
            folder: for all jobs' folders.
            overrides: of this job.
            settings: where its ranks are started.
        """
        if self.jobs and self.jobs[-1].exit_code in _ENDED:
            return
        own = self._announce(folder, overrides)
        file = own / "results.json"
        file.unlink(missing_ok=True)
        code = launch(self.module, [*overrides, f"output_dir={own}"], settings)
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        self.jobs.append(Job(list(overrides), own, code, found))

    def refuse(self, folder: str, overrides: Sequence[str], message: str) -> None:
        """Count a job that can't be started as failed.

        Args:
            folder: for all jobs' folders.
            overrides: of this job.
            message: why.
        """
        own = self._announce(folder, overrides)
        print(f"error: {message}", file=sys.stderr, flush=True)
        self.jobs.append(Job(list(overrides), own, 2, None))

    def _announce(self, folder: str, overrides: Sequence[str]) -> Path:
        self.folder = Path(folder)
        print(f"\njob {len(self.jobs)}: {' '.join(overrides)}", flush=True)
        return self.folder / str(len(self.jobs))

    def finish(self) -> int:
        """Write ``sweep.md`` and ``sweep.json``, and print the table.

        Returns:
            Exit code: 0, or 1 if a job failed.
        """
        if not self.jobs:
            return 0
        rows = table(self.jobs)
        text = markdown(rows)
        (self.folder / "sweep.md").write_text(text + "\n", encoding="utf-8")
        values = [
            {"overrides": job.overrides, "folder": str(job.folder), "exit_code": job.exit_code, **figures(job)}
            for job in self.jobs
        ]
        (self.folder / "sweep.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        print(f"\n{text}\n\ntable of all jobs: {self.folder / 'sweep.md'}", flush=True)
        failed = [str(number) for number, job in enumerate(self.jobs) if job.exit_code or job.results is None]
        if failed:
            print(f"error: job {', '.join(failed)} failed", file=sys.stderr)
        return int(bool(failed))


def figures(job: Job) -> dict[str, Any]:
    """Return what a job found, by name; empty if it failed.

    Args:
        job: a job that has ended.
    """
    if job.results is None:
        return {}
    static, dynamic = job.results["runs"]
    runs = {"static": static, "dynamic": dynamic}
    return {
        "tokens_per_s": {name: run["tokens_per_s"] for name, run in runs.items()},
        **{key: job.results[key] for key in ("same_partition", "speedup", "speedup_interval")},
        "bubble_ratio": {name: run["bubble_ratio"] for name, run in runs.items()},
        "slowest_to_mean_stage": {name: _slowest_to_mean(run["stages_s"]) for name, run in runs.items()},
        "num_rebalances": dynamic["num_rebalances"],
        "final_loss": dynamic["final_loss"],
        "losses_equal_bits": job.results["losses_equal_bits"],
    }


def table(jobs: Sequence[Job]) -> list[list[str]]:
    """Return cells, a row a job and the head first; a job is named by the overrides in which it differs.

    Args:
        jobs: all of a sweep.
    """
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    rows = [["job", *_HEAD]]
    for job in jobs:
        name = " ".join(override for override in job.overrides if override not in common) or "as configured"
        found = figures(job)
        if not found:
            rows.append([name, f"failed ({job.exit_code})", *[""] * (len(_HEAD) - 1)])
            continue
        both = ("static", "dynamic")
        rows.append([
            name, *(f"{found['tokens_per_s'][run]:,.0f}" for run in both), _speedup(found),
            *(_format(found["bubble_ratio"][run], ".1%") for run in both),
            *(_format(found["slowest_to_mean_stage"][run], ".2f") for run in both), str(found["num_rebalances"]),
            f"{found['final_loss']:.6f}", "equal" if found["losses_equal_bits"] else "DIFFER",
        ])  # fmt: skip
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Set cells as a Markdown table that is aligned as text, too; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ) + " |"
        for row in rows
    ]  # fmt: skip
    rules = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]])


def _slowest_to_mean(stages_s: Sequence[Sequence[float]]) -> float | None:
    """Busy time of the slowest stage over the mean one: median of the last batches."""
    last = [max(times) / statistics.mean(times) for times in stages_s[-_LAST:] if sum(times) > 0]
    return statistics.median(last) if last else None


def _speedup(found: Mapping[str, Any]) -> str:
    if found["speedup"] is None:
        return SAME_PARTITION if found["same_partition"] else UNKNOWN
    return Estimate(found["speedup"], *found["speedup_interval"]).text()


def _format(value: float | None, form: str, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:{form}}{unit}"
