"""What every worker of the fault storm runs: a small pipeline with layers that wait, and a message for every batch."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule, init_distributed

WIDTH, NUM_LAYERS, MICRO_BATCHES, SAMPLES = 128, 12, 4, 4
USED_EVERY = 20  # batches between two looks at what the process holds

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Training:
    """What a worker trains.

    Attributes:
        num_batches: after which it ends.
        wait_s: seconds that a layer's forward waits.
        door: file for ``elastic.door_file``.
    """

    num_batches: int
    wait_s: float
    door: str


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
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        if number >= skip:
            yield x, x.sin()


def used() -> dict[str, int]:
    """What this process holds now: descriptors, sockets among them, threads (also those of libraries), memory."""
    descriptors = list(Path("/proc/self/fd").iterdir())
    # The descriptor of the listing itself is closed by now.
    sockets = sum(path.is_symlink() and os.readlink(path).startswith("socket:") for path in descriptors)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "descriptors": len(descriptors), "sockets": sockets, "threads": len(os.listdir("/proc/self/task")),
        "resident_kib": resident // 1024,
    }


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


def train(training: Training, tell: Tell) -> None:
    """Train, and tell of every batch; no checkpoint is saved, so that none can be read."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    init_distributed("gloo")
    module = DynamicPipelineModule(
        [LayerSpec(Waiting, training.wait_s) for _ in range(NUM_LAYERS)], num_stages=int(os.environ["WORLD_SIZE"]),
        loss_fn=nn.functional.mse_loss, seed_layers=True, partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynamic_pipeline": {
            "enabled": True, "rebalance_every": "never", "survive": {"enabled": True},
            "elastic": {"enabled": True, "door_file": training.door},
        },
    })
    batches = data(engine.global_steps * MICRO_BATCHES)
    tell({"began": engine.global_steps, "pid": os.getpid(), "time": time.time()})
    while engine.global_steps < training.num_batches:
        loss = float(engine.train_batch(batches))
        batch = engine.global_steps
        tell({
            "batch": batch, "loss": loss.hex(), "time": time.time(), "pid": os.getpid(), "rank": engine.global_rank,
            "stages": engine.num_stages, "samples": engine.global_samples,
            **(used() if batch % USED_EVERY == 0 or batch == training.num_batches else {}),
        })
    tell({"digest": digest(engine), "pid": os.getpid(), "snapshots_s": engine.overhead.snapshots_s})
    if dist.get_world_size() > 1:
        dist.barrier()  # who ends earlier would be missed by those who still tell
