"""Freezing by a schedule, and what both freezing rules share."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from scenarios.freezing import FreezeSchedule, ScheduledFreezing, set_frozen
from scenarios.scenario import build_layers
from tests.scenarios.fakes import TINY, FakeEngine, run


def test_schedule_counts_layers_and_fractions() -> None:
    """Whole numbers count layers, decimals are fractions; valid until the next entry."""
    schedule = FreezeSchedule((4, 8, 12, 16), (2, 0.5, 0.0, 13))
    counts = {batch: schedule.num_layers(batch, 14) for batch in (0, 3, 4, 7, 8, 12, 15, 16, 99)}
    assert counts == {0: 0, 3: 0, 4: 2, 7: 2, 8: 7, 12: 0, 15: 0, 16: 13, 99: 13}


def test_schedules_without_a_meaning() -> None:
    """Value, rule and remedy."""
    with pytest.raises(ValueError, match="batches has 2 entries and scenario.frozen 1"):
        FreezeSchedule((1, 2), (1,))
    with pytest.raises(ValueError, match=r"\[3, 3\] must be increasing"):
        FreezeSchedule((3, 3), (1, 2))
    with pytest.raises(ValueError, match="1.0 must be a number of layers"):
        FreezeSchedule((3,), (1.0,))
    with pytest.raises(ValueError, match="freezes 6 layers at batch 3, but the model has 6"):
        build_layers(ScheduledFreezing((3,), (6,)), TINY)


def test_tied_weights_are_refused() -> None:
    """Half of a tied weight cannot freeze."""
    with pytest.raises(ValueError, match="model.tied=true does not go with freezing"):
        build_layers(ScheduledFreezing(), replace(TINY, tied=True))


def test_frozen_layers_keep_their_bits_and_others_train() -> None:
    """Freezing, freezing more, and unfreezing."""
    scenario = ScheduledFreezing(batches=(2, 4, 6), frozen=(2, 4, 0))
    engine = FakeEngine(scenario)
    assert scenario.report(engine) == {"frozen layers": "0 of 6"}
    for start, frozen in ((0, 0), (2, 2), (4, 4), (6, 0)):
        before = copy.deepcopy(engine.layers)
        run(engine, scenario, range(start, start + 2))
        assert engine.frozen() == [index < frozen for index in range(6)]
        assert scenario.num_frozen == frozen
        for index, (old, new) in enumerate(zip(before, engine.layers, strict=True)):
            pairs = zip(old.parameters(), new.parameters(), strict=True)
            assert all(torch.equal(a, b) == (index < frozen) for a, b in pairs)


def test_a_moved_layer_unfreezes_as_it_was() -> None:
    """Parameters that the user froze stay frozen; the memory of it survives pickling."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    layer[0].bias.requires_grad_(False)
    set_frozen(layer, True)
    set_frozen(layer, True)
    assert not any(p.requires_grad for p in layer.parameters())
    moved = pickle.loads(pickle.dumps(layer))
    for _ in range(2):
        set_frozen(moved, False)
        flags = {name: p.requires_grad for name, p in moved.named_parameters()}
        assert flags == {"0.weight": True, "0.bias": False, "1.weight": True, "1.bias": True}
