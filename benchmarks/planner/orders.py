"""What planned orders bring: the load models in virtual seconds, 1F1B against planned orders in the same memory.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.orders
    OMP_NUM_THREADS=1 python -m benchmarks.planner.orders --latency 0.1 --weight-share 0.375 --between 1.6

Prints a Markdown table: medians over the six load models of ``benchmarks/traces``, in the middle and at the end of a
run. It asserts nothing; the numbers belong in the README beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.record import environment, in_words
from benchmarks.traces.blocks import BLOCK_FORWARD_S, EDGE
from benchmarks.traces.models import MODELS
from benchmarks.traces.trace import as_profile
from dynpipe_ds import PipelineProfile
from dynpipe_ds.partition import optimal, simulated
from dynpipe_ds.planning import activation_caps, assume_halves, compile_planning, plan_batch, plan_order
from dynpipe_ds.simulation import Simulation, Workload, simulate

SIZES = ((4, 16, 24), (8, 32, 24), (16, 32, 48), (24, 48, 48))
"""Stages, micro-batches, blocks."""
MOMENTS = (30, 59)  # of 60 batches
BLOCK_ACTIVATION_BYTES = 1000
USUAL = "best cut, 1F1B"
WHOLE = f"whole blocks, {USUAL}"


class Case(NamedTuple):
    """One load model at one moment.

    Attributes:
        name: of the model, and the batch.
        profile: layers that hold no state, so that memory is activations alone.
        worker_bytes: what the fullest worker holds under 1F1B on the uniform cut of a dense model.
    """

    name: str
    profile: PipelineProfile
    worker_bytes: int


class Outcome(NamedTuple):
    """One case under one row's cut and order.

    Attributes:
        seconds: of a batch.
        bubble_ratio: mean of the stages.
        planning_s: processor seconds.
    """

    seconds: float
    bubble_ratio: float
    planning_s: float = 0.0


def main() -> None:
    """Print the environment and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weight-share", type=float, default=0.5, help="of a backward, what may be done later")
    parser.add_argument("--latency", type=float, default=0.0, help="of a message, in forwards of a dense block")
    parser.add_argument("--between", type=float, default=1.0, help="bytes held between B and W, in activations")
    parser.add_argument("--each", action="store_true", help="also print each load model")
    parser.add_argument("--compiled", action="store_true", help="plan with Numba: the same orders, sooner")
    parser.add_argument("--halves", action="store_true", help="attention and MLP are two layers; over whole blocks")
    arguments = parser.parse_args()
    if arguments.compiled and not compile_planning():
        parser.error("--compiled: Numba is not installed, or can't compile here; pip install 'dynpipe_ds[fast]'")
    print(in_words(environment(threads=1)), end="\n\n")
    print("| | " + " | ".join(f"{stages} stages, M {count}, {blocks} blocks" for stages, count, blocks in SIZES) + " |")
    print("|---|" + "---|" * len(SIZES))
    columns = [column(size, arguments) for size in SIZES]
    for row in columns[0][0]:
        print(f"| {row} | " + " | ".join(cell(of_size, row) for of_size in columns) + " |", flush=True)
    longest_s = [max(case["together"].planning_s for case in of_size) for of_size in columns]
    print("\nlongest planning of `together`, processor seconds: " + ", ".join(f"{s:.2f}" for s in longest_s))
    if arguments.each:
        for size, of_size in zip(SIZES, columns, strict=True):
            for case, found in zip(cases(*size), of_size, strict=True):
                usual_s = baseline(found).seconds
                gains = ", ".join(f"{row} {usual_s / outcome.seconds:.3f}" for row, outcome in found.items())
                print(f"{size[0]} stages, {case.name}: {gains}")


def column(size: tuple[int, int, int], arguments: argparse.Namespace) -> list[dict[str, Outcome]]:
    """All cases of one pipeline; halves of blocks are compared with whole ones."""
    found = [outcomes(case, size[0], arguments) for case in cases(*size)]
    if not arguments.halves:
        return found
    halves = [outcomes(case, size[0], arguments) for case in cases(*size, halves=True)]
    return [{WHOLE: a[USUAL], **b} for a, b in zip(found, halves, strict=True)]


