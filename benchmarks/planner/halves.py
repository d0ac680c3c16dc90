"""What halves of blocks bring in whole runs on paper: `auto` with planned orders, attention and MLP apart or together.

    python -m benchmarks.planner.halves                        # 60 batches, 2 to 8 stages with 2 to 4 blocks each
    python -m benchmarks.planner.halves --sizes 16x3 --batches 200

Prints a Markdown table: throughput with halves over that with whole blocks, over six load models. All is charged that
the library does (``benchmarks/replay/predict.py``). It asserts nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from multiprocessing import get_context
from statistics import median

from benchmarks.paper.experiments import LAYER_MS, SCENARIOS
from benchmarks.record import environment, in_words, table
from benchmarks.replay.case import ORDERS, Case
from benchmarks.replay.predict import predict
from benchmarks.schedules.replayed import HALVES

METHOD = ORDERS[1].label  # auto, and planned orders
SIZES = ("2x3", "4x2", "4x3", "4x4", "8x2", "8x3", "8x4")


def gain(job: tuple[str, str, int]) -> float:
    """Throughput with halves over that with whole blocks.

    Args:
        job: stages and blocks of each, as ``8x3``; the load model; batches.
    """
    size, scenario, batches = job
    num_stages, each = map(int, size.split("x"))
    whole = Case(f"model:{scenario}:{num_stages * each}", METHOD, num_stages, 4 * num_stages, batches, LAYER_MS)
    return predict(whole).wall_s / predict(replace(whole, trace=whole.trace + HALVES)).wall_s


def main() -> None:
    """Print the environment and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="stages x blocks of each")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    jobs = [(size, scenario, options.batches) for size in options.sizes for scenario in SCENARIOS]
    with get_context("forkserver").Pool(options.processes) as pool:
        gains = pool.map(gain, jobs, chunksize=1)
    print(in_words(environment(threads=1)), end="\n\n")
    lines = []
    for i, size in enumerate(options.sizes):
        found = gains[i * len(SCENARIOS) : (i + 1) * len(SCENARIOS)]
        lines.append([size.replace("x", " × "), *(f"{each:.3f}" for each in (median(found), min(found), max(found)))])
    print(table(["stages × blocks a stage", "median", "least", "most"], lines))


if __name__ == "__main__":
    main()
