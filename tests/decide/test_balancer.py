"""Whether 'auto' rebalances on synthetic traces: what is left alone, what is answered, and what a move must bring."""

from __future__ import annotations

from typing import Any

import pytest

from dynpipe_ds.partition import Plan
from tests.decide.synthetic import (
    BETTER,
    NOISES,
    QUIET,
    UNEQUAL,
    Boundaries,
    Model,
    Noise,
    batch_s,
    controller,
    decide,
    equal_layers,
    half_gets_cheaper,
    optimal,
    profile,
    train,
)
from tests.matrix import mostly

# -- a balanced static model is left alone ----------------------------------------------------


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.parametrize(
    "start",
    [
        (0, 4, 8),
        (0, 4, 9),  # (0, 5, 9) is exactly as good: nothing but noise between the two
        (0, 5, 10, 14, 18),  # many others are as good
        (0, 2, 4, 6, 8, 10, 12, 14, 16),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("num_batches", "seed"),
    mostly([(150, 0), *((500, seed) for seed in range(1, 4))], {(150, 0)}),
)
def test_balanced_static_model_is_left_alone(
    num_batches: int, seed: int, start: Boundaries, noise: Noise
) -> None:
    """Two spikes of one rank in a row look like a change of the model: what that costs is promised, not the count."""
    model, move_s = equal_layers(start[-1]), 0.05
    run = train(model, start, num_batches=num_batches, noise=noise, seed=seed, move_s=move_s)
    there_is_a_tie = start[-1] % (len(start) - 1) != 0
    if there_is_a_tie:
        assert len(run.moved_at) <= num_batches // 25, run.decisions[-1]
    elif not noise.spike_probability:
        assert not run.moved_at, run.decisions[-1]
    left_alone_s = num_batches * batch_s(tuple(model(0)), start, 8)
    lost_s = run.batches_s - left_alone_s + move_s * len(run.moved_at)
    bound = 0.03 if there_is_a_tie else 0.005  # partitions with the same bottleneck fill and drain otherwise
    assert lost_s <= bound * left_alone_s, f"{lost_s / left_alone_s:.2%} lost by moves after batches {run.moved_at}"


@pytest.mark.parametrize("noise", NOISES[:3], ids=str)
def test_cheap_moves_do_not_make_it_restless(noise: Noise) -> None:
    """Two batches are evidence enough, but noise is none: once in a while between two partitions that are as good."""
    first, *others = train(equal_layers(9), (0, 1, 9), num_batches=300, noise=noise, move_s=0.001).moved_at
    assert first == 2 and len(others) <= 6


def test_plans_are_not_even_made_where_nothing_can_be_gained() -> None:
    assert train(equal_layers(8), (0, 4, 8), num_batches=50).num_due == 0


def test_a_machine_that_slows_down_as_a_whole_is_no_reason() -> None:
    model: Model = lambda batch: [0.01 * (1 + batch % 3)] * 9  # noqa: E731
    assert train(model, (0, 4, 9), num_batches=100).moved_at == []


# -- a changed model is answered --------------------------------------------------------------


@pytest.mark.parametrize("noise", [QUIET, *NOISES[:2], Noise(rank=0.05)], ids=str)
@pytest.mark.parametrize("start", [(0, 4, 8), (0, 4, 8, 12, 16), (0, 5, 10, 14, 18)], ids=str)
def test_step_change_is_answered_within_six_batches(start: Boundaries, noise: Noise) -> None:
    for seed in range(4):
        model = half_gets_cheaper(start[-1], at=40)
        run = train(model, start, num_batches=46, noise=noise, seed=seed)
        assert run.moved_at, run.decisions[-1]
        assert 40 <= run.moved_at[0] < (41 if noise is QUIET else 46)


def test_step_change_under_heavy_noise_is_usually_answered_in_eight_batches() -> None:
    runs = [
        train(half_gets_cheaper(8, 40), (0, 4, 8), num_batches=60, noise=Noise(rank=0.1), seed=seed)
        for seed in range(20)
    ]
    late = [run for run in runs if not run.moved_at or run.moved_at[0] >= 48]
    assert all(run.moved_at for run in runs)
    assert len(late) <= 4


def test_first_partition_is_corrected_as_soon_as_there_is_evidence() -> None:
    run = train(equal_layers(8), (0, 1, 8), num_batches=20)
    assert run.moved_at == [2]  # three profiles to plan from
    assert run.boundaries == (0, 4, 8)


def test_no_fresh_profiles_are_needed_after_a_move() -> None:
    steps: Model = lambda batch: half_gets_cheaper(8, 20)(batch if batch < 24 else 0)  # noqa: E731
    run = train(steps, (0, 4, 8), num_batches=40)
    assert run.moved_at == [20, 25]  # layers that become slower may have been held up: two batches
    assert run.boundaries == (0, 4, 8)


@pytest.mark.parametrize("noise", [QUIET, Noise(layer=0.02, rank=0.02), Noise(rank=0.05)], ids=str)
def test_slow_drift_leads_to_few_rebalances(noise: Noise) -> None:
    def pruned(batch: int) -> list[float]:
        left = max(0.2, 1 - batch / 250)
        return [0.01 * left] * 16 + [0.01] * 16

    run = train(pruned, (0, 8, 16, 24, 32), num_batches=300, noise=noise)
    assert 2 <= len(run.moved_at) <= 6
    best = optimal(pruned(299), 4, run.boundaries)
    assert best.bottleneck_before is not None
    assert best.bottleneck_before <= 1.1 * best.bottleneck


# -- batches that are not profiled ------------------------------------------------------------


@pytest.mark.parametrize("noise", [QUIET, *NOISES[:2]], ids=str)
@pytest.mark.parametrize("start", [(0, 4, 8), (0, 5, 10, 14, 18)], ids=str)
def test_step_change_among_batches_that_are_seldom_profiled(start: Boundaries, noise: Noise) -> None:
    """At most nine batches pass until it is seen; from then on as fast as ever."""
    for at in range(40, 50, 3):
        model = half_gets_cheaper(start[-1], at)
        run = train(model, start, num_batches=at + 15, noise=noise, seed=at, profile_every=10)
        seen = next(batch for batch in run.profiled if batch >= at)
        assert seen - at < 10 and len(run.profiled) < 8 + (seen + 10) // 10 + 15
        assert run.moved_at and seen <= run.moved_at[0] < seen + 6


def test_an_interval_decides_by_the_same_batches_whatever_is_profiled_between() -> None:
    model = half_gets_cheaper(9, at=33)
    section = {"rebalance_every": 8, "min_gain": 0.0, "noise": Noise(0.05, 0.05), "num_batches": 80}
    every, seldom = (train(model, (0, 4, 9), profile_every=number, **section) for number in (1, 25))
    assert every.moved_at and seldom.moved_at == every.moved_at
    assert [(d.rebalance, d.reason, d.saved_s, d.cost_s) for d in seldom.decisions] == [
        (d.rebalance, d.reason, d.saved_s, d.cost_s) for d in every.decisions
    ]  # the noise that 'auto' goes by is measured over other batches
    assert len(seldom.profiled) < len(every.profiled) == 80


def test_a_profile_of_unknown_cost_is_taken_in_every_batch() -> None:
    assert train(equal_layers(8), (0, 4, 8), num_batches=40).profiled == list(range(40))


# -- a move has to pay ------------------------------------------------------------------------


def test_saved_and_cost_of_a_move() -> None:
    decision = decide(controller(), BETTER, UNEQUAL)
    assert decision.rebalance
    assert decision.saved_s == pytest.approx(20 * 7 * 0.02)
    assert decision.cost_s == pytest.approx((7 * 0.08 + 0.12) / 20)  # nothing measured: a twentieth of a batch
    assert decision.noise == pytest.approx(0.0)
    assert "pays: 2.8 s saved over 20 batches, 0.034 s to move" in decision.reason


def test_expensive_move_is_refused_until_moves_become_cheap() -> None:
    decider = controller()
    decider.record_cost(3.0)
    decision = decide(decider, BETTER, UNEQUAL)
    assert not decision.rebalance
    assert decision.cost_s == 3.0
    assert decision.reason == "does not pay: 2.8 s saved over 20 batches, 3 s to move"
    decider.record_cost(0.5)  # the first move was a slow one
    assert decide(decider, BETTER, UNEQUAL).rebalance


def test_longer_horizon_pays_for_a_dearer_move() -> None:
    decider = controller(horizon_batches=100)
    decider.record_cost(3.0)
    assert decide(decider, BETTER, UNEQUAL).rebalance


def test_one_odd_cost_counts_for_little() -> None:
    decider = controller()
    for seconds in (0.1, 50.0, 0.1, 0.2):
        decider.record_cost(seconds)
    assert decide(decider, BETTER, UNEQUAL).cost_s == 0.1


@pytest.mark.parametrize("every", ["auto", 2])
def test_shorter_batch_with_the_same_bottleneck(every: Any) -> None:
    """Five and four equal layers: the light stage at the end drains sooner."""
    plan, seconds = Plan((0, 5, 9), 0.05, 0.05), [0.01] * 9
    decider = controller(rebalance_every=every, min_gain=0.01)
    decider.record_cost(0.01)
    for batch in range(10):
        decider.observe(profile(seconds, (0, 4, 9), batch=batch))
    smoothed = decider.smoothed()
    assert smoothed is not None
    decision = decider.judge(plan, smoothed)
    assert decision.rebalance, decision.reason
    assert decision.saved_s == pytest.approx((20 if every == "auto" else 2) * 0.01, rel=0.5)
    back = Plan((0, 4, 9), 0.05, 0.05)
    for batch in range(10, 20):
        decider.observe(profile(seconds, (0, 5, 9), batch=batch))
    smoothed = decider.smoothed()
    assert smoothed is not None
    assert not decider.judge(back, smoothed).rebalance


def test_one_micro_batch_gains_nothing() -> None:
    decider = controller()
    decider.record_cost(0.0)
    decision = decide(decider, BETTER, UNEQUAL, num_micro_batches=1)
    assert not decision.rebalance
    assert decision.saved_s == pytest.approx(0.0)


def test_little_gain_is_refused() -> None:
    decision = decide(controller(min_gain=0.3), BETTER, UNEQUAL)
    assert not decision.rebalance
    assert decision.reason == "gain 25.0% not yet beyond min_gain and the noise of 0.0%"


def test_plan_that_changes_nothing_is_refused() -> None:
    decision = decide(controller(min_gain=0.0), Plan((0, 4, 8), 0.08, 0.08), UNEQUAL)
    assert not decision.rebalance
    assert decision.reason == "the present partition is the best one known"


def test_plan_that_saves_no_time_is_refused() -> None:
    worse = Plan((0, 3, 8), 5, 10)  # better balanced in some other cost
    decision = decide(controller(), worse, UNEQUAL)
    assert not decision.rebalance
    assert decision.saved_s < 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_cost(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be finite and >= 0"):
        controller().record_cost(seconds)


def test_declared_slow_worker_is_balanced_by_speed() -> None:
    measured = [0.01] * 6 + [0.02] * 3  # equal layers; the second worker is half as fast
    decider = controller(stage_speeds=[1.0, 0.5])
    for batch in range(10):
        decider.observe(profile(measured, (0, 6, 9), batch=batch))
    smoothed = decider.smoothed()
    assert smoothed is not None
    assert smoothed.costs("time") == pytest.approx([0.01] * 9)
    assert not decider.due(9)
    by_count = decider.judge(Plan((0, 5, 9), 0.08, 0.06), smoothed)
    assert by_count.saved_s == pytest.approx(20 * (7 * -0.02 - 0.01))
    decider.observe(profile([0.01] * 3 + [0.02] * 6, (0, 3, 9), batch=10))
    assert decider.judge(Plan((0, 6, 9), 0.06, 0.12), profile([0.01] * 9, (0, 3, 9))).rebalance


# -- one batch is enough, and a move is looked back at ----------------------------------------


def engine_of(model: Model, start: Boundaries, num_batches: int, **section: Any) -> tuple[list[int], list[Boundaries]]:
    """After which batches a balancer with its own partitioner moved, and to what."""
    balancer, cuts, moved, to = controller(**section), start, [], []
    for batch in range(num_batches):
        balancer.observe(profile(model(batch), cuts, batch=batch))
        decided = balancer.decide(batch, cuts)
        if decided is not None and decided[1].rebalance:
            cuts = decided[0].boundaries
            balancer.moved(batch, decided[0].bytes_to_move)
            moved.append(batch)
            to.append(cuts)
    return moved, to


def test_layers_that_become_faster_are_believed_at_once() -> None:
    assert engine_of(half_gets_cheaper(8, at=20), (0, 4, 8), 30)[0] == [20]


def test_a_worker_that_is_held_up_once_moves_nothing() -> None:
    held_up: Model = lambda batch: [0.03 if batch == 20 else 0.01] * 4 + [0.01] * 4  # noqa: E731
    assert engine_of(held_up, (0, 4, 8), 30) == ([], [])


def test_a_move_that_was_no_gain_is_undone() -> None:
    """Layers were faster by half for once, and by a sixth from then on: too little to move for, enough to go back."""
    model: Model = lambda batch: [0.01 if batch < 4 else 0.004 if batch == 4 else 0.0085] * 4 + [0.01] * 4  # noqa: E731
    moved, to = engine_of(model, (0, 4, 8), 40, min_gain=0.15)
    assert to == [(0, 5, 8), (0, 4, 8)]
    assert moved == [4, 8], "by the median of four batches"


@pytest.mark.parametrize("way", ["pinned since", "after the last batch", "chosen by the user"])
def test_a_move_that_may_not_be_undone(way: str) -> None:
    model: Model = lambda batch: [0.01 if batch < 4 else 0.004 if batch == 4 else 0.0085] * 4 + [0.01] * 4  # noqa: E731
    balancer = controller(min_gain=0.15, **({"last_batch": 6} if "last" in way else {}))
    cuts: Boundaries = (0, 4, 8)
    for batch in range(12):
        balancer.observe(profile(model(batch), cuts, batch=batch))
        decided = balancer.decide(batch, cuts)
        if decided is not None and decided[1].rebalance:
            cuts = decided[0].boundaries
            balancer.moved(batch)
            if way == "pinned since":
                balancer.forbid([4])
            elif way == "chosen by the user":
                balancer.release()
    assert cuts == (0, 5, 8)


def test_what_the_user_holds_is_not_undone() -> None:
    balancer, model = controller(), half_gets_cheaper(8, at=20)
    for batch in range(21):
        balancer.observe(profile(model(batch), (0, 4, 8), batch=batch))
        decided = balancer.decide(batch, (0, 4, 8))
    assert decided is not None and decided[1].rebalance
    balancer.moved(20)
    balancer.hold(21, 1)
    for batch in range(21, 30):
        balancer.observe(profile([0.01] * 8, decided[0].boundaries, batch=batch))
        assert batch != 24 or balancer._back(batch, decided[0].boundaries) is None
