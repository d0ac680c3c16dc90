"""An optimizer may come with the config, be made before the engine, or be given to it later: training is the same."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.pipe import TiedLayerSpec
from torch import nn

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.configs import BY_HAND
from tests.distributed.ranks import run_ranks

MOVES = {2: (0, 1, 4), 4: (0, 2, 4), 5: (0, 3, 4)}


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.01)


def losses(way: str, moves: dict[int, tuple[int, ...]]) -> list[float]:
    """Two tied layers start on one stage, where the engine gives each weights of its own."""
    torch.manual_seed(7)
    tied = [TiedLayerSpec("w", nn.Linear, 16, 16, tied_weight_attr="weight", bias=False) for _ in range(2)]
    module = DynamicPipelineModule(
        [tied[0], nn.Tanh(), tied[1], nn.Linear(16, 1)], num_stages=2, loss_fn=nn.functional.mse_loss,
        partition_method=[0, 3, 4],
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3, "steps_per_print": 10**9,
        "dynamic_pipeline": BY_HAND,
    }
    before = list(module.parameters())  # without the copy that the engine will make
    settings = {"lr": 0.05, "weight_decay": 0.01, "torch_adam": True}
    if way == "config":
        config["optimizer"] = {"type": "AdamW", "params": settings}
    given: dict[str, Any] = {
        "object": {"optimizer": adamw(before)},
        "callable": {"optimizer": adamw, "model_parameters": before},
        "groups": {"optimizer": adamw, "model_parameters": [{"params": before}]},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config, **given.get(way, {}))
    if way == "late":
        engine._support_torch_style_backward = True
        engine._configure_optimizer(adamw, before)
    generator = torch.Generator().manual_seed(3)
    batches = iter(lambda: tuple(torch.randn(4, n, generator=generator) for n in (16, 1)), None)
    found = []
    for batch in range(7):
        if batch in moves:
            engine.repartition(moves[batch])
        found.append(float(engine.train_batch(batches)))
    return found


def every_way(_rank: int) -> list[list[float]]:
    return [
        losses("config", {}),
        *(losses(way, MOVES) for way in ("config", "object", "callable", "groups", "late")),
    ]


def test_every_way_of_giving_an_optimizer() -> None:
    expected, *found = run_ranks(every_way, 2)[0]
    assert len(set(expected)) == 7 and all(loss == loss for loss in expected)
    assert all(way == expected for way in found)
