"""Replay on real ranks: time passes as told, where layers are changes nothing but time, and every run is the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.replay.case import WARM_UP, Case, Result
from benchmarks.replay.predict import predict
from benchmarks.replay.run import Replay, time_of
from dynpipe_ds.partition import optimal
from dynpipe_ds.simulation import simulate
from tests.distributed.ranks import run_ranks

MICRO_BATCHES, BATCHES, LAYER_MS = 2, 6, 2.0


def case_of(trace: str, method: str, num_stages: int = 2, **options: Any) -> Case:
    return Case(trace, method, num_stages, MICRO_BATCHES * num_stages, BATCHES, LAYER_MS, **options)


# By parameters, what pruning leaves decides and not the clock.
PAIRS = (
    case_of("model:freezing:6", "static uniform"), case_of("model:freezing:6", "optimal:time", link_ms=1.0),
    case_of("model:pruning:6", "static uniform"), case_of("model:pruning:6", "balanced:parameters"),
)


def _replay(case: Case) -> tuple[Result, dict[int, bytes]]:
    with time_of(case) as clock:
        run = Replay(case, clock)
        result = run.run()
        layers = run.engine.local_layers()
        return result, {i: layer.weight.detach().numpy().tobytes() for i, layer in layers.items()}


def _replay_all(rank: int, cases: list[Case]) -> list[tuple[Result, dict[int, bytes]]]:
    return [_replay(case) for case in cases]


@pytest.mark.parametrize("clock", ["virtual", "sleeping"])
def test_replay_moves_layers_and_keeps_the_bits(clock: str) -> None:
    first, second = run_ranks(_replay_all, 2, [replace(case, clock=clock) for case in PAIRS])
    weights = [own | theirs for (_, own), (_, theirs) in zip(first, second, strict=True)]
    for static_run in (0, 2):
        static, dynamic = first[static_run][0], first[static_run + 1][0]
        _check_busy(static)
        assert static.losses == dynamic.losses
        assert weights[static_run] == weights[static_run + 1] and len(weights[static_run]) == 8
        assert not static.moves and dynamic.moves, static.case
        theirs = second[static_run + 1][0]
        assert [move.boundaries for move in dynamic.moves] == [move.boundaries for move in theirs.moves]
    largest = max(map(len, weights[0].values()))
    assert max(map(len, weights[2].values())) < 0.5 * largest, "the parameters were not pruned"


def _check_busy(result: Result) -> None:
    """A stage computes at least as long as its layers were told; how much longer is up to the machine."""
    told, parts = result.case.load_trace(), result.boundaries_by_batch()
    for batch in range(BATCHES):
        seconds = told.at(batch, BATCHES).seconds
        for busy_s, (low, high) in zip(result.stages_s[batch], pairwise(parts[batch]), strict=True):
            assert busy_s >= 0.99 * MICRO_BATCHES * result.case.num_stages * sum(seconds[low:high]) > 0


# All that a simulation knows as well: links, slow workers, dispersion, jitter, frozen stages, moves.
SIMULATED = [
    case_of("model:early_exit:9", "optimal:time", 3, costs="none", link_ms=0.5, link_spread=1.0),
    case_of("model:freezing:6", "optimal:time", 3, costs="none", speeds=(1.0, 0.5, 1.0), jitter=0.2, seed=3),
]


def test_virtual_time_is_what_the_simulator_says() -> None:
    """Forwards, backwards and messages of the real engine, to the rounding of sums; and its decisions."""
    for case, (result, _) in zip(SIMULATED, run_ranks(_replay_all, 3, SIMULATED)[0], strict=True):
        assert result.moves and result.kind == "replay"
        trace, parts = case.load_trace(), result.boundaries_by_batch()
        for batch in range(BATCHES):
            told = simulate(case.workload(trace.at(batch, BATCHES), parts[batch], batch))
            assert result.engine_s[batch] == result.batches_s[batch] == pytest.approx(told.batch_s, rel=1e-9)
            assert result.bubbles[batch] == pytest.approx(told.bubble_ratio, abs=1e-9)
        assert [move.boundaries for move in result.moves] == [move.boundaries for move in predict(case).moves]


def test_what_is_stated_is_charged() -> None:
    """The library's work beside the batches, moved bytes by their bandwidth; a run is its batches, to the last bit."""
    case = case_of("model:freezing:6", "optimal:time")
    others = [replace(case, costs=costs) for costs in ("unscaled", "none")]
    (result, _), (unscaled, _), (free, _) = run_ranks(_replay_all, 2, [case, *others])[0]
    costs = case.known_costs()
    assert [move.plan_s for move in result.moves] == pytest.approx([costs.work_s["decide"]] * len(result.moves))
    for run, scale in ((result, result.parameter_scale), (unscaled, 1.0)):
        for move in run.moves:
            told_s = costs.work_s["move"] + move.bytes_moved / scale / costs.bytes_per_s
            assert move.migrate_s == pytest.approx(told_s), "of two stages one sends all that the other receives"
    assert result.wall_s == pytest.approx(sum(result.batches_s[WARM_UP:]))
    profile_s = costs.work_s["profile"] + costs.work_s["observe"]
    assert result.profiling_s == pytest.approx((BATCHES - WARM_UP) * profile_s)
    assert result.wall_s > free.wall_s and free.profiling_s == free.planning_s == free.migrating_s == 0.0


