"""Replay in virtual time against the simulator, and against sleeping replay, on 2 and 4 stages.

    python -m benchmarks.replay.validate            # 8 minutes on two idle cores
    python -m benchmarks.replay.validate --quick    # 3 minutes

Every run is made three times. In virtual time without overheads, each batch is compared with what the simulator says
of its partition and order: both know the layers' declared seconds alone. In virtual time with the calibrated overheads,
the whole run is compared with a run whose layers sleep, on this machine, now; moved bytes are then those of the
replay's small layers in both. Static runs compare batches; runs that re-partition also profiles, decisions and moves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.paper.report import Report, plot_predictions
from benchmarks.record import add_force, environment, force
from benchmarks.replay.case import WARM_UP, Case, Result
from benchmarks.replay.run import run_cases

SCENARIOS = ("pruning", "freezing", "early_exit", "moe", "mod", "sparse_attention")
METHODS = ("static uniform", "static uniform, planned order", "optimal:time")
TO_SIMULATOR, TO_SLEEPING = 0.01, 0.03
"""How far virtual time may be off."""


@dataclass(frozen=True)
class Comparison:
    """One case.

    Args:
        case: the run, sleeping.
        sleeping_s: seconds of its timed batches, everything included.
        virtual_s: the same in virtual time, overheads included.
        simulated_error: largest relative difference of a batch in virtual time to the simulator's, without overheads.
        moves: re-partitions, sleeping and in virtual time.
        machine_s: what both took.
    """

    case: Case
    sleeping_s: float
    virtual_s: float
    simulated_error: float
    moves: tuple[int, int]
    machine_s: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative difference of virtual time to sleeping replay."""
        return self.virtual_s / self.sleeping_s - 1


def simulated_error(free: Result) -> float:
    """Largest relative difference of a batch to what the simulator says of it.

    Args:
        free: a run in virtual time, without overheads.
    """
    return max(abs(engine_s / s - 1) for engine_s, s in zip(free.engine_s, free.told_s, strict=True))


def run(stages: Sequence[int], batches: int, layer_ms: float, scenarios: Sequence[str]) -> Iterator[Comparison]:
    """Replay and compare.

    Args:
        stages: numbers of stages.
        batches: of a run.
        layer_ms: forward and backward milliseconds of a mean layer.
        scenarios: load models.
    """
    for num_stages in stages:
        cases = [
            Case(f"model:{name}:24", method, num_stages, 2 * num_stages, batches, layer_ms, every=2, clock="sleeping")
            for name in scenarios for method in METHODS
        ]
        everything = [
            *cases, *(replace(case, clock="virtual", costs="unscaled") for case in cases),
            *(replace(case, clock="virtual", costs="none") for case in cases),
        ]
        results = list(run_cases(everything))
        for sleeping, virtual, free in zip(*(results[i : i + len(cases)] for i in range(0, 3 * len(cases), len(cases))),
                                           strict=True):
            yield Comparison(
                sleeping.case, sleeping.wall_s, virtual.wall_s, simulated_error(free),
                (len(sleeping.moves), len(virtual.moves)), (sleeping.machine_s, virtual.machine_s),
            )


HEADER = (
    "| stages | micro-batches | trace | method | sleeping, s | virtual, s | virtual to sleeping "
    "| virtual to simulator, worst batch | moves sleeping, virtual | machine's seconds sleeping, virtual |\n"
    + "|---" * 10 + "|"
)


def row(c: Comparison) -> str:
    """A line of the table.

    Args:
        c: the case.
    """
    return (
        f"| {c.case.num_stages} | {c.case.num_micro_batches} | {c.case.trace} | {c.case.method} | {c.sleeping_s:.3f} "
        f"| {c.virtual_s:.3f} | {c.error:+.1%} | {c.simulated_error:.1e} | {c.moves[0]}, {c.moves[1]} "
        f"| {c.machine_s[0]:.1f}, {c.machine_s[1]:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batches", type=int)
    parser.add_argument("--layer-ms", type=float, default=15.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/paper"))
    add_force(parser)
    options = parser.parse_args()
    force(options)
    report = Report("simulator", options.out, "replay", quick=options.quick, machine=environment())
    print(HEADER)
    found = []
    for comparison in run(
        options.stages, options.batches or (8 if options.quick else 10),
        options.layer_ms, SCENARIOS[:3] if options.quick else SCENARIOS,
    ):
        found.append(comparison)
        print(row(comparison), flush=True)
    report.title = "Replay in virtual time, the simulator, and sleeping replay"
    report.text = (__doc__ or "").split("\n\n")[2]
    report.table = "\n".join([HEADER, *map(row, found)])
    report.notes = [
        f"Goals: within {TO_SIMULATOR:.0%} of the simulator, reached in "
        f"{sum(c.simulated_error <= TO_SIMULATOR for c in found)} of {len(found)} cases; within {TO_SLEEPING:.0%} of "
        f"sleeping replay, reached in {sum(abs(c.error) <= TO_SLEEPING for c in found)}.",
        f"Seconds are of batches {WARM_UP + 1} to the last, everything included. Sleeping runs decide by what they "
        "measured, so they may move at another batch than a run in virtual time.",
    ]
    report.values = [json.loads(json.dumps(asdict(c))) for c in found]
    report.save(lambda path: plot_predictions(path, found, TO_SLEEPING))


if __name__ == "__main__":
    main()
