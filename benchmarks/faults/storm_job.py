"""What every worker of the fault storm runs: a small pipeline with layers that wait, and a line for every batch.

Arguments: batches, milliseconds that a layer's forward waits, door file.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule

WIDTH, NUM_LAYERS, MICRO_BATCHES = 128, 12, 4


class Waiting(nn.Module):
    """A layer with dropout that takes as long as it is told."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and wait."""
        time.sleep(self.wait_s)
        return x + self.dropout(torch.tanh(self.linear(x)))


def data(skip: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches, each another."""
    generator = torch.Generator().manual_seed(3)
    for number in range(10**9):
        x = torch.randn(4, WIDTH, generator=generator)
        if number >= skip:
            yield x, x.sin()


def tell(**values: Any) -> None:
    """Print a line that the storm reads."""
    print("STORM " + json.dumps(values), flush=True)


def used() -> dict[str, int]:
    """What this process holds: open files, threads, greatest memory."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "memory_kib": kib}


def digest(engine: Any) -> dict[str, str]:
    """A hash of every layer on this rank: weights and optimizer state."""
    found = {}
    for layer, module in engine.local_layers().items():
        h = hashlib.sha256()
        for _, parameter in sorted(module.named_parameters()):
            state = engine.stage_optimizer.export([parameter])[0]
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                h.update(torch.as_tensor(tensor).detach().double().contiguous().numpy().tobytes())
        found[str(layer)] = h.hexdigest()
    return found


def main() -> None:
    """Train."""
    num_batches, wait_s, door = int(sys.argv[1]), float(sys.argv[2]) / 1000, sys.argv[3]
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO_BATCHES, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynamic_pipeline": {
            "enabled": True, "rebalance_every": "never", "survive": {"enabled": True},
            "elastic": {"enabled": True, "door_file": door},
        },
    }
    torch.manual_seed(1)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    module = DynamicPipelineModule(
        [LayerSpec(Waiting, wait_s) for _ in range(NUM_LAYERS)], num_stages=int(os.environ["WORLD_SIZE"]),
        loss_fn=nn.functional.mse_loss, seed_layers=True, partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=module, config=config)
    batches = data(engine.global_steps * MICRO_BATCHES)
    tell(began=engine.global_steps, pid=os.getpid(), time=time.time(), **used())
    while engine.global_steps < num_batches:
        loss = float(engine.train_batch(batches))
        batch = engine.global_steps
        tell(
            batch=batch, loss=loss.hex(), time=time.time(), pid=os.getpid(), rank=engine.global_rank,
            stages=engine.num_stages, samples=engine.global_samples,
            **(used() if batch % 50 == 0 or batch == num_batches else {}),
        )
    tell(digest=digest(engine), pid=os.getpid(), snapshots_s=engine.overhead.snapshots_s)


if __name__ == "__main__":
    main()
