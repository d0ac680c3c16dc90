"""Another number of micro-batches between two batches: the same samples, and losses that differ by rounding alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.configs import BF16, BY_HAND, ZERO
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "bf16": BF16,
    "ZeRO-1": ZERO,
    "bf16 + ZeRO-1": {**BF16, **ZERO},
}
TOLERANCES = {"AdamW": 1e-6, "ZeRO-1": 1e-6, "bf16": 5e-3, "bf16 + ZeRO-1": 5e-3}
"""Of the losses, relative, as docs/elastic.md says."""
COMMON = {"gradient_clipping": 0.5, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
SWITCHES = {2: 8, 4: 2, 6: 1, 7: 4}


class Watched:
    """An iterator that counts what is taken from it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator, self.num_taken = iterator, 0

    def __iter__(self) -> Watched:
        return self

    def __next__(self) -> Any:
        self.num_taken += 1
        return next(self._iterator)


def train(_rank: int, run: Run, switches: dict[int, int], evaluate: bool = False) -> Any:
    """Losses, digests, and micro-batches taken after every batch."""
    engine = make_engine(run)
    batches = Watched(data(engine.grid.get_data_parallel_id(), run.micro_batches))
    others = Watched(data(7, run.micro_batches))
    losses, taken, evaluated = [], [], []
    for batch in range(run.num_batches):
        if batch in run.moves:
            engine.repartition(run.moves[batch])
        if batch in switches:
            engine.set_num_micro_batches(switches[batch])
            assert engine.gradient_accumulation_steps() == engine.micro_batches == switches[batch]
            assert engine.micro_batches * engine.micro_batch_size == 2 * run.micro_batches
            assert engine.train_batch_size() == 2 * run.micro_batches * engine.dp_world_size
        losses.append(float(engine.train_batch(batches)))
        taken.append(batches.num_taken)
        if evaluate:
            evaluated.append(float(engine.eval_batch(others)))
    return losses, digest(engine), taken, evaluated, others.num_taken


@pytest.mark.parametrize("name", mostly(OPTIMIZERS, ["AdamW", "bf16 + ZeRO-1"]))
def test_losses_differ_by_rounding_alone(name: str) -> None:
    run = Run(2, num_batches=9, config={**COMMON, **OPTIMIZERS[name]})
    usual = run_ranks(train, 2, run, {})
    switched = run_ranks(train, 2, run, SWITCHES)
    losses, changed = (torch.tensor(found[0][0], dtype=torch.float64) for found in (usual, switched))
    assert losses[:2].equal(changed[:2]), "until the first switch nothing differs"
    assert not losses.equal(changed), "another sum of the same gradients"
    print(f"{name}: farthest apart {((losses - changed) / losses).abs().max():.2g}")
    assert ((losses - changed).abs() <= TOLERANCES[name] * losses.abs()).all(), (losses, changed)
    assert losses[0] - losses[-1] > 5 * TOLERANCES[name] * losses[0], "the tolerance hides no other training"
    for stage in range(2):
        assert switched[stage][2] == usual[stage][2], "each batch takes as many from the loader"


def test_the_same_bits_wherever_the_model_is_cut() -> None:
    """Tied layers, three stages, planned moves: what was promised holds in any number of micro-batches."""
    section = {"dynamic_pipeline": BY_HAND}
    runs = [
        Run(3, num_batches=9, tied=True, config={**COMMON, **ZERO, **section}, moves=moves)
        for moves in ({}, {1: (0, 1, 5, 8), 3: (0, 4, 6, 8), 7: (0, 2, 4, 8)})
    ]
    stays, moves = (run_ranks(train, 3, run, SWITCHES, True) for run in runs)
    assert [rank[0] for rank in stays] == [rank[0] for rank in moves]
    assert [rank[3] for rank in stays] == [rank[3] for rank in moves]
    layers = [{item for rank in found for item in rank[1].items()} for found in (stays, moves)]
    assert layers[0] == layers[1]
    assert stays[0][4] == 9 * 4, "evaluation reads what it always read"


def test_replicas() -> None:
    run = Run(2, num_batches=6, config={**COMMON, **ZERO})
    usual, switched = (run_ranks(train, 4, run, switches) for switches in ({}, {1: 8, 3: 2}))
    assert switched[0][0] == pytest.approx(usual[0][0], rel=1e-5)


def planned(_rank: int, run: Run) -> Any:
    """Orders are planned anew after a switch; those that ran, and the losses."""
    engine = make_engine(run)
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    losses, orders = [], []
    for batch in range(run.num_batches):
        if batch in (6, 12):
            engine.set_num_micro_batches({6: 8, 12: 4}[batch])
        losses.append(float(engine.train_batch(batches)))
        orders.append(engine.order)
    return losses, [(order.num_micro_batches, any(map(order.split, range(2)))) for order in orders]


def test_orders_are_planned_anew() -> None:
    section = {"enabled": True, "schedule": "planned", "rebalance_every": "never", "profile_batches": 1}
    run = Run(2, num_batches=18, config={**COMMON, "dynamic_pipeline": section})
    losses, orders = run_ranks(planned, 2, run)[0]
    assert [number for number, _ in orders] == [4] * 6 + [8] * 6 + [4] * 6
    assert len(set(losses)) == 18


def test_refusals() -> None:
    run = Run(2)
    results = run_ranks(refuse, 2, run)
    assert results[0] == results[1]
    uneven, none, differ, data_text = results[0]
    assert "num_micro_batches = 3: must part the 8 samples of a batch on each replica evenly" in uneven
    assert "num_micro_batches = 0" in none and "the number of micro-batches" in differ
    assert "rank 1: ValueError" in data_text and "its first dimension must be that of the 2 samples" in data_text


def refuse(_rank: int, run: Run) -> list[str]:
    """What can't be is refused on every rank, and training goes on; at last with labels that can't be cut."""
    engine = make_engine(run)
    rank = engine.global_rank
    batches = data(0, run.micro_batches)
    engine.train_batch(batches)
    said = []

    def attempt(number: int) -> None:
        try:
            engine.set_num_micro_batches(number)
        except ValueError as error:
            said.append(str(error))

    attempt(3)
    attempt(0)
    attempt(2 if rank else 4)
    if rank:
        engine.dynamic.pipeline.reading.slicing.begin(None)
        engine.dynamic.pipeline.reading.slicing.next(lambda: (torch.zeros(2, 3), torch.zeros(3)))
    attempt(8)
    engine.train_batch(batches)
    attempt(8)
    engine.train_batch(batches)
    return said
