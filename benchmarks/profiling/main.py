"""What profiling every batch costs: batches with the recorder on against batches with it off, in turns.

python -m benchmarks.profiling.main [--batches 30 --hidden 512]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import time
from typing import Any

import torch

from benchmarks.launch import environment, launch


def build(options: argparse.Namespace) -> Any:
    """A two-stage GPT engine that profiles every batch and never moves."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    torch.manual_seed(1)
    model = GPTConfig(depth=options.depth, hidden=options.hidden, seq_len=options.length)
    module = DynamicPipelineModule(
        gpt_layers(model), num_stages=2, loss_fn=loss_fn, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"},
    }
    return deepspeed.initialize(model=module, config=config)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("depth", 4), ("hidden", 512), ("length", 256), ("batches", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print(environment())
        launch("benchmarks.profiling.main", 2, *[f"--{k}={v}" for k, v in vars(options).items()])
        return
    import deepspeed

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(verbose=False)
        engine = build(options)
    tokens = torch.randint(256, (2, options.length + 1))
    batches = iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * options.batches + 4):
        profiled = i % 2 == 0
        engine.profiling = profiled
        torch.distributed.barrier()
        began = time.perf_counter()
        engine.train_batch(batches)
        torch.distributed.barrier()
        if i >= 4:
            seconds[profiled].append(time.perf_counter() - began)
    if torch.distributed.get_rank() == 0:
        layer_s = statistics.median(layer.seconds for layer in engine.profile.layers[1:-1])
        off, on = statistics.median(seconds[False]), statistics.median(seconds[True])
        pairs = [a / b - 1 for a, b in zip(seconds[True], seconds[False], strict=True)]
        share = engine.overhead.profiling_s / sum(seconds[True])
        print(f"hidden {options.hidden}, {layer_s * 1e3:.1f} ms a layer and micro-batch")
        print("| batch without profiling, s | with, s | difference, median of pairs | own accounting |")
        print("|---|---|---|---|")
        print(f"| {off:.4f} | {on:.4f} | {statistics.median(pairs):+.2%} | {share:.2%} |")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
