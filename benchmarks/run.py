"""Run the benchmarks one after the other and keep what they say in ``benchmarks/results/``.

python -m benchmarks.run                       the quick set, about 8 minutes on two idle cores
python -m benchmarks.run --full                everything, a little over two hours
python -m benchmarks.run --only scenarios      some of them
python -m benchmarks.run --force               write over kept results even if the machine is busy

What a busy machine measures is written beside what is kept of an idle one (benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import (
    RESULTS,
    ROOT,
    add_force,
    environment,
    force,
    head,
    in_words,
    reasons,
    remember,
    table,
)
from scenarios.machine import BUSY, Reading

_ACCELERATOR = "[real_accelerator.py:"
"""In DeepSpeed's lines about the accelerator, which no result needs."""


@dataclass(frozen=True)
class Experiment:
    """One benchmark.

    Attributes:
        name: folder of its results.
        quick: module and arguments for the quick set; empty: not part of it.
        full: the same for the full set; empty: as in the quick set.
        writes: whether it writes its results itself; else what it prints is kept as ``output.md``.
    """

    name: str
    quick: str
    full: str = ""
    writes: bool = True

    def command(self, *, full: bool) -> list[str]:
        """What to start; empty if it is not part of the set."""
        words = shlex.split(self.full or self.quick if full else self.quick)
        return [sys.executable, "-m", *words] if words else []


EXPERIMENTS = (
    Experiment("scenarios", "benchmarks.scenarios.main --quick", "benchmarks.scenarios.main"),
    Experiment("overhead", "benchmarks.overhead.main --quick"),
    Experiment("planner", "", "benchmarks.planner.main --budget 20 --samples 40", writes=False),
    Experiment("orders", "", "benchmarks.planner.orders", writes=False),
    Experiment("schedules", "", "benchmarks.schedules --stages 4"),
    Experiment("schedules_sleeping", "", "benchmarks.schedules --sleeping --stages 4"),
    Experiment("schedules_real", "", "benchmarks.schedules --real --set run.batches=32"),
    Experiment("schedules_paper", "", "benchmarks.schedules --paper"),
    Experiment("schedules_halves", "", "benchmarks.schedules --paper --halves"),
    Experiment("limits", "", "benchmarks.schedules.limits"),
    Experiment("regret", "", "benchmarks.planner.regret"),
    Experiment("regret_1000", "", "benchmarks.planner.regret --batches 1000 --stages 2 4 8"),
    Experiment("experts", "", "benchmarks.experts"),
    Experiment("experts_measured", "", "benchmarks.experts.measured"),
    Experiment("expert_parallel", "", "benchmarks.expert_parallel.main"),
    Experiment("elastic", "", "benchmarks.elastic.main pauses"),
    Experiment("layers", "", "benchmarks.layers.main --repeats 7", writes=False),
    Experiment("plain", "", "benchmarks.plain.main --pairs 30", writes=False),
    Experiment("checkpoint", "", "benchmarks.checkpoint.main --repeats 7", writes=False),
    Experiment("replay", "", "benchmarks.replay.validate"),
    Experiment("paper", "benchmarks.paper.main throughput --quick", "benchmarks.paper.main all --processes 2"),
)


def run(
    experiment: Experiment, command: Sequence[str], folder: Path, reading: Reading | None = None
) -> dict[str, Any]:
    """Run one benchmark, showing and keeping what it prints.

    Args:
        experiment: the benchmark.
        command: to start.
        folder: for all results.
        reading: of the machine, if it is known already.

    Returns:
        Its seconds and exit code, and whether its results are those of a busy machine.
    """
    print(f"\n# {experiment.name}: {' '.join(command[1:])}\n", flush=True)
    before, started = environment(reading=reading), time.perf_counter()
    before.pop("began", None)  # what happens meanwhile the benchmark itself tells
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    code = process.wait()
    told = [line.strip() for line in lines if line.startswith(BUSY)]  # by the benchmark itself
    judged = bool(told) or (not experiment.writes and bool(reasons(before)))  # who writes itself judges itself
    beside = judged and not before["forced"]
    if not experiment.writes and code == 0:
        own = folder / experiment.name
        own.mkdir(parents=True, exist_ok=True)
        rest = "".join(line for line in lines if not line.startswith(BUSY) and _ACCELERATOR not in line)
        text = "\n\n".join([*(told or head(before)), rest, in_words(before)])
        remember(before, folder / "machines.json")
        (own / ("output.busy.md" if beside else "output.md")).write_text(text + "\n", encoding="utf-8")
    return {
        "name": experiment.name, "command": " ".join(command[1:]), "seconds": time.perf_counter() - started,
        "exit_code": code, "busy": beside, "environment": before,
    }


def busy(run: dict[str, Any]) -> bool:
    """Whether a run's times are those of a busy machine, as far as is known.

    Args:
        run: of :func:`run`, or kept by an earlier version.
    """
    return bool(run.get("busy") or reasons(run["environment"]))


def overview(runs: Sequence[dict[str, Any]]) -> str:
    """The table of what ran."""
    rows = [
        [
            r["name"], f"`python {r['command']}`", f"{r['seconds'] / 60:.1f}",
            ("yes" if r["exit_code"] == 0 else f"failed ({r['exit_code']})")
            + (", on a busy machine" if busy(r) else ""),
            r["environment"]["commit"], r["environment"]["date"], str(r["environment"]["load"]),
        ]
        for r in runs
    ]
    return table(("benchmark", "command", "minutes", "done", "commit", "date", "load before"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="everything instead of the quick set")
    parser.add_argument("--only", nargs="+", choices=[e.name for e in EXPERIMENTS], help="some of them")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs = []
    for experiment in EXPERIMENTS:
        if options.only is not None and experiment.name not in options.only:
            continue
        command = experiment.command(full=options.full or (options.only is not None and not experiment.quick))
        if command:
            runs.append(run(experiment, command, RESULTS))
            keep(runs, RESULTS)  # at once: hours may be interrupted
    subprocess.run([sys.executable, "-m", "benchmarks.readme"], cwd=ROOT, check=True)
    print(f"\n{overview(runs)}\n\n{sum(r['seconds'] for r in runs) / 60:.1f} minutes; results are in {RESULTS}")
    if any(r["exit_code"] for r in runs):
        sys.exit(1)


def keep(runs: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write what ran, beside what earlier calls ran of the other benchmarks.

    What a busy machine ran is not among the results that are kept, and so not in this list either.

    Args:
        runs: of this call.
        folder: for all results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.json"
    known = {r["name"]: r for r in json.loads(path.read_text(encoding="utf-8"))} if path.is_file() else {}
    known |= {r["name"]: r for r in runs if not r["busy"]}
    merged = [known[e.name] for e in EXPERIMENTS if e.name in known]
    path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(f"# Results\n\n{overview(merged)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
