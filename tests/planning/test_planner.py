"""Planned orders: they run, keep their caps, are never slower than 1F1B, and reproduce a published schedule."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from math import inf

import numpy as np
import pytest

from dynpipe_ds.planning import PlannedOrder, least_seconds, plan_order
from dynpipe_ds.planning.listing import Policy, list_order, work_of
from dynpipe_ds.planning.planner import QUICKEST, RULES, rules_within
from dynpipe_ds.schedule import Instruction, Op, order_of
from dynpipe_ds.simulation import Simulation, Workload, simulate
from dynpipe_ds.simulation.timetable import Timetable

POLICIES = [
    Policy(prefers_forwards, patience, depth)
    for prefers_forwards, patience, depth in product((True, False), (0.0, 0.15, 0.5, 1.5), (1.0, 1.5, inf))
]  # fmt: skip
SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 7), (3, 3), (4, 2), (4, 16), (5, 9), (8, 12)]


def random_workload(rng: np.random.Generator, num_stages: int, num_micro_batches: int) -> Workload:
    """Some stages can't split, some may be frozen; seconds may differ between micro-batches."""
    columns = int(rng.choice([1, num_micro_batches]))
    backward_s = rng.exponential(2.0, (num_stages, columns))
    can_split = rng.random((num_stages, 1)) < 0.8
    sizes = rng.integers(1, 9, num_stages)
    link_s = float(rng.choice([0.0, 0.3]))
    frozen = int(rng.integers(0, num_stages)) if rng.random() < 0.4 else 0
    backward_s[:frozen] = 0.0
    return Workload(
        rng.exponential(1.0, (num_stages, columns)), backward_s, num_micro_batches,
        weight_s=backward_s * rng.random((num_stages, 1)) * can_split, frozen_boundaries=frozen,
        activation_link_s=link_s, gradient_link_s=rng.exponential(link_s or 0.0, (num_stages - 1, num_micro_batches)),
        activation_bytes=sizes.tolist(), weight_bytes=(sizes * rng.choice([1, 2])).tolist(),
    )


def workloads(seed: int, each: int = 4) -> Iterator[Workload]:
    rng = np.random.default_rng(seed)
    for num_stages, num_micro_batches in SIZES:
        for _ in range(each):
            yield random_workload(rng, num_stages, num_micro_batches)


def buffered_1f1b(workload: Workload) -> Simulation:
    return simulate(workload, "1f1b")


def default_cap(workload: Workload) -> int:
    return max(stage.peak_activation_bytes for stage in buffered_1f1b(workload).stages)


def letters(planned: PlannedOrder, stage: int) -> set[str]:
    return {str(one).rstrip("0123456789") for one in planned.order.stages[stage]}


# -- what is planned can be run -------------------------------------------------------------------


def test_an_order_takes_as_long_as_its_listing_and_keeps_its_caps() -> None:
    """Under all policies, within tight caps and wide ones; to the bit where none is frozen or waits by choice."""
    tighter = 0
    for workload in workloads(seed=1):
        count = workload.num_micro_batches
        for policy, times in product(POLICIES, (1, 2, 5)):
            caps = [times * size for size in workload.activation_bytes]
            listing = list_order(work_of(workload, caps), policy)
            result = simulate(workload, listing.order(count))
            assert result.makespan_s <= listing.seconds, policy
            assert result.makespan_s == listing.seconds or policy.patience > 0 or workload.frozen_boundaries
            assert all(stage.peak_activation_bytes <= cap for stage, cap in zip(result.stages, caps, strict=True))
            assert result.makespan_s >= least_seconds(workload, caps) * (1 - 1e-12)
            tighter += least_seconds(workload, caps) > least_seconds(workload)
    assert tighter, "no bound knows that memory is tight"


