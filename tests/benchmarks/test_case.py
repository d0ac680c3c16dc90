"""Cases, their workloads and simulated runs."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from benchmarks.replay.case import METHODS, Case, Result, best, first_boundaries, frozen_boundaries
from benchmarks.replay.clocks import Costs
from benchmarks.replay.predict import predict
from benchmarks.replay.run import run_cases
from benchmarks.traces.models import MODELS
from dynpipe_ds.config import parse_config


@pytest.mark.parametrize("label", METHODS)
def test_every_method_is_a_valid_section(label: str) -> None:
    section = METHODS[label].section(4, (1.0, 0.5))
    assert parse_config({"dynamic_pipeline": section}).enabled
    assert ("stage_speeds" in section) == METHODS[label].knows_speeds


def test_megatron_cuts_by_blocks() -> None:
    trace = MODELS["dense"](10)
    assert first_boundaries(METHODS["static uniform"], trace, 4) == [0, 4, 7, 9, 12]
    assert first_boundaries(METHODS["static parameters"], trace, 2)[1] == 6


def test_dispersion_has_mean_one_and_the_traces_width() -> None:
    case = Case("model:moe:24", "static uniform", 2, 400, 10)
    moment = case.load_trace().batches[0]
    factors = case.micro_batch_factors(moment, 3)
    assert factors.shape == (26, 400)
    assert (factors[0] == 1).all()  # the embedding has none
    assert factors[1:-1].mean() == pytest.approx(1.0, abs=0.01)
    assert factors[1:-1].std() == pytest.approx(moment.dispersion[1], rel=0.1)
    assert (factors != case.micro_batch_factors(moment, 4)).any()
    assert (factors != case.micro_batch_factors(moment, 3, replica=1)).any()


def test_links_stay_within_four_times_their_mean() -> None:
    delays = np.array(Case("model:dense:8", "static uniform", 4, 500, 10, link_ms=2.0, link_spread=1.0).links_s(0))
    assert delays.shape == (2, 3, 500)
    assert delays.min() == 0.0 and 0.006 < delays.max() <= 0.008
    steady = np.array(Case("model:dense:8", "static uniform", 4, 500, 10, link_ms=2.0).links_s(0))
    assert (steady == 0.002).all()


def test_a_workload_adds_up_layers_speeds_and_frozen_stages() -> None:
    case = Case("model:freezing:8", "static uniform", 2, 3, 10, speeds=(1.0, 0.5))
    moment = case.load_trace().batches[-1]  # six layers are frozen
    workload = case.workload(moment, [0, 6, 10], 0, costs=Costs(forward_s=0.01, backward_s=0.02, message_s=0.001))
    assert frozen_boundaries(moment, [0, 6, 10]) == workload.frozen_boundaries == 1
    assert workload.forward_s[:, 0] == pytest.approx([0.051 + 0.01, 2 * 0.031 + 0.01])
    assert workload.backward_s[:, 0] == pytest.approx([0.0, 2 * 0.062 + 0.02])
    assert (workload.activation_link_s == 0.001).all()


def test_a_trace_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="model:walking:24.*must be a file or model:"):
        Case("model:walking:24", "static uniform", 2, 4, 10).load_trace()
    with pytest.raises(ValueError, match="method = 'guess': must be one of"):
        Case("model:dense:24", "guess", 2, 4, 10)


def test_simulated_runs_gain_by_time_and_not_by_parameters() -> None:
    runs = [predict(Case("model:freezing:24", label, 4, 8, 24, every=4)) for label in METHODS]
    by_label = {run.case.method: run for run in runs}
    static = best(runs, ("static uniform", "static parameters"))
    assert by_label["balanced:parameters"].throughput == pytest.approx(static.throughput, rel=0.02)
    assert by_label["optimal:time"].last_throughput() > 1.2 * static.last_throughput()
    assert by_label["optimal:time"].last_bubble() < static.last_bubble() - 0.1
    again = Result.from_values(static.as_values())
    assert again == static and len(again.boundaries_by_batch()) == 24


def test_a_batch_of_replicas_ends_with_the_slowest() -> None:
    case = Case("model:moe:24", "static uniform", 2, 4, 4)
    one, many = predict(case), predict(replace(case, replicas=4))
    assert fmean(many.batches_s) > fmean(one.batches_s)
    assert many.throughput > 3.5 * one.throughput


@pytest.mark.parametrize(("options", "message"), [
    ({"clock": "sundial"}, "clock = 'sundial': must be one of virtual, sleeping"),
    ({"costs": "some"}, "costs = 'some': must be one of calibrated, unscaled, none"),
    ({"num_micro_batches": 0}, "num_micro_batches = 0: must be >= 1"),
    ({"replicas": 0}, "replicas = 0: must be >= 1"),
    ({"jitter": -0.1}, "jitter = -0.1: must be >= 0 and finite"),
    ({"link_ms": float("nan")}, "link_ms = nan: must be >= 0 and finite"),
    ({"speeds": (1.0, 0.0)}, r"speeds = \(1.0, 0.0\): need one > 0 for each of 2 stages"),
    ({"leaves": ((3, 2),)}, "fewer each time than before \\(2 at the start\\)"),
    ({"leaves": ((10, 1),)}, "a batch, from 1 to 9 and ascending"),
])  # fmt: skip
def test_what_can_not_be_replayed_is_named(options: dict[str, Any], message: str) -> None:
    plain = {"trace": "model:dense:24", "method": "static uniform", "num_stages": 2, "num_micro_batches": 4}
    with pytest.raises(ValueError, match=message):
        Case(**plain | {"num_batches": 10} | options)


def test_a_trace_with_fewer_blocks_than_stages_is_refused_before_a_rank_starts() -> None:
    with pytest.raises(ValueError, match="num_stages = 8: model:dense:6 has only 6 blocks"):
        next(run_cases([Case("model:dense:6", "static uniform", 8, 8, 10)]))


def test_jitter_has_mean_one_and_its_width() -> None:
    case = Case("model:dense:24", "static uniform", 2, 400, 10, jitter=0.2, seed=1)
    factors = case.micro_batch_factors(case.load_trace().batches[0], 3)
    assert factors.mean() == pytest.approx(1.0, abs=0.01) and factors.std() == pytest.approx(0.2, rel=0.05)
    again = replace(case, seed=2).micro_batch_factors(case.load_trace().batches[0], 3)
    assert (factors != again).any()


def test_a_slow_worker_need_not_be_told() -> None:
    """Nearly as fast as if it were; the first move is away from it in either case."""
    speeds = (1.0, 1 / 1.5, 1.0, 1.0)
    told, measured = (
        predict(Case("model:dense:24", label, 4, 16, 40, 15.0, speeds=speeds))
        for label in ("optimal:time, auto", "optimal:time, auto, speeds measured")
    )
    assert measured.wall_s < 1.05 * told.wall_s
    assert measured.last_throughput() > 0.97 * told.last_throughput()
    assert len(measured.moves) <= len(told.moves) + 2


@pytest.mark.parametrize("worker", [0, 3, 6])
def test_one_slow_replica_is_found_within_ten_batches(worker: int) -> None:
    """Four stages of two replicas: the partition is soon within 95% of the best one for the worker that paces all."""
    speeds = tuple(1 / 1.5 if number == worker else 1.0 for number in range(8))
    case = Case("model:dense:24", "optimal:time, auto, speeds measured", 4, 16, 24, 15.0, speeds=speeds, replicas=2)
    measured = predict(case)
    assert [move for move in measured.moves if move.batch > 10] == []
    told = predict(replace(case, method="optimal:time, auto"))
    assert measured.last_throughput() > 0.95 * told.last_throughput()
    mean = predict(replace(case, method="static uniform"))
    assert measured.last_throughput() > 1.1 * mean.last_throughput()
