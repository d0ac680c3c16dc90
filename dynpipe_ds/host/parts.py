"""Layers cut into parts, each a pipeline layer of its own: finer layers can be spread more evenly.

A class that can be cut names its parts and keeps one of them when asked to:

    class Block(nn.Module):
        part_names = ("attention", "mlp")

        def keep_part(self, part: str) -> None: ...   # forward runs that part alone from now on

Each part is built as the whole layer, with the whole layer's seed, and lets the rest go. So all parts together have the
weights of the whole, by the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec


class LayerPart(LayerSpec):  # type: ignore[misc]
    """One part of a layer.

    Args:
        spec: builds the whole layer, whose class has ``part_names`` and ``keep_part``.
        part: its name.

    Attributes:
        is_first: whether the layer begins with it.
    """

    def __init__(self, spec: LayerSpec, part: str) -> None:
        super().__init__(spec.typename, *spec.module_args, **spec.module_kwargs)
        self.spec, self.part = spec, part
        self.is_first = part == spec.typename.part_names[0]

    def build(self, log: bool = False) -> Any:
        """Build the whole layer, and let go of what is not this part.

        Args:
            log: as for ``LayerSpec``.

        Returns:
            The layer.
        """
        layer = self.spec.build(log)
        layer.keep_part(self.part)
        return layer


def split_layers(layers: Sequence[Any]) -> list[Any]:
    """Cut the layers of a model that can be cut.

    Args:
        layers: as for ``PipelineModule``. Live modules, functions and tied layers stay whole, as do classes without
            ``part_names``.

    Returns:
        The layers, with a :class:`LayerPart` for each part of those that can be cut.

    Raises:
        ValueError: if none of them can be.
    """
    parts = [part for layer in layers for part in _parts_of(layer)]
    if len(parts) == len(layers):
        kinds = sorted({getattr(layer.typename, "__name__", "?") for layer in layers if isinstance(layer, LayerSpec)})
        raise ValueError(
            f"none of the layers can be cut into parts ({', '.join(kinds) or 'no LayerSpec among them'}): give a class "
            "part_names and keep_part (docs/finer_layers.md), or leave the layers whole"
        )
    return parts


def _parts_of(layer: Any) -> Iterator[Any]:
    names = getattr(layer.typename, "part_names", ()) if type(layer) is not LayerPart and _is_plain(layer) else ()
    if len(names) < 2:
        yield layer
    for name in names if len(names) > 1 else ():
        yield LayerPart(layer, name)


def _is_plain(layer: Any) -> bool:
    return isinstance(layer, LayerSpec) and not isinstance(layer, TiedLayerSpec)


def whole_layers(layers: Sequence[Any]) -> tuple[int, ...]:
    """For each layer the index that it, or the layer that it is a part of, would have if none were cut.

    Args:
        layers: as for ``PipelineModule``.

    Returns:
        As many indices, none smaller than the one before it.
    """
    found, whole = [], -1
    for layer in layers:
        whole += not isinstance(layer, LayerPart) or layer.is_first
        found.append(whole)
    return tuple(found)
