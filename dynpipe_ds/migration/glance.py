"""What is plain of a layer at a glance, before it is taken apart."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.migration.callables import named
from dynpipe_ds.migration.hooks import NOT_CARRIED, hooks_of
from dynpipe_ds.migration.names import Names
from dynpipe_ds.migration.references import ATOMS, is_a
from dynpipe_ds.migration.usual import TABLES, is_usual

_OF_PARTS = ("_parameters", "_buffers", "_modules")


def holds_only_registered(layer: nn.Module | None, names: Names) -> bool:
    """Whether it is plain at a glance that a layer's own tensors are its parameters and buffers, and no others.

    Args:
        layer: the layer; ``None`` for a function layer.
        names: what the layer does not own.
    """
    if layer is None:
        return True
    tensors: list[Tensor | None] = []
    for module in layer.modules():
        if not is_usual(type(module)) or names.of(module) is not None:
            return False
        tensors += (*module._parameters.values(), *module._buffers.values())
        for key, value in vars(module).items():
            is_plain = key in _OF_PARTS or type(value) in ATOMS or (key in TABLES and not value)
            if not is_plain and not _has_no_tensor(value, names):
                return False
    return all(
        tensor is None
        or (id(tensor) not in names.shared and vars(tensor).keys() <= NOT_CARRIED and not hooks_of(tensor))
        for tensor in tensors
    )


def _has_no_tensor(value: Any, names: Names) -> bool:
    if type(value) in (tuple, list):
        return all(type(item) in ATOMS for item in value)
    if is_a(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return named(str(value.__module__), value.__qualname__) is value
    return type(value) in (torch.dtype, torch.device) or names.of(value) is not None
