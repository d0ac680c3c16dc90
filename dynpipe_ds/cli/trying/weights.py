"""What a stage holds, as digests by layer and name: equal digests are equal bits."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.cli.trying.outcome import Digests


def layers_of(module: Any) -> dict[int, nn.Module]:
    """The live modules of a stage by global layer index, of DeepSpeed's pipeline module and of ours."""
    found: dict[int, nn.Module] = {}
    for index, function in enumerate(module.forward_funcs, start=module._local_start):
        layer = function.args[0] if isinstance(function, partial) and function.args else function
        if isinstance(layer, nn.Module):
            found[index] = layer
    return found


def digests(engine: Any) -> dict[str, Digests]:
    """Digests under ``weights`` (with buffers) and ``state``, by ``layer/name``; flat optimizer state is left out."""
    states = getattr(engine.optimizer, "state", {}) if engine.optimizer is engine.basic_optimizer else {}
    weights: Digests = {}
    optimizer: Digests = {}
    for index, layer in layers_of(engine.module).items():
        for name, tensor in (*layer.named_buffers(), *layer.named_parameters()):
            weights[f"{index}/{name}"] = digest(tensor)
            for key, value in states.get(tensor, {}).items():
                optimizer[f"{index}/{name}/{key}"] = digest(value)
    return {"weights": weights, "state": optimizer}


def digest(value: Any) -> str:
    """A short text that is the same for equal bits of the same type and shape only; no tensor is as it is shown."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_meta:
        return f"#meta {tuple(value.shape)}"
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    found = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)} ".encode(), digest_size=12)
    if dense.numel():
        found.update(dense.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"#{found.hexdigest()}"


def bits(value: Any) -> list[str]:
    """What ``train_batch`` or ``eval_batch`` returned, as texts that are the same for equal bits only.

    Numbers, also in containers, as ``float.hex``, larger tensors as digests, which ``outcome.number`` tells apart.
    """
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        return [digest(value)]
    if isinstance(value, (Tensor, int, float)):
        return [float(value).hex()]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for part in value for text in bits(part)] if isinstance(value, (list, tuple)) else []