def _values(result: Result) -> dict[str, Any]:
    return result.as_values() | {"machine_s": 0.0}


@pytest.mark.exhaustive
def test_replicas_and_two_runs_of_the_same() -> None:
    """Two stages in two replicas, each with data of its own; a second run is the same to the last bit."""
    case = case_of("model:moe:6", "optimal:time, auto", replicas=2)
    (first, _), (again, _) = run_ranks(_replay_all, 4, [case, case])[0]
    assert _values(first) == _values(again)
    alone = run_ranks(_replay_all, 2, [replace(case, replicas=1)])[0][0][0]
    assert sum(first.batches_s) > sum(alone.batches_s), "a batch ends with the slower replica"


@pytest.mark.exhaustive
def test_workers_that_drop_out() -> None:
    case = case_of("model:dense:6", "static uniform", 3, leaves=((2, 2), (4, 1)), costs="none")
    stays = case_of("model:dense:6", "static uniform", 3, costs="none")
    result = run_ranks(_replay_all, 3, [case], may_leave=(1, 2))[0][0][0]
    assert [len(busy) for busy in result.stages_s] == [3, 3, 2, 2, 1, 1]
    assert result.losses == run_ranks(_replay_all, 3, [stays])[0][0][0].losses


# All that decides: trials, planned orders, glances, moves, links that are measured.
DECIDED = [
    Case("model:freezing:9", "optimal:time, auto, auto order", 3, 9, 16, 20.0),
    Case("model:early_exit:9", "optimal:time, auto, auto order", 3, 9, 16, 20.0, link_ms=5.0),
]


def test_a_run_on_paper_is_that_of_the_engine() -> None:
    for case, (result, _) in zip(DECIDED, run_ranks(_replay_all, 3, DECIDED)[0], strict=True):
        told = predict(case)
        assert [(m.batch, m.boundaries) for m in result.moves] == [(m.batch, m.boundaries) for m in told.moves]
        assert told.moves and told.num_orders > 1
        assert told.wall_s == pytest.approx(result.wall_s, rel=0.005)
        assert told.planning_s == pytest.approx(result.planning_s, rel=0.2)


# One of four workers is slow; nobody says so.
UNEQUAL = Case(
    "model:dense:12", "optimal:time, auto, speeds measured", 2, 8, 14, 10.0, replicas=2, speeds=(1.0, 1.0, 1.0, 0.5)
)


def test_one_slow_replica_is_found_on_ranks() -> None:
    [(result, _)] = run_ranks(_replay_all, 4, [UNEQUAL])[0]
    told = predict(UNEQUAL)
    assert [(m.batch, m.boundaries) for m in result.moves] == [(m.batch, m.boundaries) for m in told.moves]
    best = predict(replace(UNEQUAL, method="optimal:time, auto")).moves[-1].boundaries
    assert result.moves[-1].boundaries == best and result.moves[-1].batch <= 10


# One of four workers is 1.5 times slower, with no replica to compare it with: only layers that move can tell.
SLOW_WORKER = [
    Case(
        "model:dense:24", "optimal:time, auto, speeds measured", 4, 8, 12, 10.0, jitter=jitter,
        speeds=tuple(1 / 1.5 if stage == slow else 1.0 for stage in range(4)),
    )
    for slow, jitter in ((0, 0.0), (2, 0.0), (2, 0.1), (3, 0.1))
]


@pytest.mark.exhaustive
def test_one_slow_worker_of_four_is_measured_within_ten_batches() -> None:
    """The engine's own partition, on real ranks, is within 5% of the best one for these speeds; as on paper."""
    for case, (result, _) in zip(SLOW_WORKER, run_ranks(_replay_all, 4, SLOW_WORKER)[0], strict=True):
        seconds = case.load_trace().batches[0].seconds
        reached, best = (
            max(
                sum(seconds[low:high]) / speed for (low, high), speed in zip(pairwise(cuts), case.speeds, strict=True)
            )
            for cuts in (result.boundaries_by_batch()[10], optimal(seconds, 4, speeds=case.speeds).boundaries)
        )
        assert result.moves and best / reached >= 0.95, case
        assert [move.boundaries for move in result.moves] == [move.boundaries for move in predict(case).moves]
