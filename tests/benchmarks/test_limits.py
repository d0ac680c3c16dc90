"""The bound of all cuts and orders: below the best of all orders on all cuts, found by trying each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from benchmarks.replay.case import Case
from benchmarks.replay.predict import predict
from benchmarks.schedules import limits
from benchmarks.schedules.limits import Layers, least_of_all_cuts
from benchmarks.schedules.on_paper import TODAY
from benchmarks.schedules.replayed import AUTO_RUN, STATIC_RUN
from dynpipe_ds.planning import least_seconds
from dynpipe_ds.simulation import Workload

Step = tuple[str, int]


def random_layers(seed: int, num_layers: int, count: int, *, message_s: float = 0.0, num_frozen: int = 0) -> Layers:
    rng = np.random.default_rng(seed)
    forward_s, input_s, weight_s = rng.lognormal(0, 0.6, (3, num_layers, count))
    input_s[:num_frozen] = weight_s[:num_frozen] = 0.0
    return Layers(forward_s, input_s, weight_s, num_frozen, message_s)


def cuts_of(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


@cache
def sequences(count: int) -> list[tuple[Step, ...]]:
    """All in which a stage may go through F, B and W of some micro-batches, in whatever order of these."""
    found: list[tuple[Step, ...]] = [()]
    for _ in range(3 * count):
        found = [
            (*done, (op, m))
            for done in found for op, before in (("F", ""), ("B", "F"), ("W", "B")) for m in range(count)
            if (op, m) not in done and (not before or (before, m) in done)
        ]  # fmt: skip
    return found


def took_s(layers: Layers, cuts: Sequence[int], order: Sequence[Sequence[Step]]) -> float:
    """Seconds of an order; infinite where stages wait for ever."""
    tables = {"F": layers.forward_s, "B": layers.input_s, "W": layers.weight_s}
    seconds = [{op: each[low:high].sum(axis=0) for op, each in tables.items()} for low, high in pairwise(cuts)]
    last, done = len(order) - 1, dict[tuple[int, str, int], float]()
    free_s, positions = [0.0] * len(order), [0] * len(order)
    while any(position < len(steps) for position, steps in zip(positions, order, strict=True)):
        moved = False
        for stage, steps in enumerate(order):
            while positions[stage] < len(steps):
                op, m = steps[positions[stage]]
                sender = stage - 1 if op == "F" else stage + 1
                waits_behind = op == "B" and stage < last and cuts[stage + 1] > layers.num_frozen
                waits = waits_behind or (op == "F" and stage > 0)
                if waits and (sender, op, m) not in done:
                    break
                ready_s = done[sender, op, m] + layers.message_s if waits else 0.0
                free_s[stage] = done[stage, op, m] = max(free_s[stage], ready_s) + seconds[stage][op][m]
                positions[stage] += 1
                moved = True
        if not moved:
            return math.inf
    return max(free_s)


@pytest.mark.parametrize(("num_stages", "num_layers"), [(2, 4), pytest.param(3, 4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("num_frozen", [0, 1])
def test_no_order_on_no_cut_is_shorter(num_stages: int, num_layers: int, num_frozen: int) -> None:
    ratios = []
    for seed in range(4 if num_stages == 2 else 1):
        layers = random_layers(seed, num_layers, 2, message_s=0.1 * (seed % 2), num_frozen=num_frozen)
        best_s = min(
            took_s(layers, cuts, order)
            for cuts in cuts_of(num_layers, num_stages) for order in product(sequences(2), repeat=num_stages)
        )  # fmt: skip
        ratios.append(least_of_all_cuts(layers, num_stages) / best_s)
    assert max(ratios) <= 1 + 1e-9, ratios
    assert min(ratios) > 0.75, "a bound that says nothing"


def test_the_least_of_all_cuts_is_found_exactly() -> None:
    for seed, num_frozen in product(range(4), (0, 2)):
        layers = random_layers(seed, 8, 3, num_frozen=num_frozen)
        layers = Layers(*(np.repeat(t[:, :1], 3, axis=1) for t in (layers.forward_s, layers.input_s, layers.weight_s)),
                        num_frozen)  # fmt: skip

        def bound_s(cuts: tuple[int, ...], layers: Layers = layers) -> float:
            forward_s, input_s, weight_s = (
                [float(each[low:high, 0].sum()) for low, high in pairwise(cuts)]
                for each in (layers.forward_s, layers.input_s, layers.weight_s)
            )
            backward_s = [a + b for a, b in zip(input_s, weight_s, strict=True)]
            frozen = sum(cut <= layers.num_frozen for cut in cuts[1:-1])
            return least_seconds(Workload(forward_s, backward_s, 3, weight_s=weight_s, frozen_boundaries=frozen))

        assert least_of_all_cuts(layers, 3) == pytest.approx(min(map(bound_s, cuts_of(8, 3))), rel=1e-12)


def test_host_time_and_messages_make_it_longer() -> None:
    free = random_layers(3, 9, 4)
    tables = free.forward_s, free.input_s, free.weight_s
    slow = [Layers(*tables, message_s=2.0), Layers(*tables, forward_host_s=0.2), Layers(*tables, backward_host_s=0.2)]
    least_s = least_of_all_cuts(free, 3)
    assert all(least_of_all_cuts(each, 3) > least_s for each in slow), "the last stage begins and ends later, too"
    assert least_s > free.total_s / 3


def test_the_table_says_which_goals_are_out_of_reach() -> None:
    within = limits.Limit(8, 10.0, 8.0, 8.8, 0.2, 7.5, 7.8, 54.0)
    beyond = limits.Limit(4, 10.0, 9.6, 9.8, 0.2, 9.3, 9.4, 30.0)
    assert within.least_bubble == pytest.approx(0.1)
    text = limits.text_of([beyond, within])
    assert "| **bound**: any cut, any order | 1.075 | 1.333 |" in text
    found = list(limits.notes([beyond, within]))
    assert "at most 1.064x (goal 1.10x: out of reach)" in found[0]
    assert "at most 1.282x (goal 1.14x: within the bound)" in found[1]
    assert "a bubble of 10.0% at least (goal 16%: within the bound)" in found[2]


def test_a_plan_by_the_mean_load_is_timed_with_every_batch() -> None:
    """It loses to no run that has to find its plan, and gains over one that makes none."""
    case = Case("model:sparse_attention:12:halves", STATIC_RUN, 4, 8, 10, 30.0)
    planned_s = limits.planned_by_the_mean_s(case)
    static, ours = (predict(replace(case, method=method)).wall_s for method in (STATIC_RUN, AUTO_RUN))
    assert planned_s < static and planned_s < 1.005 * ours
    kept = [
        {"case": asdict(replace(case, trace=f"model:{name}:12:halves")), "paper": {TODAY: {"seconds": 2 * planned_s}},
         "engine": {AUTO_RUN: {"wall_s": ours}}}
        for name in ("pruning", "sparse_attention")
    ]  # fmt: skip
    (row,) = limits.foreseen(kept)
    assert row == limits.Foreseen("sparse_attention", 4, 2 * planned_s, planned_s, ours)
    assert f"| 4 | sparse_attention | 2.000 | {2 * planned_s / ours:.3f} | " in limits.foreseen_text([row])
