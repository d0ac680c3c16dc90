"""What was done to parameters between two batches."""

from __future__ import annotations

from torch import nn

from dynpipe_ds.migration.freeze import Change, trainable_flags


def test_of_several_changes_the_greatest_counts() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    layers[2].requires_grad_(False)
    before = trainable_flags(layers)
    assert Change.between(before, trainable_flags(layers)) is Change.NONE
    layers[0].requires_grad_(False)
    assert Change.between(before, trainable_flags(layers)) is Change.FROZEN
    layers[2].weight.requires_grad_(True)
    assert Change.between(before, trainable_flags(layers)) is Change.OTHER, "one is trained again"
    layers[2].requires_grad_(False)
    layers[1].bias = nn.Parameter(layers[1].bias.detach(), requires_grad=False)
    assert Change.between(before, trainable_flags(layers)) is Change.OTHER, "another parameter"
    layers[1].bias = None
    assert Change.between(before, trainable_flags(layers)) is Change.OTHER, "one less"
