"""What the benchmarks of this folder run on every worker: a model whose layers wait, resized between batches.

Layers wait (``time.sleep``) as long as they would compute on a device of their own, so that four workers on two cores
are four. ``benchmarks.elastic.main`` starts this file as a script; the first rank writes when each batch began and
ended, and each loss.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule, init_distributed

NUM_LAYERS, BATCH, NUM_MICRO_BATCHES = 12, 2, 8
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "ZeRO-1": {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
    "bf16 + ZeRO-1": {
        "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
    },
}  # fmt: skip
"""Keys of DeepSpeed's configuration, each with AdamW."""


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        num_batches: how many batches.
        steps: batch, counted from 0 -> number of stages from its end on.
        optimizer: one of :data:`OPTIMIZERS`.
        hidden: width of each linear layer.
        forward_s: seconds that a layer waits for a micro-batch.
        waiting: workers that must wait before the first batch, so that none is still being built in a pause.
    """

    num_batches: int
    steps: Mapping[int, int] = field(default_factory=dict)
    optimizer: str = "AdamW"
    hidden: int = 32
    forward_s: float = 0.004
    waiting: int = 0


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2.0 * ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    """A linear layer that waits, twice as long backward.

    Args:
        hidden: its width.
        forward_s: seconds that a forward waits.
    """

    def __init__(self, hidden: int, forward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        """Compute and wait."""
        out: Tensor = _Wait.apply(torch.tanh(self.linear(x)), self.forward_s)
        return out


def samples(hidden: int, dtype: torch.dtype, seen: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches without end, after those that were seen."""
    number = seen
    while True:
        values = torch.randn(BATCH, hidden, generator=torch.Generator().manual_seed(number)).to(dtype)
        yield values, values.flip(1)
        number += 1


def build(training: Training) -> Any:
    """The engine, on this process of a started process group; all that are there are stages."""
    torch.manual_seed(3)
    module = DynamicPipelineModule(
        [LayerSpec(Layer, training.hidden, training.forward_s) for _ in range(NUM_LAYERS)],
        num_stages=torch.distributed.get_world_size(), loss_fn=nn.functional.mse_loss, partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"}, **OPTIMIZERS[training.optimizer],
    })  # fmt: skip
    return engine


def train(training: Training) -> dict[str, Any]:
    """Train; the number of stages changes after given batches, as soon as enough workers wait.

    Returns:
        Each batch and each pause that this process was there for.
    """
    engine, batches, pauses = build(training), [], []
    dtype = torch.bfloat16 if "bf16" in OPTIMIZERS[training.optimizer] else torch.float32
    data = samples(training.hidden, dtype, engine.global_steps * NUM_MICRO_BATCHES)
    if not engine.global_steps:
        _wait_for(engine, training.waiting)
    while engine.global_steps < training.num_batches:
        number, began = engine.global_steps, time.monotonic()
        loss = float(engine.train_batch(data))
        ended = time.monotonic()
        batches.append({
            "batch": number, "stages": engine.num_stages, "began": began, "ended": ended, "loss": loss.hex(),
        })  # fmt: skip
        wanted = training.steps.get(number)
        if wanted is None:
            continue
        _wait_for(engine, wanted - engine.num_stages)
        began = time.monotonic()
        event = engine.repack(wanted)
        pauses.append({
            "began": began, "ended": time.monotonic(), "before": len(event.before) - 1, "after": wanted,
            "plan_s": event.plan_s, "regroup_s": event.regroup_s, "migrate_s": event.migrate_s,
        })  # fmt: skip
    engine.destroy()  # who still waits hears that it is over
    return {"batches": batches, "pauses": pauses}


def _wait_for(engine: Any, number: int) -> None:
    while number > 0 and engine.num_waiting() < number:
        time.sleep(0.05)


def main() -> None:
    """Train and, on the first rank, write a record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=json.loads, default={})
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed("gloo")
    record = train(Training(options.batches, {int(batch): size for batch, size in options.steps.items()}))
    if torch.distributed.get_rank() == 0:
        (options.folder / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
