"""Time of ``save_checkpoint``, ours and DeepSpeed's own, of the same engine in turns; and of loading ours.

python -m benchmarks.checkpoint.main [--depth 8 --hidden 512 --repeats 7 --folder checkpoints]

DeepSpeed's file writing is called on the same engine (``PipelineEngine.save_checkpoint``), so both write the
same weights and optimizer state to the same disk. Ours adds checksums, pushes everything to the disk (fsync)
and renames.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launch import environment, launch
from benchmarks.migration.main import OPTIMIZERS

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


def measure(engine: Any, options: argparse.Namespace) -> tuple[Times, Times, Times, int]:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    ours: Times = []
    theirs: Times = []
    loads: Times = []
    size = 0
    for repeat in range(options.repeats + 1):
        plain, safe = f"{options.folder}/plain", f"{options.folder}/safe"
        ways = [
            (theirs, lambda plain=plain: PipelineEngine.save_checkpoint(engine, plain, tag="a")),
            (ours, lambda safe=safe: engine.save_checkpoint(safe, tag="a")),
        ]
        for times, save in ways if repeat % 2 else reversed(ways):
            os.sync()  # nobody pays for what another has left to be written
            times.append(timed(save))
        loads.append(timed(lambda safe=safe: engine.load_checkpoint(safe)))
        dist.barrier()
        size = sum(f.stat().st_size for f in Path(safe).rglob("*") if f.is_file())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(options.folder)
        dist.barrier()
    return ours[1:], theirs[1:], loads[1:], size  # the first pair warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("depth", 8), ("hidden", 512), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/dynpipe-checkpoints")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print(environment())
        launch("benchmarks.checkpoint.main", 2, *(f"--{k}={v}" for k, v in vars(options).items()))
        return
    import deepspeed

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(verbose=False)
    first = dist.get_rank() == 0
    if first:
        print(f"2 stages, depth {options.depth}, hidden {options.hidden}; medians of {options.repeats}, in turns")
        print("| optimizer | MiB | DeepSpeed's save, s | ours, s | ratio (pairs) | processor time | load, s |")
        print("|---|---|---|---|---|---|---|")
    for name in COMPARED:
        with contextlib.redirect_stdout(io.StringIO()):
            ours, theirs, loads, size = measure(build(name, options), options)
        if first:
            wall, busy = ([a[i] / b[i] for a, b in zip(ours, theirs, strict=True)] for i in (0, 1))
            seconds = (f"{statistics.median(t[0] for t in times):.3f}" for times in (theirs, ours))
            print(
                f"| {name} | {size / 2**20:.0f} | {' | '.join(seconds)} | {statistics.median(wall):.2f} "
                f"({min(wall):.2f} ... {max(wall):.2f}) | {statistics.median(busy):.2f} | "
                f"{statistics.median(t[0] for t in loads):.3f} |",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
