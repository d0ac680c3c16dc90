"""The cache of what a frozen prefix puts out: the same bits, without the prefix's work."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scenarios.freezing import EgeriaFreezing, ScheduledFreezing
from scenarios.freezing.cache import Role
from scenarios.gpt import Head
from scenarios.scenario import Scenario, build_layers
from tests.scenarios.fakes import TINY, FakeEngine

PERIOD = 3


def train(scenario: Scenario, num_batches: int) -> tuple[FakeEngine, list[float], list[int]]:
    """Train on batches that come again; give back losses and skipped layers of each."""
    engine = FakeEngine(scenario)
    scenario.repeats_after(PERIOD)
    losses, skipped = [], []
    for batch in range(num_batches):
        scenario.before_batch(engine, batch)
        losses.append(float(engine.train_batch(batch % PERIOD)))
        scenario.after_batch(engine, batch)
        skipped.append(scenario.report(engine).get("layers from cache", 0))
    return engine, losses, skipped


def test_losses_are_the_same_bits() -> None:
    """Three layers freeze at 2, are kept until 4; five at 8 start from the three; two at 14 begin anew."""
    settings = {"batches": (2, 8, 14), "frozen": (3, 5, 2)}
    cached, losses, skipped = train(ScheduledFreezing(**settings, cache=True), 20)
    plain, plain_losses, _ = train(ScheduledFreezing(**settings), 20)
    assert skipped == [0] * 5 + [3] * 6 + [5] * 3 + [0] * 3 + [2] * 3
    assert losses == plain_losses
    for left, right in zip(cached.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_prefix_does_no_work() -> None:
    """Operations of the batches: without freezing, with it, and with a cache that has the batch."""
    scenario = ScheduledFreezing(batches=(1,), frozen=(3,), cache=True)
    engine = FakeEngine(scenario)
    scenario.repeats_after(1)
    counts = []
    for batch in range(3):
        scenario.before_batch(engine, batch)
        counts.append(count_flops(lambda: engine.train_batch(0)))
        scenario.after_batch(engine, batch)
    forward = count_flops(lambda: engine.layers[2](engine.layers[1](torch.zeros(2, TINY.seq_len, TINY.hidden))))
    assert counts == [counts[0], counts[0] - 2 * forward, counts[0] - 3 * forward]
    assert forward > counts[0] / 8


def count_flops(action: Callable[[], object]) -> int:
    """Count the operations of matrix products and attention."""
    with FlopCounterMode(display=False) as counter:
        action()
    return counter.get_total_flops()


def test_a_batch_is_kept_once() -> None:
    """A longer prefix takes over what a shorter one kept; a shorter one forgets."""
    scenario = ScheduledFreezing(batches=(0, 4, 9), frozen=(2, 4, 1), cache=True)
    engine = FakeEngine(scenario)
    scenario.repeats_after(PERIOD)
    size = 2 * TINY.seq_len * TINY.hidden * 4
    kept = []
    for batch in range(11):
        scenario.before_batch(engine, batch)
        engine.train_batch(batch % PERIOD)
        scenario.after_batch(engine, batch)
        kept.append([len(layer.activations.batches) for layer in engine.layers[:5]])
        for layer in engine.layers[:5]:
            assert layer.activations.num_bytes == len(layer.activations.batches) * size
    assert kept[2] == kept[3] == [0, 3, 0, 0, 0]
    assert kept[4:7] == [[0, 2, 0, 1, 0], [0, 1, 0, 2, 0], [0, 0, 0, 3, 0]]
    assert kept[9:] == [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]]


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is computed; what is there stays, since all batches come in turns."""
    size = 2 * TINY.seq_len * TINY.hidden * 4
    scenario = ScheduledFreezing(batches=(0, 9), frozen=(2, 4), cache=True)
    monkeypatch.setattr(scenario._prefix_cache, "_budget_bytes", 2 * size)
    engine, losses, skipped = train(scenario, 18)
    assert losses == train(ScheduledFreezing(batches=(0, 9), frozen=(2, 4)), 18)[1]
    assert skipped == [0, 0, 0, 2, 2, 0, 2, 2, 0, 2, 2, 0, 4, 4, 0, 4, 4, 0]
    assert sum(layer.activations.num_bytes for layer in engine.layers[:5]) == 2 * size


def test_the_cache_travels_with_its_layer_and_evaluation_computes() -> None:
    """Pickled with the layer; outside of a batch nothing is skipped."""
    scenario = ScheduledFreezing(batches=(0,), frozen=(2,), cache=True)
    engine, *_ = train(scenario, 4)
    assert all(layer.activations.role is Role.COMPUTE for layer in engine.layers[:5])
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert engine.layers[1](engine.layers[0](tokens)).shape == (1, 4, TINY.hidden)
    moved = pickle.loads(pickle.dumps(engine.layers[1])).activations
    assert moved.batches.keys() == {0, 1, 2}
    for batch, outputs in engine.layers[1].activations.batches.items():
        assert torch.equal(moved.batches[batch][0], outputs[0])


def test_a_longer_batch_is_refused() -> None:
    """More micro-batches than were cached: another batch, or a schedule that runs forwards twice."""
    scenario = ScheduledFreezing(batches=(0,), frozen=(2,), cache=True)
    engine, *_ = train(scenario, 3)
    scenario.before_batch(engine, 3)
    engine.train_batch(0)
    with pytest.raises(RuntimeError, match="a batch of 1 micro-batches was cached, but it has more now"):
        engine.train_batch(0)


def test_egeria_with_a_cache() -> None:
    """The same decisions and losses as without it."""
    quick = {"first_batch": 1, "evaluate_every": 1, "window": 2, "patience": 1, "tolerance": 1.5}
    _, losses, skipped = train(EgeriaFreezing(**quick, cache=True), 16)
    assert max(skipped) >= 2
    assert losses == train(EgeriaFreezing(**quick), 16)[1]


def test_layers_are_those_of_the_plain_model() -> None:
    """The same first weights, names and number of layers; the head is never skipped."""
    engines = [FakeEngine(ScheduledFreezing(cache=cache)) for cache in (False, True)]
    for plain, cacheable in zip(*(engine.layers for engine in engines), strict=True):
        left, right = plain.state_dict(), cacheable.state_dict()
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert type(engines[1].layers[-1]) is Head


def test_what_cannot_be_cached() -> None:
    """Value, rule and remedy."""
    scenario = ScheduledFreezing(cache=True)
    with pytest.raises(ValueError, match="data is shuffled anew in every epoch: set data.shuffle=once"):
        scenario.repeats_after(None)
    with pytest.raises(ValueError, match="does not go with model.dropout=0.1"):
        build_layers(scenario, replace(TINY, dropout=0.1))
    specs = build_layers(Scenario(), TINY)
    specs[1].typename = torch.nn.Linear
    with pytest.raises(ValueError, match=r"layers that change while they are frozen \(Linear\)"):
        scenario.layers(TINY, specs)
    with pytest.raises(ValueError, match="cache_mib=0 must be at least 1"):
        ScheduledFreezing(cache_mib=0)
    ScheduledFreezing().repeats_after(None)
