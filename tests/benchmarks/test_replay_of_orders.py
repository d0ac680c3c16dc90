"""Planned orders in virtual time: the real engine takes what the simulator says, and knows which layer took it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.replay.case import Case, Result
from benchmarks.replay.run import Replay, time_of
from dynpipe_ds.planning import plan_order
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import simulate
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

BATCHES = 4


def case_of(trace: str, num_stages: int, **options: Any) -> Case:
    return Case(
        f"model:{trace}", "static uniform", num_stages, 2 * num_stages, BATCHES, 2.0, costs="none", seed=1, **options
    )


# Frozen stages, links, a slow worker, and seconds that differ between micro-batches.
CASES = {
    2: case_of("pruning:6", 2, link_ms=0.5, link_spread=1.0), 4: case_of("freezing:8", 4, jitter=0.3),
    8: case_of("early_exit:16", 8, link_ms=0.2, speeds=(1.0,) * 7 + (0.5,)),
}  # fmt: skip


def order_of(case: Case, batch: int) -> Order:
    """Planned for a batch's seconds on the first partition."""
    return plan_order(workload(case, batch), 10**12).order


def workload(case: Case, batch: int) -> Any:
    trace = case.load_trace()
    blocks = len(trace.layers) - 2
    cuts = [0, *(1 + blocks * stage // case.num_stages for stage in range(1, case.num_stages)), blocks + 2]
    return case.workload(trace.at(batch, BATCHES), cuts, batch)


def _replay(rank: int, case: Case, orders: list[Order]) -> Result:
    with time_of(case) as clock:
        run, coming = Replay(case, clock), iter(orders)
        pipeline = run.engine.dynamic.pipeline
        pipeline.run_order = lambda _: setattr(pipeline, "order_for", partial(_as_it_is, next(coming)))
        return run.run()


def _as_it_is(order: Order, num_micro_batches: int, num_stages: int) -> Order:
    return order


@pytest.mark.parametrize("num_stages", mostly([2, 4, 8], [4]))
def test_virtual_time_of_a_planned_order_is_what_the_simulator_says(num_stages: int) -> None:
    case = CASES[num_stages]
    orders = [order_of(case, batch) for batch in range(BATCHES)]
    assert any(order.split(stage) for order in orders for stage in range(num_stages))
    result = run_ranks(_replay, num_stages, case, orders)[0]
    for batch, order in enumerate(orders):
        told = simulate(workload(case, batch), order)
        assert result.engine_s[batch] == pytest.approx(told.batch_s, rel=1e-9), batch
        assert result.told_s[batch] == pytest.approx(told.batch_s, rel=1e-9)
        assert result.bubbles[batch] == pytest.approx(told.bubble_ratio, abs=1e-9)
        _check_layers(case, batch, order, result)


def _check_layers(case: Case, batch: int, order: Order, result: Result) -> None:
    """The profile has each layer's forward, backward, and the half that was done apart."""
    moment = case.load_trace().at(batch, BATCHES)
    means = case.micro_batch_factors(moment, batch).mean(axis=1)
    for stage, (low, high) in enumerate(pairwise(result.first_boundaries)):
        is_split = bool(order.split(stage)) and moment.frozen_layers < low
        for layer in range(low, high):
            mean = means[layer] / case.speeds[stage]
            backward_s = moment.backward_s[layer] * mean
            weight_s = case.weight_share * backward_s if is_split else 0.0
            told_s = [moment.forward_s[layer] * mean, backward_s, weight_s]
            assert result.layers_s[batch][layer] == pytest.approx(told_s, rel=1e-9), (batch, layer)


def _replay_all(rank: int, cases: list[Case]) -> list[Result]:
    found = []
    for case in cases:
        with time_of(case) as clock:
            found.append(Replay(case, clock).run())
    return found


def test_the_controller_plans_orders_and_each_batch_takes_what_is_told() -> None:
    """Batches that only measure halves, those of planned orders, and 1F1B before them."""
    case = Case("model:early_exit:9", "optimal:time, auto", 3, 6, 12, 20.0, costs="none")
    usual, planned = run_ranks(
        _replay_all, 3, [case, replace(case, method="optimal:time, auto, auto order")]
    )[0]  # fmt: skip
    assert usual.num_orders == 1 and planned.num_orders > 2
    assert planned.losses == usual.losses
    for run in (usual, planned):
        assert run.engine_s == pytest.approx(run.told_s, rel=1e-9)
    assert planned.wall_s < usual.wall_s and planned.longer == pytest.approx(1.0, rel=1e-9)


@pytest.mark.exhaustive
def test_sleeping_layers_sleep_in_both_parts_of_a_backward() -> None:
    """As long as told at least; how much longer is up to the machine. Waiting for sends changes no bit."""
    case = replace(case_of("dense:6", 2), clock="sleeping", costs="calibrated")
    order = order_of(case, 0)
    split = run_ranks(_replay, 2, case, [order] * BATCHES)[0]
    usual, waited = run_ranks(_replay_all, 2, [case, replace(case, sends="waited")])[0]
    assert split.losses == usual.losses == waited.losses
    moment = case.load_trace().batches[0]
    for run, is_split in ((split, True), (usual, False)):
        for stage, (low, high) in enumerate(pairwise(run.first_boundaries)):
            # A layer may be short where the one before was late, a pass may not.
            forward_s, backward_s, weight_s = np.sum(run.layers_s[-1][low:high], axis=0)
            told_s = sum(moment.backward_s[low:high])
            assert forward_s >= 0.99 * sum(moment.forward_s[low:high]) and backward_s >= 0.99 * told_s
            if is_split and stage:
                assert backward_s > weight_s >= 0.99 * case.weight_share * told_s
            else:
                assert weight_s == 0.0
