"""What one re-partition costs, by optimizer, next to a training batch of the same model in the same run.

python -m benchmarks.migration.main [--depth 12 --hidden 256 --moves 6]
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

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD with momentum": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}},
    "AdamW": {"optimizer": ADAMW},
    "DeepSpeedCPUAdam": {},
    "ZeRO-1": {"optimizer": ADAMW, "zero_optimization": {"stage": 1}},
    "bf16": {"optimizer": ADAMW, "bf16": {"enabled": True}},
    "bf16 + ZeRO-1": {
        "optimizer": ADAMW, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


def measure(name: str, options: argparse.Namespace) -> tuple[list[float], list[float], int]:
    """Seconds of batches and of re-partitions that move two blocks, and bytes moved by one."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from scenarios.gpt import GPTConfig, gpt_layers, loss_fn

    model = GPTConfig(depth=options.depth, hidden=options.hidden, seq_len=options.length)
    torch.manual_seed(1)
    module = DynamicPipelineModule(
        gpt_layers(model), num_stages=2, loss_fn=loss_fn, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "steps_per_print": 10**9,
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"}, **OPTIMIZERS[name],
    }
    client = {}
    if name == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        client = {"optimizer": DeepSpeedCPUAdam(module.parameters(), lr=1e-3)}
    engine, *_ = deepspeed.initialize(model=module, config=config, **client)
    tokens = torch.randint(256, (2, options.length + 1))
    batches = iter(lambda: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None)
    start = engine.partition
    moved = (start[0], start[1] + 2, start[2])
    batch_s, move_s, num_bytes = [], [], 0
    engine.train_batch(batches)
    for i in range(options.moves):
        began = time.perf_counter()
        engine.train_batch(batches)
        batch_s.append(time.perf_counter() - began)
        event = engine.repartition(start if i % 2 else moved)
        move_s.append(event.seconds)
        num_bytes = event.bytes_moved
    return batch_s, move_s, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("depth", 12), ("hidden", 256), ("length", 64), ("moves", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print(environment())
        arguments = [f"--{k}={v}" for k, v in vars(options).items()]
        launch("benchmarks.migration.main", 2, *arguments)
        return
    import deepspeed

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(verbose=False)
    first = torch.distributed.get_rank() == 0
    if first:
        print(f"2 stages, depth {options.depth}, hidden {options.hidden}, two blocks moved each time")
        print("| optimizer | batch, median s | re-partition, median s (worst) | of a batch | MiB moved |")
        print("|---|---|---|---|---|")
    for name in OPTIMIZERS:
        with contextlib.redirect_stdout(io.StringIO()):
            batch_s, move_s, num_bytes = measure(name, options)
        if first:
            batch, move = statistics.median(batch_s), statistics.median(move_s)
            print(
                f"| {name} | {batch:.3f} | {move:.3f} ({max(move_s):.3f}) | {move / batch:.0%} | "
                f"{num_bytes / 2**20:.1f} |",
                flush=True,
            )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
