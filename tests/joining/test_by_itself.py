"""A pipeline that takes in waiting workers by itself, and what it decides with them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed import models
from tests.distributed.configs import BY_HAND, ZERO
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.distributed.sleeping import napping, tell_time
from tests.joining.runs import elastic, wait_for_newcomers

COMMON = {"gradient_clipping": 0.5}


def run_with(repack: dict[str, Any], **config: Any) -> Run:
    """One stage that trains eight batches."""
    return Run(1, num_batches=8, config={**COMMON, **config, "dynamic_pipeline": {**BY_HAND, "repack": repack}})


def by_itself(_rank: int, run: Run, newcomers: int) -> Any:
    """Train; nobody says when to grow. The same function is what a newcomer runs."""
    engine = make_engine(elastic(run))
    batches, losses, events = data(0, run.micro_batches), {}, []
    engine.on_repack(events.append)
    for _ in range(engine.global_steps * run.micro_batches):
        next(batches)
    while engine.global_steps < run.num_batches:
        if engine.global_steps == 1 and engine.num_stages == 1:
            wait_for_newcomers(engine, newcomers)
        batch = engine.global_steps
        losses[batch] = float(engine.train_batch(batches))
    sizes = engine.micro_batches, engine.micro_batch_size, engine.dynamic.repacker.state_dict()
    return losses, digest(engine), engine.partition, [(e.batch, len(e.after) - 1) for e in events], sizes


def test_a_target_is_reached_as_soon_as_workers_wait() -> None:
    run = run_with({"enabled": True, "target_stages": 3, "earliest_batch": 3}, **ZERO)
    alone = run_ranks(by_itself, 1, run, 0)[0]
    grown = run_ranks(by_itself, 1, run, 2, newcomers=2)
    losses, _, partition, events, _ = grown[0]
    assert losses == alone[0] and len(partition) == 4 and events == [(4, 3)]
    for rank in grown[1:]:
        assert rank[0] == {batch: losses[batch] for batch in range(4, 8)} and rank[2] == partition
    assert {item for rank in grown for item in rank[1].items()} == set(alone[1].items())
    assert len({str(rank[4]) for rank in grown}) == 1, "those that joined decide from what the others decide from"


def test_micro_batches_are_chosen_with_the_stages() -> None:
    """Another number of them on every rank; the same samples, also for those that joined."""
    run = run_with({"enabled": True, "target_stages": 2, "earliest_batch": 3, "adapt_micro_batches": True})
    alone = run_ranks(by_itself, 1, run_with({}), 0)[0]
    grown = run_ranks(by_itself, 1, run, 1, newcomers=1)
    sizes = {rank[4][:2] for rank in grown}
    assert len(sizes) == 1 and all(number * size == 2 * run.micro_batches for number, size in sizes)
    assert len({str(rank[4]) for rank in grown}) == 1
    for rank in grown:
        assert rank[0] == {batch: pytest.approx(alone[0][batch], rel=1e-6) for batch in rank[0]}
    assert grown[0][3] == [(4, 2)]


def with_more_around(_rank: int, run: Run) -> Any:
    """As :func:`by_itself`, in a script that saves nothing but evaluates behind every batch, and may be warned."""
    engine = make_engine(elastic(run))
    batches, losses, evaluated = data(0, run.micro_batches), {}, {}
    for _ in range(engine.global_steps * run.micro_batches):
        next(batches)
    while engine.global_steps < run.num_batches:
        if engine.global_steps == 1 and engine.num_stages == 1:
            wait_for_newcomers(engine, 2)
        batch = engine.global_steps
        losses[batch] = float(engine.train_batch(batches))
        evaluated[batch] = float(engine.eval_batch(data(9, run.micro_batches)))
    return losses, evaluated, engine.num_stages


def test_workers_enter_where_they_can_go_on_with_the_others() -> None:
    """What a script does together behind a batch is over when workers enter."""
    run = run_with({"enabled": True, "target_stages": 3, "earliest_batch": 3, "leave_on": "SIGUSR1"}, **ZERO)
    ranks = run_ranks(with_more_around, 1, run, newcomers=2)
    for losses, evaluated, num_stages in ranks:
        assert num_stages == 3
        assert losses == {batch: ranks[0][0][batch] for batch in losses}
        assert evaluated == {batch: ranks[0][1][batch] for batch in evaluated}


NAPS, LIGHT_FROM, HEAVY_FROM, LAST = 6, 20, 44, 84
"""Layers that take time; batches from which on all but one take none, and take it again; how many batches there are."""


def by_gain(_rank: int, run: Run) -> Any:
    """Train layers that take a second, but for some batches in the middle; nobody says when to grow or shrink.

    Layers' seconds vary by 10% (standard deviation) from batch to batch, the same on every rank that runs a layer.
    """
    tell_time()
    models.layers_of = lambda _run: napping([(1.0, 2.0)] * NAPS)
    engine = make_engine(elastic(run))
    batches, losses, events = data(0, run.micro_batches), {}, []
    engine.on_repack(events.append)
    for _ in range(engine.global_steps * run.micro_batches):
        next(batches)
    while engine.global_steps < run.num_batches:
        batch = engine.global_steps
        if run.config["dynamic_pipeline"].get("repack") and batch in (1, HEAVY_FROM):
            wait_for_newcomers(engine, 4 - engine.num_stages)
        set_seconds(engine, batch)
        losses[batch] = float(engine.train_batch(batches))
    return losses, digest(engine), [(e.batch, len(e.before) - 1, len(e.after) - 1) for e in events]


def set_seconds(engine: Any, batch: int) -> None:
    """What the layers here take in one batch."""
    is_light = LIGHT_FROM <= batch < HEAVY_FROM
    for index, layer in engine.local_layers().items():
        if 0 < index <= NAPS:
            noise = max(0.1, random.Random(f"{batch} {index}").gauss(1.0, 0.1))
            share = 0.001 if is_light and index > 1 else 1.0
            layer.forward_s, layer.backward_s = noise * share, 2.0 * noise * share


def test_as_many_as_pay_and_never_to_and_fro() -> None:
    """Workers that are given back wait again at once; only the load makes the number change, once each time."""
    run = run_with({"enabled": True, "min_gain": 0.2, "tolerance": 0.05}, **ZERO)
    run.config["dynamic_pipeline"]["profile_batches"] = 1
    run = replace(run, num_batches=LAST)
    alone = run_ranks(by_gain, 1, replace(run, config={**run.config, "dynamic_pipeline": BY_HAND}))[0]  # nobody comes
    ranks = run_ranks(by_gain, 1, run, newcomers=3, may_leave=range(1, 4), come_again=True)
    losses, _, events = ranks[0]
    assert losses == alone[0]
    assert [(before, after) for _, before, after in events] == [(1, 4), (4, 1), (1, 4)], events
    grew, shrank, again = (batch for batch, _, _ in events)
    assert grew < LIGHT_FROM < shrank < HEAVY_FROM < again
    there = [rank for rank in ranks if rank is not None]
    assert {item for rank in there for item in rank[1].items()} == set(alone[1].items())
