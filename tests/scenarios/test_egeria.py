"""Freezing by plasticity: the measure, the trend, and the decisions."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from scenarios.freezing import EgeriaFreezing
from scenarios.freezing.plasticity import (
    Trend,
    capture_next,
    plasticity,
    reference_of,
    slope,
    sp_loss,
    take_reference,
)
from scenarios.gpt import Block
from tests.scenarios.fakes import TINY, FakeEngine, run


def test_sp_loss_is_the_formula() -> None:
    """Tung and Mori, equations 1 to 3, written out in NumPy."""
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((6, 5)), rng.standard_normal((6, 9))
    total = 0.0
    rows = []
    for activation in (left, right):
        products = activation @ activation.T
        rows.append(products / np.sqrt((products**2).sum(axis=1, keepdims=True)))
    for i in range(6):
        for j in range(6):
            total += (rows[0][i, j] - rows[1][i, j]) ** 2
    tensors = [torch.tensor(a, dtype=torch.float32) for a in (left, right)]
    assert sp_loss(*tensors) == pytest.approx(total / 36, rel=1e-5)
    # Samples and positions are both rows.
    assert sp_loss(*(t.view(2, 3, -1) for t in tensors)) == pytest.approx(total / 36, rel=1e-5)
    # Every second row.
    halves = [t[::2] for t in tensors]
    assert sp_loss(*tensors, max_rows=3) == sp_loss(*halves)


def test_sp_loss_of_equals_and_of_scaled() -> None:
    """It is 0 for equal activations, and blind to their scale."""
    activation = torch.randn(4, 3, 8)
    assert sp_loss(activation, activation) == 0.0
    assert sp_loss(activation, 3 * activation) == pytest.approx(0.0, abs=1e-10)
    assert sp_loss(activation, torch.randn(4, 3, 8)) > 1e-3
    assert sp_loss(activation, torch.zeros(4, 3, 8)) > 0.0


def test_slope_is_least_squares() -> None:
    """As NumPy's fit."""
    values = [3.0, 1.0, 4.0, 1.5, 5.0]
    assert slope(values) == pytest.approx(np.polyfit(range(5), values, 1)[0])


def test_a_trend_settles_when_its_slope_has_died_away() -> None:
    """An exponential decay is calm late, and never after a new rise."""
    trend = Trend()
    calm = []
    for step in range(30):
        trend.add(0.7**step, window=4, tolerance=0.1)
        calm.append(trend.calm)
    assert calm[:8] == [0] * 8
    assert calm[-1] > 10
    trend.add(1.0, window=4, tolerance=0.1)
    assert trend.calm == 0
    assert trend.smoothed[3] == pytest.approx(np.mean([0.7**i for i in range(4)]))


def test_reference_is_no_part_of_the_module_and_travels() -> None:
    """A plain object on the layer: not trained, not saved as weights, pickled with it."""
    layer = Block(TINY)
    names = set(layer.state_dict()) | {name for name, _ in layer.named_parameters()}
    take_reference(layer)
    assert set(layer.state_dict()) | {name for name, _ in layer.named_parameters()} == names
    moved = pickle.loads(pickle.dumps(layer))
    x = torch.randn(2, 12, 16)
    for module in (layer, moved):
        capture_next(module)
        module(x)
    assert plasticity(moved) == plasticity(layer) == 0.0
    assert plasticity(moved) is None, "a capture is used once"


def test_plasticity_measures_the_change_since_the_reference() -> None:
    """Larger for larger changes of the weights."""
    found = []
    for change in (0.0, 0.01, 0.1):
        torch.manual_seed(0)
        layer = Block(TINY)
        take_reference(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += change * torch.randn_like(parameter)
        capture_next(layer)
        layer(torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1)))
        found.append(plasticity(layer))
    assert found == sorted(found)
    assert found[0] == 0.0 < found[1]


