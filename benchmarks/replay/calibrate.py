"""Measure what everything but the layers takes, once: the constants of replay in virtual time.

    python -m benchmarks.replay.calibrate            # a minute on two idle cores; rewrites calibration.json beside it

Sleeping replay on two stages says how much longer than told a forward, a backward and the second part of a split one
through a stage, an optimizer step and a batch are, and what each kind of the library's work takes; a message takes what
is then missing between the simulated and the measured batch. Two are not measured but stated: the speed of moved
bytes, 10 GB/s, four fifths of a 100 Gbit/s link, and that planning is as fast as it says itself.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.record import add_force, ended, environment, force, head, in_words, stem
from benchmarks.replay.case import CALIBRATION, WARM_UP, Case, Result
from benchmarks.replay.clocks import Costs
from benchmarks.replay.run import run_cases
from dynpipe_ds.simulation import simulate

BYTES_PER_S = 10e9
PLANNING_SPEED = 1.0
_STEPS = 40  # of bisection
_LONGEST_S = 0.1  # a message


def cases(num_stages: int = 2, layer_ms: float = 15.0, batches: int = 12) -> list[Case]:
    """What is run: equal layers that stay, the same in a planned order, then what makes the library do its work.

    Args:
        num_stages: S.
        layer_ms: of a mean layer.
        batches: of a run.
    """
    def case(trace: str, method: str, **options: object) -> Case:
        return Case(
            f"model:{trace}:24", method, num_stages, 2 * num_stages, batches, layer_ms, clock="sleeping",
            **options,  # type: ignore[arg-type]
        )

    return [
        case("dense", "static uniform"), case("dense", "static uniform, planned order"),
        case("freezing", "optimal:time"), case("early_exit", "optimal:time"),
        case("pruning", "optimal:time"), case("dense", "static uniform", leaves=((batches // 2, 1),)),
    ]


def costs_of(results: list[Result]) -> Costs:
    """The constants that runs of :func:`cases` came to.

    Args:
        results: theirs, in order.
    """
    dense, split, *others = results
    forward_s, backward_s = late_s(dense)
    found: dict[str, list[float]] = {}
    for result in (dense, *others):  # planning an order takes as long as its budget lets it, and is not charged
        for kind, seconds in result.works_s.items():
            found.setdefault(kind, []).append(seconds)
    work_s = {kind: median(seconds) for kind, seconds in sorted(found.items())}
    engine_s = median(dense.engine_s[WARM_UP:])
    between_s = median(dense.timed_batches_s) - engine_s - work_s["profile"] - work_s["observe"]
    known = Costs(
        forward_s=forward_s, backward_s=backward_s, weight_s=late_weight_s(split), step_s=min(dense.step_s),
        batch_s=max(0.0, between_s),
        work_s=work_s, bytes_per_s=BYTES_PER_S, planning_speed=PLANNING_SPEED,
    )
    return Costs(**{**asdict(known), "message_s": _message_s(dense.case, dense.first_boundaries, known, engine_s)})


def late_s(result: Result) -> tuple[float, float]:
    """By how much a forward and a backward through a stage are longer than told: medians over stages and batches.

    Args:
        result: of a sleeping run on its first partition.
    """
    trace, case = result.case.load_trace(), result.case
    late: tuple[list[float], list[float]] = ([], [])
    for batch in range(WARM_UP, case.num_batches):
        moment = trace.at(batch, case.num_batches)
        for low, high in pairwise(result.first_boundaries):
            measured = np.sum(result.layers_s[batch][low:high], axis=0)
            late[0].append(float(measured[0] - sum(moment.forward_s[low:high])))
            late[1].append(float(measured[1] - sum(moment.backward_s[low:high])))
    return max(0.0, median(late[0])), max(0.0, median(late[1]))


def late_weight_s(result: Result) -> float:
    """By how much the second part of a backward through a stage is longer than told: the median.

    Args:
        result: of a sleeping run on its first partition that splits backwards in some batches.

    Raises:
        ValueError: if it splits none.
    """
    trace, case, late = result.case.load_trace(), result.case, []
    for batch in range(WARM_UP, case.num_batches):
        moment = trace.at(batch, case.num_batches)
        for low, high in pairwise(result.first_boundaries):
            measured_s = sum(weight_s for _, _, weight_s in result.layers_s[batch][low:high])
            if measured_s:
                late.append(measured_s - case.weight_share * sum(moment.backward_s[low:high]))
    if not late:
        raise ValueError(f"{case.method} split no backward in {case.num_batches} batches: let it run longer")
    return max(0.0, median(late))


def _message_s(case: Case, boundaries: list[int], known: Costs, batch_s: float) -> float:
    """Seconds of a message with which a simulated batch is as long as the measured one."""
    moment, shortest, longest = case.load_trace().batches[0], 0.0, _LONGEST_S
    for _ in range(_STEPS):
        message_s = (shortest + longest) / 2
        costs = Costs(**{**asdict(known), "message_s": message_s})
        if simulate(case.workload(moment, boundaries, WARM_UP, costs=costs)).batch_s < batch_s:
            shortest = message_s
        else:
            longest = message_s
    return shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CALIBRATION.parent, help="folder")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    found = environment()
    costs = costs_of(list(run_cases(cases())))
    found = ended(found)
    text = json.dumps({"environment": found, "costs": asdict(costs)}, indent=2)
    (options.out / f"{stem(CALIBRATION.stem, found)}.json").write_text(text + "\n", encoding="utf-8")
    print(*head(found), in_words(found), text, sep="\n")


if __name__ == "__main__":
    main()
