"""What ``benchmarks.elastic.main`` runs on every worker: a model whose layers wait, resized between batches.

Layers wait (``time.sleep``) as long as they would compute on a device of their own, so that four workers on two cores
are four. The first rank writes when each batch began and ended, and each loss.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule

HIDDEN, BATCH, NUM_MICRO_BATCHES = 32, 2, 8
FORWARD_S, BACKWARD_S = 0.004, 0.008


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(BACKWARD_S)
        return gradient


class Layer(nn.Module):
    """A linear layer that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Compute and wait."""
        out: Tensor = _Wait.apply(torch.tanh(self.linear(x)))
        return out


def samples(seen: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches without end, after those that were seen."""
    number = seen
    while True:
        values = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(number))
        yield values, values.flip(1)
        number += 1


def main() -> None:
    """Train; the number of stages changes after given batches, as soon as enough workers wait."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=json.loads, default={})
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    module = DynamicPipelineModule(
        [LayerSpec(Layer) for _ in range(12)], num_stages=torch.distributed.get_world_size(),
        loss_fn=nn.functional.mse_loss, partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"},
    })  # fmt: skip
    data, batches, pauses = samples(engine.global_steps * NUM_MICRO_BATCHES), [], []
    while engine.global_steps < options.batches:
        number, began = engine.global_steps, time.monotonic()
        loss = float(engine.train_batch(data))
        ended = time.monotonic()
        batches.append({
            "batch": number, "stages": engine.num_stages, "began": began, "ended": ended, "loss": loss.hex(),
        })  # fmt: skip
        wanted = options.steps.get(str(number))
        if wanted is None:
            continue
        while engine.num_waiting() < wanted - engine.num_stages:
            time.sleep(0.05)
        began = time.monotonic()
        event = engine.repack(wanted)
        pauses.append({
            "began": began, "ended": time.monotonic(), "before": len(event.before) - 1, "after": wanted,
            "plan_s": event.plan_s, "regroup_s": event.regroup_s, "migrate_s": event.migrate_s,
        })  # fmt: skip
    if engine.global_rank == 0:
        (options.folder / "record.json").write_text(json.dumps({"batches": batches, "pauses": pauses}))


if __name__ == "__main__":
    main()