def cases(num_stages: int, num_micro_batches: int, num_blocks: int, *, halves: bool = False) -> Iterator[Case]:
    """All load models but the dense one, at their moments."""
    for name, model in MODELS.items():
        if name == "dense":
            continue
        trace = model(num_blocks, halves=halves)
        sizes = [EDGE, *(0.5 if "." in layer else 1.0 for layer in trace.layers[1:-1]), EDGE]
        firsts = [i for i, layer in enumerate(trace.layers) if not layer.endswith(".mlp")]
        cuts = tuple((*firsts, len(sizes))[cut] for cut in uniform_cut(num_stages, num_blocks))
        for batch in MOMENTS:
            moment = trace.at(batch)
            profile = as_profile(trace, moment, cuts, num_micro_batches)
            in_flight = [min(num_micro_batches, num_stages - stage) for stage in range(num_stages)]
            held = [count * sum(sizes[a:b]) for count, a, b in zip(in_flight, cuts, cuts[1:], strict=False)]
            layers = tuple(
                replace(
                    layer, parameter_bytes=0, gradient_bytes=0, optimizer_state_bytes=0,
                    activation_bytes=0 if i < moment.frozen_layers else round(BLOCK_ACTIVATION_BYTES * sizes[i]),
                )
                for i, layer in enumerate(profile.layers)
            )
            yield Case(f"{name} {batch}", replace(profile, layers=layers), round(BLOCK_ACTIVATION_BYTES * max(held)))


def uniform_cut(num_stages: int, num_blocks: int) -> tuple[int, ...]:
    """As many blocks on each stage; the embedding is on the first, the head on the last."""
    inner = (1 + num_blocks * stage // num_stages for stage in range(1, num_stages))
    return (0, *inner, num_blocks + 2)


def outcomes(case: Case, num_stages: int, arguments: argparse.Namespace) -> dict[str, Outcome]:
    """All rows of one case."""
    profile, costs = case.profile, case.profile.costs("time")
    split = assume_halves(profile, arguments.weight_share)
    weight_bytes = [round(arguments.between * held) for held in profile.activation_bytes()]
    link_s = arguments.latency * BLOCK_FORWARD_S
    best = simulated(costs, num_stages, profile=profile).boundaries

    def workload(cuts: Sequence[int]) -> Workload:
        return Workload.from_profile(
            split, cuts, weight_bytes=weight_bytes, activation_link_s=link_s, gradient_link_s=link_s
        )

    def of(simulation: Simulation, started_s: float = 0.0) -> Outcome:
        spent_s = time.thread_time() - started_s if started_s else 0.0
        return Outcome(simulation.makespan_s, simulation.bubble_ratio, spent_s)

    found = {
        "uniform cut, 1F1B": of(simulate(workload(profile.boundaries))), USUAL: of(simulate(workload(best))),
    }  # fmt: skip
    started_s = time.thread_time()
    planned = plan_order(workload(best), activation_caps(profile, best, case.worker_bytes))
    found["best cut, planned order"] = of(planned.simulation, started_s)
    started_s = time.thread_time()
    together = plan_batch(
        split, [best, optimal(costs, num_stages).boundaries], worker_bytes=case.worker_bytes,
        weight_bytes=weight_bytes, activation_link_s=link_s, gradient_link_s=link_s,
    )
    found["together"] = of(together.planned.simulation, started_s)
    total_s = sum(costs) * profile.num_micro_batches / num_stages
    found["total work / stages"] = Outcome(total_s, 0.0)
    return found


def baseline(found: dict[str, Outcome]) -> Outcome:
    """What all rows of a case are compared with."""
    return found.get(WHOLE, found[USUAL])


def cell(column: Sequence[dict[str, Outcome]], row: str) -> str:
    """Median bubble and speedup over the best cut under 1F1B."""
    speedup = statistics.median(baseline(case).seconds / case[row].seconds for case in column)
    bubble = statistics.median(case[row].bubble_ratio for case in column)
    return f"{bubble:.1%} ({speedup:.3f})"


if __name__ == "__main__":
    main()
