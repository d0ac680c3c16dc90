"""What a training run leaves to compare: named tensors, in the order in which they came about."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dynpipe_ds.cli.numerics.model import BETAS

LOSS, NORM, GRADIENT, STATE, WEIGHT, BUFFER = (
    "loss", "gradient norm", "gradient", "optimizer state", "weights", "buffers",
)  # fmt: skip
KINDS = (LOSS, NORM, GRADIENT, STATE, WEIGHT, BUFFER)
"""In the order of cause and effect within a batch."""

WHOLE = -1
"""Instead of a layer, for what belongs to the whole model."""


class Quantity(NamedTuple):
    """What was measured.

    Attributes:
        batch: counted from 0.
        kind: one of :data:`KINDS`.
        layer: index, or :data:`WHOLE`.
        name: of the tensor within the layer.
    """

    batch: int
    kind: str
    layer: int = WHOLE
    name: str = ""


Record = dict[Quantity, Tensor]


def note(record: Record, quantity: Quantity, value: Tensor | float) -> None:
    """Keep a copy of a value, as float64 for a number and as float32 for tensors (of bf16 that is exact)."""
    if isinstance(value, Tensor) and value.dim():
        record[quantity] = value.detach().float().clone()
    else:
        record[quantity] = torch.tensor(float(value), dtype=torch.float64)


def note_layer(record: Record, batch: int, layer: int, module: nn.Module, states: dict[str, dict[str, Tensor]]) -> None:
    """Keep a layer's weights, buffers and optimizer state (by parameter, in its shape) after a batch.

    AdamW's first moment after the first batch is the gradient that it was given, times ``1 - beta1``.
    """
    for name, parameter in module.named_parameters():
        note(record, Quantity(batch, WEIGHT, layer, name), parameter)
        for key, value in states[name].items():
            note(record, Quantity(batch, STATE, layer, f"{name}.{key}"), value)
        if batch == 0 and "exp_avg" in states[name]:
            note(record, Quantity(batch, GRADIENT, layer, name), states[name]["exp_avg"] / (1 - BETAS[0]))
    for name, buffer in module.named_buffers():
        note(record, Quantity(batch, BUFFER, layer, name), buffer)


def save(record: Record, path: Path) -> None:
    """Write a record to a file, complete or not at all."""
    unfinished = path.with_suffix(".unfinished")
    torch.save([(*quantity, tensor) for quantity, tensor in record.items()], unfinished)
    unfinished.replace(path)


def load(path: Path) -> Record:
    """Read a record."""
    return {Quantity(*rest): tensor for *rest, tensor in torch.load(path, weights_only=True)}
