"""A user's script that can join: what a job's ranks run, its spares, and who joins later.

Arguments: how many stages there shall be in the end, the width of a layer, and who gets freed workers; with the last,
all but one are freed in between.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule

BATCHES, MICRO_BATCHES = 8, 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES, "steps_per_print": 10**9,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"},
}


def data(width: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for i in range(BATCHES * MICRO_BATCHES):
        x = torch.randn(2, width, generator=generator)
        if i >= skip:
            yield x, x.tanh()


def main() -> None:
    wanted, width, release = int(sys.argv[1]), int(sys.argv[2]), [*sys.argv[3:], None][0]
    from dynpipe_ds.host.install import init_distributed

    init_distributed("gloo")
    torch.manual_seed(1)
    layers = [LayerSpec(nn.Linear, width, width) for _ in range(6)]
    module = DynamicPipelineModule(
        layers, num_stages=int(os.environ["WORLD_SIZE"]), loss_fn=nn.functional.mse_loss, seed_layers=True,
        partition_method="uniform",
    )
    section = CONFIG["dynamic_pipeline"] | ({"repack": {"release": {"backend": release}}} if release else {})
    engine, *_ = deepspeed.initialize(model=module, config={**CONFIG, "dynamic_pipeline": section})
    print(f"process {os.getpid()}", flush=True)
    batches = data(width, engine.global_steps * MICRO_BATCHES)
    engine.share_with_newcomers(lambda: {"told": engine.global_steps})
    if engine.joined_with is not None:
        print(f"joined with {engine.joined_with}", flush=True)
    while engine.global_steps < BATCHES:
        loss = float(engine.train_batch(batches))
        print(f"batch {engine.global_steps} stages {engine.num_stages} loss {loss!r}", flush=True)
        if release and engine.num_stages > 1 and engine.global_steps == 2:
            engine.repack(1)
        if engine.num_stages < wanted and engine.global_steps == 3:
            print("waiting", flush=True)
            until = time.monotonic() + 300
            while engine.num_waiting() < wanted - engine.num_stages and time.monotonic() < until:
                time.sleep(0.1)
            print(f"event {engine.repack(wanted)}", flush=True)


if __name__ == "__main__":
    main()