def test_a_frozen_stage_may_train_after_all() -> None:
    """Where layers skipped the batches that were measured, for example: no order waits for ever then."""
    num_frozen = 0
    for workload in workloads(seed=4, each=8):
        num_frozen += workload.frozen_boundaries > 0
        for policy in POLICIES:
            order = list_order(work_of(workload, workload.activation_bytes), policy).order(workload.num_micro_batches)
            for frozen in range(workload.frozen_boundaries + 1):
                Timetable(order, frozen)
    assert num_frozen > 15


def test_a_frozen_stage_is_no_further_ahead_than_the_first_that_trains_has_room_for() -> None:
    workload = Workload(
        [0.1, 0.1, 1.0, 1.0], [0.0, 0.0, 2.0, 2.0], 20, frozen_boundaries=2, activation_bytes=[0, 0, 1, 1]
    )
    planned = plan_order(workload, [3] * 4)
    ahead = [most_begun(planned.order.stages[stage]) for stage in range(3)]
    assert ahead[0] <= 5 and ahead[1] <= 4 and ahead[2] <= 3


def most_begun(stream: Sequence[Instruction]) -> int:
    """Most micro-batches between their forward and their backward."""
    return max(accumulate((op is Op.FORWARD) - (op is Op.BACKWARD) for op, _ in stream))


def test_a_run_beyond_the_limit_is_given_up() -> None:
    workload = Workload([1.0, 1.0], [2.0, 2.0], 4)
    listing = list_order(work_of(workload, [9, 9]), Policy(False, 0.5), limit_s=5.0)
    assert listing.seconds == float("inf") and sum(map(len, listing.ran)) < 16


def test_never_slower_than_1f1b_and_within_its_memory() -> None:
    shorter = 0
    for workload in workloads(seed=2, each=8):
        planned, usual, cap = plan_order(workload), buffered_1f1b(workload), default_cap(workload)
        assert planned.seconds <= usual.makespan_s * (1 + 1e-9)
        assert max(planned.peak_bytes) <= cap
        assert planned.least_s <= planned.seconds * (1 + 1e-12)
        if planned.is_1f1b:
            assert planned.seconds == usual.makespan_s
        shorter += planned.seconds < 0.97 * usual.makespan_s
    assert shorter > 25, "of 80; planning is worth something"


def test_1f1b_where_nothing_can_be_gained() -> None:
    planned = plan_order(Workload([1.0] * 4, [2.0] * 4, 8))
    assert planned.is_1f1b and planned.order == order_of("1f1b", 8, 4)
    assert not plan_order(Workload([1.0] * 4, [2.0] * 4, 8, weight_s=1.0)).is_1f1b