def test_measuring_leaves_no_trace() -> None:
    """Same outputs, gradients, modes, random stream and hooks as without it; dropout included."""
    torch.manual_seed(0)
    watched = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    watched[2].eval()
    plain = copy.deepcopy(watched)
    take_reference(watched)
    capture_next(watched)
    results = []
    for layer in (plain, watched):
        torch.manual_seed(1)
        x = torch.ones(3, 4, requires_grad=True)
        outputs = [layer(x), layer(x)]
        plasticity(layer)
        sum(outputs).sum().backward()
        gradients = [p.grad for p in layer.parameters()]
        results.append([*outputs, x.grad, *gradients, torch.random.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert [m.training for m in watched.modules()] == [m.training for m in plain.modules()]
    assert not watched._forward_hooks


def egeria(**changes: object) -> EgeriaFreezing:
    """Quick decisions."""
    quick = {"first_batch": 2, "evaluate_every": 1, "window": 2, "patience": 2, "tolerance": 0.5}
    return EgeriaFreezing(**{**quick, **changes})


def test_layers_freeze_front_to_back_once_they_are_calm() -> None:
    """A learning rate that dies away lets the model settle; the last layers never freeze."""
    scenario = egeria(max_frozen=0.7, unfreeze_lr_drop=1e9)
    engine = FakeEngine(scenario)
    counts = []
    for batch in range(40):
        engine.lr = 0.5 * 0.8**batch
        run(engine, scenario, range(batch, batch + 1))
        counts.append(scenario.num_frozen)
        assert engine.frozen() == [index < counts[-1] for index in range(6)]
    assert counts[:4] == [0] * 4, "three evaluations are the least: one for the reference"
    assert counts == sorted(counts)
    assert counts[-1] == int(0.7 * 6)
    carried = [reference_of(layer) is not None for layer in engine.layers]
    assert carried == [False] * 6, "frozen layers drop theirs, the last ones never have one"
    assert scenario.report(engine) == {"frozen layers": "4 of 6"}


def test_the_first_layers_freeze_together() -> None:
    """The embedding never holds up the first block; the last layer of the module is the judge."""
    scenario = egeria(first_module=3, tolerance=1e-12)
    engine = FakeEngine(scenario)
    run(engine, scenario, range(4))
    counts = []
    for judged in (0, 1, 3, 2):
        scenario.trends[judged].calm = 100
        scenario._decide(engine, 0.1)
        counts.append(scenario.num_frozen)
    assert counts == [0, 0, 0, 4]


def test_unfrozen_when_the_learning_rate_is_raised() -> None:
    """Twice the lowest rate since freezing began; then convergence is judged anew."""
    scenario = egeria(tolerance=1e9, unfreeze_lr=2.0)
    engine = FakeEngine(scenario, lr=0.1)
    run(engine, scenario, range(10))
    assert scenario.num_frozen == 4
    engine.lr = 0.05
    run(engine, scenario, range(10, 12))
    engine.lr = 0.09
    run(engine, scenario, range(12, 14))
    assert scenario.num_frozen == 4
    engine.lr = 0.1
    run(engine, scenario, range(14, 15))
    assert scenario.num_frozen == 0
    assert engine.frozen() == [False] * 6
    run(engine, scenario, range(15, 25))
    assert scenario.num_frozen == 4


def test_evaluation_does_not_change_training() -> None:
    """Losses are the same bits as without any evaluation, until something freezes."""
    scenario, idle = egeria(patience=100), egeria(first_batch=100)
    losses = [run(FakeEngine(rule), rule, range(8)) for rule in (scenario, idle)]
    assert losses[0] == losses[1]
    assert scenario.num_frozen == 0
    assert len(scenario.trends[0].raw) == 5


def test_references_are_refreshed() -> None:
    """Every few evaluations; in between plasticity is measured against an older one."""
    scenario = egeria(patience=100, refresh_every=3, evaluate_every=2)
    engine = FakeEngine(scenario)
    ages = []
    for batch in range(2, 16):
        before = reference_of(engine.layers[1])
        run(engine, scenario, range(batch, batch + 1))
        if reference_of(engine.layers[1]) is not before:
            ages.append(batch)
    assert ages == [2, 6, 12]


def test_settings_without_a_meaning() -> None:
    """All problems in one message."""
    with pytest.raises(ValueError, match="max_frozen=1 .*; window=1 must be at least 2; tolerance=0"):
        EgeriaFreezing(window=1, tolerance=0, max_frozen=1)
    with pytest.raises(ValueError, match="unfreeze_lr=1"):
        EgeriaFreezing(unfreeze_lr=1)
    with pytest.raises(ValueError, match="reference_bits=4 must be 8 or 32; unfreeze_lr_drop=1 must be above 1"):
        EgeriaFreezing(reference_bits=4, unfreeze_lr_drop=1)
