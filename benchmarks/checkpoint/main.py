"""Time of ``save_checkpoint``, ours and DeepSpeed's own, of the same engine in turns; and of loading ours.

python -m benchmarks.checkpoint.main [--depth 8 --hidden 512 --repeats 15 --folder checkpoints]

DeepSpeed's file writing is called on the same engine (``PipelineEngine.save_checkpoint``), so both write the
same weights and optimizer state to the same disk. Ours adds votes, a manifest, checksums and renames before it
returns, and pushes everything to the disk afterwards, for which a third turn waits. Each turn starts with
nothing left to be written and with the files of the turn before it removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overhead.migration import OPTIMIZERS
from benchmarks.ranks import Send, on_ranks
from benchmarks.record import tell
from scenarios.report.interval import median_of_ratios

COMPARED = ("AdamW", "ZeRO-1", "bf16 + ZeRO-1")


def build(name: str, options: argparse.Namespace) -> Any:
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    model = GPTConfig(depth=options.depth, hidden=options.hidden, seq_len=32)
    torch.manual_seed(1)
    module = DynamicPipelineModule(gpt_layers(model), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "steps_per_print": 10**9,
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"}, **OPTIMIZERS[name],
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    tokens = torch.randint(256, (1, 33))
    engine.train_batch(iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None))
    return engine


def timed(action: Any) -> tuple[float, float]:
    """Seconds until every rank is done, and seconds of this rank's processors (all threads, kernel included)."""
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    action()
    dist.barrier()
    return time.perf_counter() - began, time.process_time() - busy


Times = list[tuple[float, float]]


def measure(engine: Any, options: argparse.Namespace) -> tuple[dict[str, Times], int]:
    """Seconds of each way in each repeat, and the bytes of a checkpoint of ours."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    place = f"{options.folder}/save"
    ways = {
        "DeepSpeed": lambda: PipelineEngine.save_checkpoint(engine, place, tag="a"),
        "ours": lambda: engine.save_checkpoint(place, tag="a"),
        "on the disk": lambda: (engine.save_checkpoint(place, tag="a"), engine.wait_for_disk()),
    }
    times: dict[str, Times] = {name: [] for name in [*ways, "load"]}
    size = 0
    for repeat in range(options.repeats + 1):
        for name in list(ways) if repeat % 2 else list(ways)[::-1]:
            os.sync()  # nobody pays for what another has left to be written
            times[name].append(timed(ways[name]))
            engine.wait_for_disk()
            if name == "ours":
                times["load"].append(timed(lambda: engine.load_checkpoint(place)))
                size = sum(f.stat().st_size for f in Path(place).rglob("*") if f.is_file())
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place)
            dist.barrier()
    return {name: found[1:] for name, found in times.items()}, size  # the first of each warms up


def ratio(ours: Times, theirs: Times, what: int) -> str:
    """Median of the ratios of pairs, with its 95% interval."""
    return median_of_ratios([times[what] for times in ours], [times[what] for times in theirs]).text(unit="")


def row(name: str, times: dict[str, Times], size: int) -> str:
    """One line of the table."""
    seconds = {way: f"{statistics.median(t[0] for t in found):.3f}" for way, found in times.items()}
    theirs, ours, durable = times["DeepSpeed"], times["ours"], times["on the disk"]
    return (
        f"| {name} | {size / 2**20:.0f} | {seconds['DeepSpeed']} | {seconds['ours']} | {ratio(ours, theirs, 0)} | "
        f"{ratio(ours, theirs, 1)} | {seconds['on the disk']} | {ratio(durable, theirs, 0)} | {seconds['load']} |"
    )


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank; the first tells."""
    for name in COMPARED:
        send(row(name, *measure(build(name, options), options)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("depth", 8), ("hidden", 512), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/dynpipe-checkpoints")
    options = parser.parse_args()
    tell([
        f"2 stages, depth {options.depth}, hidden {options.hidden}; medians of {options.repeats}, in turns;",
        "ratios to DeepSpeed's: medians of pairs (95% intervals)\n",
        "| optimizer | MiB | DeepSpeed, s | ours, s | ratio | processor | on the disk, s | ratio | load, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ], on_ranks(2, run_rank, options))


if __name__ == "__main__":
    main()
