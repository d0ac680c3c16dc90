"""Layers cut into parts: which are, under which numbers, and with which weights."""

from __future__ import annotations

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from dynpipe_ds import LayerPart, split_layers
from dynpipe_ds.host.parts import whole_layers
from dynpipe_ds.host.specs import layer_name


class Pair(nn.Module):
    part_names = ("left", "right")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.part: str | None = None

    def keep_part(self, part: str) -> None:
        self.part = part
        setattr(self, "second" if part == "left" else "first", None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.part == "right" else self.first(x)
        return x if self.part == "left" else self.second(x)


def test_what_can_be_cut_is_cut_and_numbered_by_the_whole() -> None:
    tied, live = TiedLayerSpec("key", Pair, 3), nn.Linear(3, 3)
    layers = [LayerSpec(nn.Linear, 3, 3), LayerSpec(Pair, 3), tied, live, torch.tanh, LayerSpec(Pair, 3)]
    parts = split_layers(layers)
    assert [part for part in parts if not isinstance(part, LayerPart)] == [layers[0], tied, live, torch.tanh]
    assert [layer_name(part) for part in parts] == [
        "Linear", "Pair.left", "Pair.right", "Pair", "Linear", "tanh", "Pair.left", "Pair.right",
    ]  # fmt: skip
    assert whole_layers(parts) == (0, 1, 1, 2, 3, 4, 5, 5)
    assert whole_layers(layers) == (0, 1, 2, 3, 4, 5)


def test_parts_have_the_weights_and_the_answer_of_the_whole() -> None:
    spec = LayerSpec(Pair, 4)
    built = []
    for layer in (spec, *split_layers([spec])):
        torch.manual_seed(3)
        built.append(layer.build())
    whole, *parts = built
    names = [list(part.state_dict()) for part in parts]
    assert names == [["first.weight", "first.bias"], ["second.weight", "second.bias"]]
    x = torch.randn(2, 4)
    y = x
    for part in parts:
        y = part(y)
    assert torch.equal(y, whole(x))


def test_layers_that_can_not_be_cut_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"can be cut into parts \(LayerNorm, Linear\): give a class part_names"):
        split_layers([LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.LayerNorm, 2)])
    with pytest.raises(ValueError, match="no LayerSpec among them"):
        split_layers([torch.tanh])
