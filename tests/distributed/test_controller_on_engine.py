"""When the real engine rebalances: layers of known times make one cut the best."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch

from benchmarks.replay.clocks import Costs
from dynpipe_ds import DynamicPipelineModule, RebalanceEvent, observing
from dynpipe_ds.partition import Placement
from tests.distributed.configs import ADAMW
from tests.distributed.models import Run, base_config, data, loss_fn
from tests.distributed.ranks import run_ranks
from tests.distributed.sleeping import Nap, meet, napping, tell_time

NAP = (4.0, 8.0)
COSTS = Costs(work_s={"profile": 2**-10, "observe": 2**-11, "decide": 2**-8, "move": 0.5})  # so little that moves pay
Events = list[RebalanceEvent]


def engine_of(
    cut: list[int], section: dict[str, Any], speeds: tuple[float, ...] = (), **config: Any
) -> tuple[Any, Events]:
    """An engine of six layers that take equally long, between two that take no time; and its events so far."""
    tell_time(COSTS)
    torch.manual_seed(7)
    module = DynamicPipelineModule(
        napping([NAP] * 6, speeds), num_stages=2, loss_fn=loss_fn, partition_method=cut
    )
    run = Run(num_stages=2, config={**ADAMW, "dynamic_pipeline": {"enabled": True, **section}, **config})
    engine, *_ = deepspeed.initialize(model=module, config=base_config(run, 1))
    events: Events = []
    assert engine.on_rebalance(events.append) == events.append
    return engine, events


def train(engine: Any, num_batches: int) -> None:
    batches = data(0, 4)
    for _ in range(num_batches):
        engine.train_batch(batches)
        meet()


def summary(events: Events) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return [(event.batch, event.before, event.after) for event in events]


def unbalanced(_rank: int) -> Any:
    """Badly cut at first, balanced later, then changed by freezing."""
    engine, events = engine_of([0, 2, 8], {"rebalance_every": "auto"})
    train(engine, 8)
    assert engine.partition == (0, 4, 8)
    first = summary(events)
    train(engine, 8)
    assert summary(events) == first, "it stays where it is balanced"
    event = events[0]
    assert (event.plan_s, event.migrate_s, event.seconds) == (2**-8, 0.5, 2**-8 + 0.5)
    assert event.predicted_gain == pytest.approx(0.4) and event.bytes_moved > 0
    assert str(event).startswith(f"re-partition after batch {event.batch}: [0, 2, 8] -> [0, 4, 8], predicted gain")
    assert engine.overhead.planning_s >= event.plan_s and engine.overhead.migrating_s == event.migrate_s
    for index, layer in engine.local_layers().items():
        layer.requires_grad_(index >= 4)  # two thirds of the first stage's work are gone
    train(engine, 8)
    assert engine.partition == (0, 5, 8) and len(events) == 2
    return summary(events), events[0].predicted_gain, events[0].bytes_moved


def test_auto_rebalances_within_a_few_batches_and_then_stays() -> None:
    results = run_ranks(unbalanced, 2)
    assert results[0] == results[1], "every rank is told the same"
    (first, before, after), second = results[0][0]
    assert (before, after) == ((0, 2, 8), (0, 4, 8)) and 3 <= first <= 8
    assert second[1:] == ((0, 4, 8), (0, 5, 8))


def balanced(_rank: int) -> int:
    engine, events = engine_of([0, 4, 8], {"rebalance_every": "auto"})
    train(engine, 15)
    assert engine.partition == (0, 4, 8) and engine.overhead.migrating_s == 0
    return len(events)


def test_auto_never_rebalances_what_is_balanced() -> None:
    assert run_ranks(balanced, 2) == [0, 0]


def fixed_interval(_rank: int, folder: str) -> Any:
    engine, events = engine_of(
        [0, 2, 8], {"rebalance_every": 2, "profile_batches": 1, "schedule": "1f1b"},  # or an order may be better so
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"},
    )
    train(engine, 1)
    assert not events
    train(engine, 2)
    assert summary(events) == [(2, (0, 2, 8), (0, 4, 8))]
    for index, layer in engine.local_layers().items():
        if index > 5 and isinstance(layer, Nap):
            layer.forward_s, layer.backward_s = 2 * layer.forward_s, 2 * layer.backward_s
    train(engine, 2)  # now 3 : 4 where 4 : 3 is no better, so it stays
    assert len(events) == 1
    for index, layer in engine.local_layers().items():
        if index > 5 and isinstance(layer, Nap):
            layer.forward_s, layer.backward_s = 2 * layer.forward_s, 2 * layer.backward_s
    train(engine, 3)
    return summary(events)


def test_a_fixed_interval_and_the_monitor(tmp_path: Path) -> None:
    results = run_ranks(fixed_interval, 2, str(tmp_path))
    assert results[0] == results[1] == [(2, (0, 2, 8), (0, 4, 8)), (6, (0, 4, 8), (0, 5, 8))]
    written = {path.name: path for path in tmp_path.rglob("*.csv")}

    def column(name: str) -> list[tuple[int, float]]:
        with open(written[f"Train_DynamicPipeline_{name}.csv"]) as file:
            return [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]

    assert column("stage_1_first_layer") == [(16, 4.0), (48, 5.0)], "by samples, 8 a batch"
    assert column("stage_0_first_layer") == [(16, 0.0), (48, 0.0)]
    assert [value for _, value in column("rebalance_s")] == [2**-8 + 0.5] * 2
    assert column("rebalance_moved_bytes")[0][1] > 0
    assert column("rebalance_predicted_gain")[0][1] == pytest.approx(0.4)
    assert [step for step, _ in column("bubble_ratio")] == [8 * batch for batch in range(1, 9)]


def phases_and_speeds(_rank: int) -> None:
    """Nothing before ``first_batch`` or after ``last_batch``; a slow worker gets less."""
    section = {"rebalance_every": 1, "profile_batches": 1, "first_batch": 2, "last_batch": 3}
    engine, events = engine_of([0, 2, 8], section)
    train(engine, 2)
    assert not events
    train(engine, 1)
    assert summary(events) == [(3, (0, 2, 8), (0, 4, 8))]
    engine.repartition((0, 2, 8), hold=1)
    train(engine, 1)
    engine.repartition((0, 2, 8), hold=1)
    train(engine, 2)
    assert summary(events)[2:] == [(4, (0, 2, 8), (0, 4, 8)), (4, (0, 4, 8), (0, 2, 8))]

    speeds = (1.0, 0.5)
    engine, events = engine_of([0, 4, 8], {"rebalance_every": "never", "stage_speeds": list(speeds)}, speeds)
    train(engine, 3)
    assert not events
    assert engine.rebalance().after == (0, 5, 8) and events[0].predicted_gain == pytest.approx(1 / 3)
    train(engine, 3)
    assert engine.rebalance() is None
    before, spent = engine.last_batch_profile, engine.overhead.profiling_s
    engine.profiling = False
    train(engine, 1)
    assert engine.last_batch_profile is before and engine.overhead.profiling_s == spent
    engine.profiling = True
    train(engine, 1)
    assert engine.last_batch_profile.batch == before.batch + 2


def test_the_dynamic_phase_and_unequal_workers() -> None:
    run_ranks(phases_and_speeds, 2)


# -- batches that are not profiled ------------------------------------------------------------


def seldom_profiled(_rank: int, folder: str) -> list[int]:
    section = {"rebalance_every": "never", "profile_every": 6}
    engine, _ = engine_of([0, 4, 8], section, csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"})
    batches, profiled = data(0, 4), []

    def next_ones(num_batches: int) -> list[int]:
        """Which of the next batches are profiled, counted from 0."""
        first = engine.dynamic.num_batches
        for _ in range(num_batches):
            before, spent = engine.last_batch_profile, engine.overhead.profiling_s
            engine.train_batch(batches)
            is_new = engine.last_batch_profile is not before
            assert is_new == (engine.overhead.profiling_s > spent)
            assert is_new == (engine.last_batch_profile.batch == engine.dynamic.num_batches - 1)
            profiled.extend([engine.dynamic.num_batches - 1] if is_new else [])
        return [batch - first for batch in profiled if batch >= first]

    assert next_ones(19) == [*range(8), 13]
    layers = engine.local_layers()
    if 2 in layers:
        layers[2].requires_grad_(False)  # on one rank only
    assert next_ones(3) == [0, 1, 2], "before the batch is trained"
    engine.repartition((0, 5, 8))
    assert next_ones(9) == [*range(8)]
    engine.replace_parameters([])
    assert next_ones(9) == [*range(8)]
    for index, layer in engine.local_layers().items():
        if index > 4 and isinstance(layer, Nap):
            layer.forward_s, layer.backward_s = 3 * layer.forward_s, 3 * layer.backward_s
    first, *others = next_ones(11)
    assert first < 6 and others[:2] == [first + 1, first + 2], "seen by the next profile"
    return profiled


def test_steady_batches_are_seldom_profiled_and_a_change_is_noticed(tmp_path: Path) -> None:
    results = run_ranks(seldom_profiled, 2, str(tmp_path))
    assert results[0] == results[1]
    (written,) = tmp_path.rglob("*bubble_ratio.csv")
    with open(written) as file:
        steps = [int(step) for step, _ in list(csv.reader(file))[1:]]
    assert steps == [8 * (batch + 1) for batch in results[0]], "the monitor has what was profiled"


# -- what the user chose holds ----------------------------------------------------------------

BAD, GOOD = (0, 2, 8), (0, 4, 8)


def held(rank: int, folder: str) -> dict[str, Any]:
    """The user's cut is a bad one: what moves by itself would go at once."""
    section = {"rebalance_every": 1, "profile_batches": 1, "hold_batches": 3}
    engine, events = engine_of([*GOOD], section)
    train(engine, 1)
    engine.repartition(BAD)
    train(engine, 2)
    assert engine.partition == BAD
    train(engine, 1)
    assert engine.partition == GOOD, "the third batch was the last one that the key promises"

    assert engine.repartition(BAD, hold=5).after == BAD
    engine.save_checkpoint(folder, tag="held")
    train(engine, 2)
    assert engine.repartition(BAD, hold=2) is None, "no move, but a hold of its own"
    train(engine, 1)
    assert engine.partition == BAD
    train(engine, 1)
    assert engine.partition == GOOD

    engine.repartition(BAD, hold="forever")
    train(engine, 6)
    assert engine.partition == BAD
    assert engine.rebalance().after == GOOD
    engine.dynamic.move_layers(Placement.from_boundaries(BAD))
    train(engine, 1)
    assert engine.partition == GOOD, "rebalance() ends the hold"

    for hold in (0, True, "for ever", 2.0):
        with pytest.raises(ValueError, match='must be a whole number of batches >= 1 or "forever"'):
            engine.repartition(BAD, hold=hold)
    with pytest.raises(ValueError, match="rank 0 has \\[3\\], rank 1 has \\[0\\]"):
        engine.repartition(BAD, hold="forever" if rank else None)
    with pytest.raises(ValueError, match="hold = 0"):
        engine.repartition(BAD, hold=5 if rank else 0)
    train(engine, 1)
    assert engine.partition == GOOD, "nothing is held that was refused"

    engine, _ = engine_of([*GOOD], section)
    engine.load_checkpoint(folder, tag="held")
    train(engine, 4)
    assert engine.partition == BAD
    train(engine, 1)
    return {"partition": engine.partition, "events": summary(events)}


def test_what_the_user_chose_holds(tmp_path: Path) -> None:
    results = run_ranks(held, 2, str(tmp_path))
    assert results[0] == results[1] and results[0]["partition"] == GOOD


def slow_second_worker(_rank: int) -> Any:
    engine, events = engine_of([0, 4, 8], {"rebalance_every": "auto", "schedule": "1f1b"}, speeds=(1.0, 0.5))
    with patch.object(observing.log, "info") as said:
        train(engine, 10)
    lines = [call.args[0] % call.args[1:] for call in said.call_args_list if "workers after" in str(call.args[0])]
    return engine.partition, engine.dynamic.balancer.speeds, len(events), lines


def test_a_slow_worker_is_measured_and_told_once() -> None:
    (cut, speeds, num_moves, lines), (_, others, _, quiet) = run_ranks(slow_second_worker, 2)
    assert cut == (0, 5, 8) and num_moves == 1
    assert speeds == others and speeds == [1.0, pytest.approx(0.5)]
    assert len(lines) == 1 and lines[0].endswith("stage 1 slower by 2.00x") and not quiet
