"""A model that does not change: dynamic module and engine as shipped, against DeepSpeed's own, batch by batch in turns.

python -m benchmarks.plain.main [--pairs 60 --deepspeed zero1_adamw]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import Send, on_ranks
from benchmarks.record import tell
from scenarios.report.interval import median_of_ratios

WARMUP = 4  # pairs that are not counted


def build(options: argparse.Namespace, *, dynamic: bool) -> Any:
    """A two-stage GPT, trained by one of the two engines; both start from the same weights."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn
    from scenarios.settings import SECTION, load_deepspeed_json

    model = GPTConfig(depth=options.depth, hidden=options.hidden, seq_len=options.length)
    config = {**load_deepspeed_json(options.deepspeed), "steps_per_print": 10**9}
    section = config.pop(SECTION)
    if dynamic:
        config[SECTION] = section
    module_class = DynamicPipelineModule if dynamic else PipelineModule
    torch.manual_seed(1)
    module = module_class(
        gpt_layers(model), num_stages=dist.get_world_size(), loss_fn=loss_fn, partition_method="parameters",
        base_seed=1,
    )  # fmt: skip
    return deepspeed.initialize(model=module, config=config)[0]


def train(engine: Any, batches: Any) -> tuple[float, float]:
    """Train a batch.

    Returns:
        Seconds from barrier to barrier, and CPU seconds of all ranks together, which other jobs on the machine
        do not lengthen as much.
    """
    dist.barrier()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    engine.train_batch(batches)
    cpu_s = torch.tensor(time.process_time() - started_cpu_s, dtype=torch.float64)
    dist.barrier()
    seconds = time.perf_counter() - started_s
    dist.all_reduce(cpu_s)
    return seconds, float(cpu_s)


def compare(dynamic: Any, plain: Any, batches: Any, num_pairs: int) -> list[list[tuple[float, float]]]:
    """Train both in turns, in reversed order from pair to pair.

    Returns:
        For wall time and for CPU time, the (dynamic, plain) seconds of every pair.
    """
    found: list[list[tuple[float, float]]] = [[], []]
    for pair in range(num_pairs + WARMUP):
        order = (dynamic, plain) if pair % 2 == 0 else (plain, dynamic)
        taken = [train(engine, batches) for engine in order]
        if pair % 2:
            taken.reverse()
        if pair >= WARMUP:
            for kind, seconds in zip(found, zip(*taken, strict=True), strict=True):
                kind.append(seconds)  # type: ignore[arg-type]
    return found


def row(name: str, pairs: Sequence[tuple[float, float]]) -> str:
    """One line of the table: medians, the ratios' median with its 95% interval, and their quartiles."""
    ratios = [dynamic / plain - 1 for dynamic, plain in pairs]
    quartiles = statistics.quantiles(ratios, n=4)
    dynamic_s, plain_s = zip(*pairs, strict=True)
    return (
        f"| {name} | {statistics.median(plain_s):.4f} | {statistics.median(dynamic_s):.4f} | "
        f"{median_of_ratios(dynamic_s, plain_s).change.text('+.2%', '')} | {quartiles[0]:+.2%} … {quartiles[2]:+.2%} |"
    )


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Compare on this rank; the first tells."""
    dynamic, plain = (build(options, dynamic=kind) for kind in (True, False))
    dynamic.profiling = not options.unprofiled
    micro_batch = dynamic.train_micro_batch_size_per_gpu()
    tokens = torch.randint(256, (micro_batch, options.length + 1), generator=torch.Generator().manual_seed(0))
    batches = iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None)
    wall, cpu = compare(dynamic, plain, batches, options.pairs)
    moved = "" if dynamic.partition == tuple(plain.module.parts) else f", moved to {dynamic.partition}"
    send(f"{options.deepspeed}, depth {options.depth}, hidden {options.hidden}, {options.pairs} pairs{moved}")
    send("| | DeepSpeed's, s | dynamic, s | median of the pairs' ratios (95% interval) | quartiles of the pairs |")
    send("|---|---|---|---|---|")
    send(row("wall time", wall))
    send(row("CPU time of both ranks", cpu))
    overhead = dynamic.overhead
    send(f"own accounting: profiling {overhead.profiling_s / sum(d for d, _ in wall):.2%}, planning "
          f"{overhead.planning_s / sum(d for d, _ in wall):.2%}")  # fmt: skip

def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("depth", 8), ("hidden", 256), ("length", 128), ("pairs", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--deepspeed", default="fp32_adamw", help="a DeepSpeed JSON, or a name in conf/deepspeed_json")
    parser.add_argument("--unprofiled", action="store_true", help="with profiling switched off on the dynamic engine")
    options = parser.parse_args()
    tell([], on_ranks(2, run_rank, options))


if __name__ == "__main__":
    main()
