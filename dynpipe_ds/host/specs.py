"""DeepSpeed's descriptions of layers, and what we ask of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from dynpipe_ds.host.parts import LayerPart

__all__ = ["LayerSpec", "TiedLayerSpec", "arguments", "forward_function", "is_buildable", "layer_name", "tied_key"]


def is_buildable(layer: Any) -> bool:
    """Whether a layer is built from a description, not given as a live module or a function."""
    return isinstance(layer, LayerSpec)


def tied_key(layer: Any) -> str | None:
    """The key under which a layer shares weights; ``None`` if it is not tied."""
    return layer.key if isinstance(layer, TiedLayerSpec) else None


def forward_function(layer: Any) -> Callable[[nn.Module, Any], Any] | None:
    """What a tied layer runs in place of its module's ``forward``; ``None`` for other layers, and if it has none."""
    return layer.forward_fn if isinstance(layer, TiedLayerSpec) else None


def arguments(layer: Any) -> list[Any]:
    """What a layer is built with, by position, then by keyword; nothing for others."""
    return [*layer.module_args, *layer.module_kwargs.values()] if isinstance(layer, LayerSpec) else []


def layer_name(layer: Any) -> str:
    """Name of a layer's class or function, and of the part of it that it is."""
    if isinstance(layer, LayerPart):
        return f"{layer_name(layer.spec)}.{layer.part}"
    if isinstance(layer, LayerSpec):
        layer = layer.typename
    return str(getattr(layer, "__name__", type(layer).__name__))
