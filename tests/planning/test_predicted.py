"""A batch under several partitions and orders, against the simulator and the planner asked one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.planning import PredictedBatch, plan_batch, predict_batches, worker_bytes_of_1f1b
from dynpipe_ds.simulation import Workload, simulate
from tests.journal.told import Job

PROFILE = Job(Path()).profile(20, halves=True)  # five cheap layers, three dear ones, cut behind the fifth


def by_name(rows: tuple[PredictedBatch, ...]) -> dict[tuple[str, str], PredictedBatch]:
    return {(row.partition, row.order): row for row in rows}


def test_against_the_simulator() -> None:
    rows = predict_batches(PROFILE, (0, 4, 8))
    assert len(by_name(rows)) == len(rows) == 7
    for row in rows[:5]:
        assert row.order == "1F1B" and not row.refusal
        simulated = simulate(Workload.from_profile(PROFILE, row.boundaries))
        assert (row.batch_s, row.bubble_ratio) == (simulated.makespan_s, simulated.bubble_ratio)
    assert [row.boundaries for row in rows[:5]] == [(0, 4, 8)] * 3 + [(0, 5, 8)] * 2
    together = plan_batch(PROFILE, [(0, 5, 8)], worker_bytes=worker_bytes_of_1f1b(PROFILE, (0, 5, 8)))
    best = by_name(rows)["best cut and order together", "planned"]
    assert best.batch_s == together.planned.simulation.makespan_s < rows[3].batch_s  # type: ignore[operator]


def test_orders_are_left_out_where_halves_are_not_known() -> None:
    whole = Job(Path()).profile(20)
    assert {row.order for row in predict_batches(whole, (0, 4, 8))} == {"1F1B"}


def test_a_planned_order_that_is_1f1b_is_no_second_row() -> None:
    """One stage: nothing waits."""
    layers = PROFILE.layers
    alone = replace(PROFILE, boundaries=(0, len(layers)), stages=PROFILE.stages[:1], link_s=())
    assert len(predict_batches(alone, (0, len(layers)))) == 5


def test_constraints_are_kept_and_what_breaks_them_is_told() -> None:
    rows = predict_batches(PROFILE, (0, 4, 8), pinned=(5,))
    assert rows[4].boundaries != (0, 5, 8) and rows[4].batch_s is not None
    capped = predict_batches(PROFILE, (0, 4, 8), config=DynamicPipelineConfig(memory_cap_bytes=4000))
    (refused,) = {row.refusal for row in capped if row.partition == "best cut by time"}
    assert "all layers need at least 13,312 bytes" in refused
    assert all(row.batch_s is None and row.boundaries == () for row in capped if row.refusal)


def test_slow_workers_count() -> None:
    even, uneven = (predict_batches(PROFILE, (0, 4, 8), speeds=speeds)[3].batch_s for speeds in (None, (1.0, 0.5)))
    assert even is not None and uneven is not None and uneven > 1.4 * even


def test_a_run_that_began_with_more_stages() -> None:
    """The first partition is no partition of the present workers."""
    assert "as it began" not in {row.partition for row in predict_batches(PROFILE, (0, 2, 4, 8))}


def test_without_times_or_partition() -> None:
    with pytest.raises(ValueError, match="no partition or no times: take one that was measured while training"):
        predict_batches(replace(PROFILE, boundaries=(), stages=(), link_s=()), (0, 4, 8))
