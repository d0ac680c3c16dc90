"""Freezing by gradient norms: the sum, the change, and the decisions."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from scenarios.freezing import AutoFreeze
from scenarios.freezing.autofreeze import first_above, relative_change
from scenarios.freezing.gradient_sum import take_norm, watch_gradients
from scenarios.gpt import Block
from tests.scenarios.fakes import TINY, FakeEngine, run


def test_relative_change() -> None:
    """As in AutoFreeze; a norm that was 0 has no rate of change."""
    assert relative_change(4.0, 3.0) == relative_change(4.0, 5.0) == 0.25
    assert relative_change(0.0, 0.0) == 0.0
    assert relative_change(0.0, 1.0) == math.inf


def test_the_first_layer_above_the_percentile_stays() -> None:
    """Everything before it may freeze, whatever comes behind it."""
    changes = {1: 0.1, 2: 0.2, 3: 0.5, 4: 0.01, 5: 0.3}
    assert [first_above(changes, p) for p in (0, 25, 50, 75, 100)] == [1, 1, 2, 3, 3]
    assert first_above({7: 0.4}, 50) == 7, "one layer alone is never below itself"
    assert first_above({}, 50) is None
    assert first_above({1: 0.1, 2: math.inf}, 50) is None
    assert first_above({1: 0.1, 2: math.nan}, 50) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_the_summed_gradients(dtype: torch.dtype) -> None:
    """Against sums made by hand from ``autograd.grad``, over two batches of three micro-batches."""
    torch.manual_seed(0)
    layer = Block(TINY).to(dtype)
    watched = copy.deepcopy(layer)
    micro_batches = torch.randn(2, 3, 2, 5, TINY.hidden, dtype=dtype)
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in layer.parameters()]
    for batch in micro_batches:
        watch_gradients(watched, 3)
        for x in batch:
            gradients = torch.autograd.grad(layer(x).square().mean(), list(layer.parameters()))
            for total, gradient in zip(expected, gradients, strict=True):
                total += gradient.float()
            watched(x).square().mean().backward()
        assert all(not p._backward_hooks for p in watched.parameters()), "off after the last micro-batch"
        watched.zero_grad()
    watched(micro_batches[0, 0]).sum().backward()
    norm = sum(total.double().abs().sum().item() for total in expected)
    assert take_norm(watched) == pytest.approx(norm, rel=1e-12)
    assert take_norm(watched) is None, "a sum is taken once"


def test_watching_changes_nothing() -> None:
    """The same losses as without it where nothing freezes."""
    watching, idle = AutoFreeze(first_batch=0, percentile=0.0), AutoFreeze(first_batch=100)
    losses = [run(FakeEngine(rule), rule, range(8)) for rule in (watching, idle)]
    assert losses[0] == losses[1]
    assert watching.changes[1] is not None
    assert not idle.changes


def test_a_sum_travels_but_hooks_do_not() -> None:
    """It is no part of the model's weights; the hooks refuse to be pickled."""
    layer = Block(TINY)
    names = layer.state_dict().keys()
    handles = watch_gradients(layer, 1)
    layer(torch.randn(1, 4, TINY.hidden)).sum().backward()
    assert layer.state_dict().keys() == names
    moved = pickle.loads(pickle.dumps(layer))
    assert take_norm(moved) == take_norm(layer) > 0
    hook = watch_gradients(layer, 1)
    with pytest.raises(TypeError, match="belongs to one batch on one rank"):
        pickle.dumps(next(iter(layer.norm1.weight._backward_hooks.values())))
    for handle in (*handles, *hook):
        handle.remove()
    assert not layer.norm1.weight._backward_hooks


def test_a_parameter_without_gradient_or_of_a_new_shape() -> None:
    """It counts nothing; a sum of another shape begins anew."""
    layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    handles = watch_gradients(layer, 1)
    layer[0](torch.ones(1, 3)).sum().backward()
    for handle in handles:
        handle.remove()
    assert take_norm(layer) == 3 * 3 + 3
    watch_gradients(layer, 1)
    layer[1] = nn.Linear(3, 2)
    watch_gradients(layer, 1)
    layer[1](torch.ones(1, 3)).sum().backward()
    assert take_norm(layer) == 2 * 3 + 2


def fast(**changes: object) -> AutoFreeze:
    """Compare after every batch."""
    return AutoFreeze(**{"first_batch": 0, "evaluate_every": 1, "percentile": 75.0, **changes})


def test_layers_freeze_front_to_back() -> None:
    """Embedding and first block together, later layers one by one, never more than allowed, never back."""
    scenario = fast()
    engine = FakeEngine(scenario)
    counts = []
    for batch in range(20):
        run(engine, scenario, range(batch, batch + 1))
        counts.append(scenario.num_frozen)
        assert engine.frozen() == [index < counts[-1] for index in range(6)]
    assert counts[:1] == [0], "the first interval is what the second is compared with"
    assert counts == sorted(counts)
    assert 1 not in counts
    assert counts[-1] == 4
    assert not any(hasattr(layer, "gradient_sum") for layer in engine.layers)


def test_only_training_layers_are_compared() -> None:
    """Not the embedding, which never settles, nor the head, nor what is frozen already."""
    scenario = fast(percentile=0.0)
    engine = FakeEngine(scenario)
    run(engine, scenario, range(3))
    changes = scenario.report(engine)["change of gradient norm by layer"]
    assert [value is None for value in changes] == [True, False, False, False, False, True]
    scenario.freeze(engine, 3)
    run(engine, scenario, range(3, 5))
    assert [value is None for value in scenario.changes] == [True, True, True, False, False, True]


def test_intervals() -> None:
    """Gradients are summed in the last batches of each interval only."""
    scenario = AutoFreeze(first_batch=1, evaluate_every=3, summed_batches=2, percentile=0.0)
    engine = FakeEngine(scenario)
    watched = []
    for batch in range(7):
        scenario.before_batch(engine, batch)
        watched.append(bool(scenario._handles))
        engine.train_batch(batch)
        scenario.after_batch(engine, batch)
    assert watched == [False, False, True, True, False, True, True]


def test_settings_without_a_meaning() -> None:
    """All problems in one message."""
    with pytest.raises(ValueError, match="evaluate_every=0 must be at least 1; percentile=101"):
        AutoFreeze(evaluate_every=0, percentile=101)
    with pytest.raises(ValueError, match="summed_batches=5 must be at most evaluate_every=4"):
        AutoFreeze(summed_batches=5)
