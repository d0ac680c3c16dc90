"""Refusals at start: optimizers and gradients whose numbers would depend on the cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynpipe_ds.host.differences import modules_of
from dynpipe_ds.host.optimizers.groups import ParameterGroups
from dynpipe_ds.ranks.agreement import first_error

_WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon", "MuonWithAuxAdam", "FusedLamb", "OnebitLamb", "Lamb", "LARS")
"""Optimizers in which an element's update depends on the rest of its tensor, here: of the flat buffer."""


def check_flat(engine: Any, groups: ParameterGroups) -> None:
    """Refuse what a flat optimizer (ZeRO-1, bf16) would compute otherwise at another cut; collective over all ranks.

    Raises:
        ValueError: on every rank, with the remedy, if any rank found something.
    """
    reason = (
        _refused_optimizer(engine.optimizer.optimizer, groups) or _refused_layers(engine)
        or _refused_owned(engine, groups) or _refused_order(engine)
    )
    message = first_error(None if reason is None else ValueError(reason), engine.device)
    if message is not None:
        raise ValueError(f"ZeRO-1 and bf16 keep gradients and weights in flat buffers: {message}")


def _refused_optimizer(optimizer: torch.optim.Optimizer, groups: ParameterGroups) -> str | None:
    name = type(optimizer).__name__
    if optimizer is not groups.optimizer:
        return (
            f"DeepSpeed replaces {name} by one of its own making, which LR schedulers and moves do not reach; use "
            "another optimizer, or leave ZeRO-1 out"
        )
    if name in _WHOLE_TENSORS:
        return (
            f"{name} updates an element by the rest of its tensor, which is the whole buffer there, so what is trained "
            "would follow the cut; use an optimizer that works element by element (Adam, AdamW, SGD, ...), or leave "
            "ZeRO-1 and bf16 out"
        )
    return None


def _refused_owned(engine: Any, groups: ParameterGroups) -> str | None:
    if groups.twins and engine.module.replica.count > 1 and getattr(engine.optimizer, "cpu_offload", False):
        return (
            "ZeRO-1 with offload_optimizer takes gradients to the host while it adds them up over replicas, also those "
            "of parameters that single replicas own (own_by_replica); leave offload_optimizer out"
        )
    return None


def _refused_order(engine: Any) -> str | None:
    if getattr(engine.optimizer, "round_robin_gradients", False) and engine.module.replica.count > 1:
        return (
            '"round_robin_gradients" changes the order of parameters in them, and the addresses by which DeepSpeed '
            "finds a parameter's state there do not follow, so a layer would be moved with another one's; leave it out"
        )
    return None


def _refused_layers(engine: Any) -> str | None:
    for where, module in modules_of(engine.local_layers()):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            return (
                f"{where} ({type(module).__name__}) makes sparse gradients, which don't lie in them; build it with "
                "sparse=False, or leave ZeRO-1 and bf16 out"
            )
    return None
