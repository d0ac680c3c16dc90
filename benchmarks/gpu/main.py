"""Everything that one CUDA device can say, in at most ten minutes: ``make gpu``.

python -m benchmarks.gpu.main                     on the device; writes benchmarks/results/gpu/report.{md,json}
python -m benchmarks.gpu.main --device cpu        a rehearsal with small sizes, in outputs/gpu/
python -m benchmarks.gpu.main --only kernels      some of it
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu import cuda_tests, exactness, look, processes, transports
from benchmarks.gpu.kernels import SCENARIOS
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.report import write
from benchmarks.record import RESULTS, ROOT, ended, environment

MINUTES = 10.0
FACTS = "facts"  # always the first
_PATIENCE_ON_CPU = 6.0  # where a rehearsal shares two cores with other jobs
_RESERVE_S = 15.0  # for the report, and for processes that take their time to end


@dataclass(frozen=True)
class Part:
    """Processes of one measurement.

    Attributes:
        name: of this part.
        budget_s: seconds that it has at most.
        num_processes: all share the device.
        options: what they are told.
    """

    name: str
    budget_s: float
    num_processes: int = 1
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One section of the report.

    Attributes:
        name: for ``--only``.
        title: of the section.
        module: in this package, with ``measure(job)`` and ``text(parts)``.
        parts: in the order in which they run.
    """

    name: str
    title: str
    module: str
    parts: tuple[Part, ...]


# In all 585 s at worst; they rarely need it. What could hang is last in its section.
MEASUREMENTS = (
    Measurement(FACTS, "Device and versions", "facts", (Part(FACTS, 30),)),
    Measurement(
        "transports", "Two processes on one device", "transports",
        tuple(Part(name, 20, 2, {"backend": name}) for name in transports.ORDER),
    ),
    Measurement(
        "exactness", "Exactness", "exactness",
        tuple(Part(name, 35, size, {"cut": name}) for name, size in exactness.NUM_PROCESSES.items()),
    ),
    Measurement("profiling", "Profiling by events", "profiling", (Part("profiling", 45),)),
    Measurement("engines", "A pipeline of one stage", "engines", (Part("engines", 45),)),
    Measurement("moving", "Moving layers", "moving", (Part("moving", 60, 2),)),
    Measurement("tests", "Tests on CUDA", "cuda_tests", (Part("tests", 90),)),
    Measurement(
        "kernels", "Kernels of the scenarios", "kernels",
        tuple(Part(name, 60 if name == "sparse_attention" else 22, 1, {"scenario": name}) for name in SCENARIOS),
    ),
)

CHECKS = {"exactness": exactness, "tests": cuda_tests}
"""What may end well and still find something wrong."""


def run(measurement: Measurement, options: argparse.Namespace, folder: Path, backend: str) -> dict[str, Outcome]:
    """Run a measurement's parts one after the other; what fails is told, and the next one runs."""
    outcomes = {}
    for part in measurement.parts:
        left_s = options.until_s - time.time()
        if left_s < 2:
            outcomes[part.name] = Outcome({}, "not started: the time was up", 0.0)
            continue
        told = {"backend": backend, **part.options} if part.num_processes > 1 else part.options
        outcomes[part.name] = outcome = processes.run(
            measurement.module, device=options.device, small=options.device == "cpu", size=part.num_processes,
            budget_s=min(options.patience * part.budget_s, left_s), folder=folder / measurement.name / part.name,
            options=told,
        )
        name = measurement.name if part.name == measurement.name else f"{measurement.name}, {part.name}"
        how = f"FAILED: {' '.join(outcome.error.split())[:160]}" if outcome.error else "done"
        print(f"{time.time() - options.started_s:5.0f} s  {name}: {how} ({outcome.seconds:.1f} s)", flush=True)
    return outcomes


def measure_all(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, dict[str, Outcome]]:
    """Run what was asked for, and let the report be written after each measurement."""
    done: dict[str, dict[str, Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        for measurement in MEASUREMENTS:
            if not options.only or measurement.name in (FACTS, *options.only):
                found = done.get("transports", {}) if options.device == "cuda" else {}  # rehearsed is what CUDA needs
                backend = transports.chosen(found)
                done[measurement.name] = run(measurement, options, Path(folder), backend)
                save(done)
    return done


def section(measurement: Measurement, parts: dict[str, Outcome]) -> str:
    """A section's text: its tables, and what failed."""
    failed = [
        f"- *{name}* failed: {' '.join(outcome.error.split())}" for name, outcome in parts.items()
        if outcome.error and measurement.name != "transports"  # there it is a finding
    ]
    try:
        text = importlib.import_module(f"benchmarks.gpu.{measurement.module}").text(parts)
    except Exception as error:  # noqa: BLE001 - a part that is missing must not hide the others
        text = "" if failed else f"No table: {type(error).__name__}: {error}"
    return "\n\n".join(piece for piece in (text, "\n".join(failed)) if piece)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default=os.environ.get("DEVICE") or "cuda",
                        help="cpu: a rehearsal with small sizes")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which all is done; longer in a rehearsal")
    parser.add_argument("--started", type=float, default=None, help="seconds since 1970 from which they count")
    parser.add_argument("--only", nargs="+", choices=[m.name for m in MEASUREMENTS], default=[])
    parser.add_argument("--out", type=Path, default=None, help="folder of the report")
    options = parser.parse_args(words)
    options.patience = 1.0 if options.device == "cuda" else _PATIENCE_ON_CPU
    options.started_s = options.started or time.time()
    options.until_s = options.started_s + 60 * options.patience * options.minutes - _RESERVE_S
    if options.out is None:
        options.out = RESULTS / "gpu" if options.device == "cuda" else ROOT / "outputs" / "gpu"
    return options


def main(words: list[str] | None = None) -> int:
    """Measure and report.

    Returns:
        0, or 1 if something failed or bits differ, or 2 without a device.
    """
    options = arguments(words)
    if options.device == "cuda" and (line := look.why_not() or look.why_not_torch()):
        print(line, file=sys.stderr)
        return 2
    given = sys.argv[1:] if words is None else words
    about = {
        "device": options.device,
        "command": shlex.join(["python", "-m", "benchmarks.gpu.main", *given]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }

    def save(done: dict[str, dict[str, Outcome]]) -> None:
        sections = [(m.title, section(m, done[m.name])) for m in MEASUREMENTS if m.name in done]
        # Asked for in another process: this one would take memory of the device.
        found = done[FACTS][FACTS].values.get("environment") or ended(environment(looks=1))
        seconds = time.time() - options.started_s
        write(options.out, about | {"environment": found, "seconds": seconds}, sections, done)

    done = measure_all(options, save)
    print(f"the report: {options.out / 'report.md'}", flush=True)
    failed = [name for name, parts in done.items() if name != "transports" and any(o.error for o in parts.values())]
    failed += [name for name, module in CHECKS.items() if name in done and module.is_wrong(done[name])]
    if failed:
        print(f"not well: {', '.join(dict.fromkeys(failed))}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that all processes are ended
    sys.exit(main())
