"""A pipeline that takes in waiting workers by itself, and what it decides with them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.configs import BY_HAND, ZERO
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
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
