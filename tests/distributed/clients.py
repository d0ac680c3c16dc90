"""Client optimizers and schedulers: with two groups, of which some stages have no parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.distributed.models import client


def two_groups(parameters: Any) -> list[dict[str, Any]]:
    decay = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]


@client
def adamw_object(module: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(two_groups(list(module.parameters())), lr=0.01)}


@client
def adamw_object_scheduler(module: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(two_groups(list(module.parameters())), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


@client
def adamw_callable(module: nn.Module) -> dict[str, Any]:
    del module
    return {
        "optimizer": lambda parameters: torch.optim.AdamW(two_groups(parameters), lr=0.01),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s),
    }


@client
def adamw_no_empty_groups(module: nn.Module) -> dict[str, Any]:
    """A client that leaves out a group when its stage has no parameter of it."""
    groups = [g for g in two_groups(list(module.parameters())) if g["params"]]
    return {"optimizer": torch.optim.AdamW(groups, lr=0.01)}


def compile_first(client: str) -> None:
    """Compile what the optimizer needs, once on a machine: for minutes, longer than ranks may be silent."""
    if builder := {"cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder"}.get(client):
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder(builder).load(verbose=False)


@client
def cpu_adam(module: nn.Module) -> dict[str, Any]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return {"optimizer": DeepSpeedCPUAdam(two_groups(list(module.parameters())), lr=0.01)}


@client
def torch_fused_adamw(module: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(two_groups(list(module.parameters())), lr=0.01, fused=True)}


@client
def torch_fused_sgd(module: nn.Module) -> dict[str, Any]:
    groups = two_groups(list(module.parameters()))
    return {"optimizer": torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True)}


@client
def adafactor(module: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.Adafactor(list(module.parameters()), lr=0.01)}


@client
def adagrad(module: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.Adagrad(list(module.parameters()), lr=0.01)}


@client
def scheduled(module: nn.Module) -> dict[str, Any]:
    """A scheduler made of schedulers, over groups of the user's own, with a rate for each."""
    rows = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": rows, "lr": 0.02}, {"params": rest, "weight_decay": 0.0}], lr=0.01)
    rates = [lambda step: 1.0 / (1 + step), lambda step: 0.5**step]
    first = torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=1)
    then = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [2])
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


@client
def scheduled_by_callable(module: nn.Module) -> dict[str, Any]:
    groups = [{"params": list(module.parameters()), "lr": 0.02}]
    return {
        "optimizer": lambda _: torch.optim.SGD(groups, lr=0.1, momentum=0.5),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.05], total_steps=9, base_momentum=0.3, max_momentum=0.7
        ),
    }
