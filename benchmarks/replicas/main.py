"""Adding up the gradients of replicas in their order, against DeepSpeed's way, batch by batch in turns.

python -m benchmarks.replicas.main [--replicas 3 4 --megabytes 10 30 100 --repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import Send, on_ranks
from benchmarks.record import tell
from scenarios.report.interval import median_of_ratios

LAYER_MEGABYTES = 4.2  # of 1024 x 1024 floats and as many biases as outputs


def build() -> Any:
    """An engine of one stage; its gradients are made here, so it needs no model to speak of."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule

    module = DynamicPipelineModule([nn.Linear(8, 8)], num_stages=1, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "dynamic_pipeline": {"enabled": True},
    }  # fmt: skip
    return deepspeed.initialize(model=module, config=config)[0]


def make_gradients(megabytes: float) -> list[Tensor]:
    num_layers = max(1, round(megabytes / LAYER_MEGABYTES))
    return [torch.randn(shape) for _ in range(num_layers) for shape in ((1024, 1024), (1024,))]


def seconds_of(reduce: Callable[[], None]) -> tuple[float, float]:
    """Reduce once: seconds from barrier to barrier, and CPU seconds of all ranks together."""
    dist.barrier()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    reduce()
    cpu_s = torch.tensor(time.process_time() - started_cpu_s, dtype=torch.float64)
    dist.barrier()
    taken_s = time.perf_counter() - started_s
    dist.all_reduce(cpu_s)
    return taken_s, float(cpu_s)


def measure(engine: Any, megabytes: float, num_repeats: int) -> list[list[tuple[float, float]]]:
    """(wall, CPU) seconds of DeepSpeed's way and ours, in turns, in reversed order from turn to turn."""
    from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE, DeepSpeedEngine

    gradients = make_gradients(megabytes)
    ways = [
        lambda: DeepSpeedEngine._reduce_non_expert_gradients(engine, gradients, MEMORY_OPT_ALLREDUCE_SIZE),
        lambda: engine._reduce_non_expert_gradients(gradients, MEMORY_OPT_ALLREDUCE_SIZE),
    ]
    found: list[list[tuple[float, float]]] = [[], []]
    for turn in range(num_repeats + 2):
        for i in (0, 1) if turn % 2 else (1, 0):
            seconds = seconds_of(ways[i])
            if turn >= 2:
                found[i].append(seconds)
    return found


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank; the first tells."""
    engine = build()
    for megabytes in options.megabytes:
        theirs, ours = measure(engine, megabytes, options.repeats)
        (their_s, their_cpu_s), (our_s, our_cpu_s) = (
            [statistics.median(times) for times in zip(*way, strict=True)] for way in (theirs, ours)
        )
        ratio = median_of_ratios([wall_s for wall_s, _ in ours], [wall_s for wall_s, _ in theirs])
        send(
            f"| {dist.get_world_size()} | {megabytes:g} | {1e3 * their_s:.1f} | {1e3 * our_s:.1f} | "
            f"{ratio.text(unit='')} | {1e3 * their_cpu_s:.1f} | {1e3 * our_cpu_s:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 30, 100])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    runs = (on_ranks(replicas, run_rank, options) for replicas in options.replicas)
    tell([
        "Ratios are medians of the pairs', with their 95% intervals.\n",
        "| replicas | MB of gradients | DeepSpeed's, ms | ours, ms | ours / DeepSpeed's | CPU ms | ours |",
        "|---|---|---|---|---|---|---|",
    ], chain.from_iterable(runs), threads=max(options.replicas))


if __name__ == "__main__":
    main()
