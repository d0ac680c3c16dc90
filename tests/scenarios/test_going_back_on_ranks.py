"""Going back to a snapshot in the middle of what a scenario does, and repeating it, changes no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scenarios.moe.balancing import VARYING
from tests.distributed.models import digest
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly
from tests.scenarios.exactness import Job, Trained, build, train
from tests.scenarios.sharded_jobs import SHARDED

EVERY, BACK, WIPED = 3, 5, 1
SURVIVES = {"dynamic_pipeline": {"rebalance_every": "never", "survive": {"enabled": True, "snapshot_every": EVERY}}}
PRUNING = {"start_batch": 1, "end_batch": 6, "every": 1, "crossover": 0.6}
FREEZING = {"batches": [2, 4, 6], "frozen": [1, 3, 2]}
BOTH = {"parts": {"pruning": PRUNING, "freezing": FREEZING}}
AUTO = {"evaluate_every": 2, "percentile": 60}


def with_a_way_back(rank: int, job: Job, boundaries: tuple[int, ...] | None) -> tuple[Trained, Trained, int]:
    """Train without, and with going back after some batches, where one rank has lost all copies."""
    plain = train(job, moves=False)
    run = build(replace(job, batch={**job.batch, **SURVIVES}))
    training: Any = run.engine.dynamic  # type: ignore[attr-defined]
    for batch in range(job.num_batches):
        list(run.train_window([batch], timed=True))
        if batch + 1 == BACK:
            training.snapshots.pause()
            if rank == WIPED:
                training.snapshots.store.forget()
            batch_of_snapshot = training.repeating.roll_back(boundaries)
    return plain, Trained(run.measured.losses, run.measured.reports, digest(run.engine)), batch_of_snapshot


def lasting(reports: list[Any]) -> list[Any]:
    """Without what clocks tell."""
    return [{key: value for key, value in report.items() if key not in VARYING} for report in reports]


@pytest.mark.parametrize(
    ("job", "ranks", "boundaries"),
    mostly(
        [
            pytest.param(Job("pruning", PRUNING, stages=3), 3, None, id="pruning"),
            pytest.param(Job("pruning", PRUNING, stages=3, optimizer="zero1_adamw"), 3, (0, 1, 5, 6), id="moves-ZeRO1"),
            pytest.param(Job("freezing", FREEZING, stages=3, optimizer="bf16_zero1"), 3, None, id="freezing-bf16"),
            pytest.param(Job("pruning_freezing", BOTH, stages=2, optimizer="zero1_adamw"), 4, (0, 2, 6), id="both"),
            pytest.param(Job("freezing_autofreeze", AUTO, stages=2), 2, (0, 5, 6), id="autofreeze"),
            pytest.param(Job("mod", {}, stages=2), 2, None, id="mod"),
            pytest.param(Job("moe", {}, stages=2), 4, None, id="moe"),
            pytest.param(Job("moe", SHARDED["moe"] | {"placement": "lanes"}, stages=2), 4, (0, 2, 6), id="sharded"),
            pytest.param(Job("early_exit", {}, stages=2), 2, None, id="early-exit"),
        ],
        ["both"],
    ),
)
def test_same_bits(job: Job, ranks: int, boundaries: tuple[int, ...] | None) -> None:
    results = run_ranks(with_a_way_back, ranks, job, boundaries)
    assert {batch for _, _, batch in results} == {EVERY}
    first = results[0][0]
    assert all(np.isfinite(first.losses))
    for plain, back, _ in results:
        assert back.losses == plain.losses == first.losses
        assert lasting(back.reports) == lasting(plain.reports)
    layers = [{item for rank in results for item in rank[i].layers.items()} for i in (0, 1)]
    assert layers[0] == layers[1]