def test_more_memory_is_used() -> None:
    """Equal stages: with twice the memory nothing is left of the gradients' way back."""
    workload = Workload([1.0] * 4, [2.0] * 4, 16, weight_s=[1.0] * 4, activation_bytes=[10] * 4)
    seconds = [plan_order(workload, caps).seconds for caps in (10, 20, 40, 80)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.5 * seconds[-1]
    assert seconds[-1] == least_seconds(workload)
    assert plan_order(workload, [10, 10, 10, 80]).peak_bytes[:3] == (10, 10, 10)


def test_a_backward_is_whole_where_a_split_one_has_no_room() -> None:
    """Between B and W twice as much is held; a cap of one micro-batch allows no B alone."""
    workload = Workload(
        [1.0, 1.0], [2.0, 2.0], 4, weight_s=[1.0, 1.0], activation_bytes=[10, 10], weight_bytes=[20, 20]
    )
    tight, wide = plan_order(workload, [40, 10]), plan_order(workload, [40, 40])
    assert not tight.order.split(1) and wide.order.split(1)
    assert tight.peak_bytes[1] == 10 and wide.peak_bytes[1] <= 40


# -- the rules ------------------------------------------------------------------------------------


def test_zb_h1() -> None:
    """Qi et al. 2024: on equal stages with F = B = W, a bubble of (S - 1)(F + B - W) in the memory of 1F1B."""
    for num_stages, num_micro_batches in ((2, 4), (3, 6), (4, 8), (4, 12), (8, 16), (8, 24), (16, 32)):
        workload = Workload(
            [1.0] * num_stages, [2.0] * num_stages, num_micro_batches, weight_s=[1.0] * num_stages,
            activation_bytes=[1] * num_stages,
        )
        planned = plan_order(workload)
        assert planned.seconds == 3 * num_micro_batches + (num_stages - 1), (num_stages, num_micro_batches)
        assert planned.simulation.bubble_ratio == pytest.approx((num_stages - 1) / planned.seconds)
        assert buffered_1f1b(workload).makespan_s == 3 * (num_micro_batches + num_stages - 1)
        assert max(planned.peak_bytes) <= num_stages, "what stage 0 holds under 1F1B"


def test_a_stage_is_no_further_ahead_than_its_depth_allows() -> None:
    """As far as under 1F1B, and twice as far, where there is room for more."""
    for workload in workloads(seed=8, each=2):
        num_stages, count = workload.num_stages, workload.num_micro_batches
        for depth in (1.0, 2.0):
            order = list_order(work_of(workload, [999] * num_stages), Policy(True, 0.5, depth)).order(count)
            for stage, stream in enumerate(order.stages):
                assert most_begun(stream) <= depth * (num_stages - stage)


def test_messages_that_take_time_cost_many_stages_little() -> None:
    """A stage that is far ahead is in the middle of a forward when a gradient comes; without depths this takes 7%."""
    workload = Workload(
        [1.0] * 16, [2.0] * 16, 32, weight_s=[1.0] * 16, activation_bytes=[1] * 16, activation_link_s=0.05,
        gradient_link_s=0.05,
    )
    planned = plan_order(workload, effort=22_000)
    assert planned.seconds <= 1.02 * planned.least_s
    assert max(planned.peak_bytes) <= 16, "what stage 0 holds under 1F1B"


def test_who_splits() -> None:
    """Stage 0 and 1 are frozen, 2 is the first that trains, 3 can't split, 4 can."""
    workload = Workload(
        [1.0] * 5, [0.0, 0.0, 2.0, 2.0, 2.0], 10, weight_s=[0.0, 0.0, 1.0, 0.0, 1.0], frozen_boundaries=2,
        activation_bytes=[1] * 5,
    )
    planned = plan_order(workload)
    assert not planned.is_1f1b
    assert [bool(planned.order.split(stage)) for stage in range(5)] == [False, False, False, False, True]
    ran = [one for one in planned.order.stages[2] if one.op in (Op.FORWARD, Op.BACKWARD)]
    assert ran[:3] == [(Op.FORWARD, 0), (Op.FORWARD, 1), (Op.FORWARD, 2)] and "W" not in letters(planned, 2)


def test_weight_gradients_wait_for_a_gap() -> None:
    """The last stage gives its gradient back at once and computes those of its weights when nothing comes."""
    planned = plan_order(Workload([2.0, 1.0], [2.0, 2.0], 4, weight_s=[1.0, 1.0]))
    ran = " ".join(str(one) for one in planned.order.stages[1] if one.op <= Op.BACKWARD_WEIGHT)
    assert ran.startswith("F0 B0 F1 B1") or ran.startswith("F0 B0 W0 F1"), ran
    timeline = simulate(
        Workload([2.0, 1.0], [2.0, 2.0], 4, weight_s=[1.0, 1.0]), planned.order, timeline=True
    ).timeline
    assert {i.kind for i in timeline} >= {"weight"} and planned.seconds < 4 * 4 + 3


def test_the_same_everywhere() -> None:
    """Planned twice: the same order, the same seconds."""
    for workload in workloads(seed=3, each=1):
        first, second = plan_order(workload), plan_order(workload)
        assert first.order == second.order and first.simulation == second.simulation


def test_effort_is_bounded_by_computations_not_by_the_clock() -> None:
    """One rule in any case; no more than all of them."""
    workload = Workload([1.0, 1.1, 1.3, 1.0], [2.0, 2.3, 2.1, 2.5], 8, weight_s=[1.0] * 4, activation_bytes=[1] * 4)
    for effort, most in ((0, 1), (3 * 96, 3), (6 * 96, 5), (10**6, 21)):
        looked_at = plan_order(workload, 2, effort=effort).num_computations
        assert (most - 1) * 96 / 2 < looked_at <= most * 96, "a stage that does not split has fewer"


def test_rules_that_fit() -> None:
    """Of one policy, what pushes the most; another policy where there is time for both."""
    assert [len(rules_within(runs)) for runs in (0, 1, 7, 13.9, 14, 21, 99)] == [1, 1, 1, 1, 2, 3, 3]
    assert [len(rules_within(runs)[0].patiences) for runs in (0, 2, 3, 5, 6.9, 7, 99)] == [0, 0, 1, 2, 2, 3, 3]
    assert rules_within(0, QUICKEST) == (QUICKEST,) and rules_within(5, QUICKEST) == (RULES[2],)


def test_large_pipelines() -> None:
    """64 stages and 256 micro-batches; the processor time is printed, not judged."""
    workload = Workload(
        [1 + 0.1 * (s % 5) for s in range(64)], [2 + 0.3 * (s % 7) for s in range(64)], 256,
        weight_s=[1.0] * 64, activation_bytes=[1] * 64,
    )
    started = time.process_time()
    planned = plan_order(workload)
    print(f"64 x 256: {time.process_time() - started:.2f} s of processor time")
    assert planned.least_s <= planned.seconds < 0.97 * buffered_1f1b(workload).makespan_s
    assert max(planned.peak_bytes) <= 64


# -- refusals -------------------------------------------------------------------------------------


def test_caps_that_can_not_be_kept_are_refused() -> None:
    workload = Workload([1.0, 1.0], [2.0, 2.0], 4, activation_bytes=[10, 2000])
    with pytest.raises(ValueError, match="activation_caps of stage 1 is 1,999 bytes: must be at least the 2,000 that"):
        plan_order(workload, 1999)
    with pytest.raises(ValueError, match=r"activation_caps = \(1, 2, 3\): need one number, or one for each of 2"):
        plan_order(workload, [1, 2, 3])


def test_nobody_waits_for_the_backward_of_the_first_stage_that_trains() -> None:
    """It does all forwards first, although gradients are there, since the next stage waits for those."""
    workload = Workload([1.0, 1.0], [2.0, 2.0], 8, activation_bytes=[1, 1])
    first, second = list_order(work_of(workload, (8, 8)), Policy(prefers_forwards=False, patience=0.0)).ran
    assert list(first) == [Op.FORWARD] * 8 + [Op.BACKWARD] * 8
    assert list(second[:4]) == [Op.FORWARD, Op.BACKWARD] * 2


def test_a_listing_that_takes_too_long_is_given_up_early_and_no_other() -> None:
    """At its own seconds as a limit it is the same listing; below, it is given up before it has come to its end."""
    looked_at, whole = 0, 0
    for workload in workloads(seed=6, each=8):
        for policy, times in product(POLICIES[::3], (1, 3)):
            caps = [times * size for size in workload.activation_bytes]
            free = list_order(work_of(workload, caps), policy)
            same = list_order(work_of(workload, caps), policy, limit_s=free.seconds)
            assert (same.seconds, same.ran, same.whole) == (free.seconds, free.ran, free.whole)
            tight = list_order(work_of(workload, caps), policy, limit_s=0.95 * free.seconds)
            assert tight.seconds == float("inf") and tight.num_computations <= free.num_computations
            looked_at, whole = looked_at + tight.num_computations, whole + free.num_computations
    assert looked_at < 0.9 * whole
