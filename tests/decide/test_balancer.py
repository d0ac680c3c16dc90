"""When to rebalance: intervals, 'auto' on synthetic traces and on a recorded one.

The traces go through a real partitioner that plans from the smoothed, noisy profile, so that a
plan looks better than it is (it was chosen for looking good), as it does in training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide import Balancer, Decision
from dynpipe_ds.decide.evidence import LEAST_EVIDENCE
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.partition import Plan
from dynpipe_ds.simulation import predicted_batches_s
from tests.matrix import mostly

RECORDING = Path(__file__).parents[1] / "data" / "recorded_freezing.json"
Boundaries = tuple[int, ...]
Model = Callable[[int], Sequence[float]]
"""Batch number to the true forward and backward seconds of every layer."""


def optimal(costs: Sequence[float], num_stages: int, current: Boundaries) -> Plan:
    """Smallest bottleneck by dynamic programming, independent of the package's own."""
    until = [0.0, *accumulate(costs)]
    ends = range(len(costs) + 1)
    best: list[tuple[float, Boundaries]] = [(until[end], (0, end)) for end in ends]
    for stage in range(1, num_stages):
        best = [
            min(
                (
                    (max(best[cut][0], until[end] - until[cut]), (*best[cut][1], end))
                    for cut in range(stage, end)
                ),
                default=(float("inf"), ()),
            )
            for end in ends
        ]
    bottleneck, boundaries = best[-1]
    before = max(until[high] - until[low] for low, high in pairwise(current))
    return Plan(boundaries, bottleneck, before, bytes_to_move=1)


def profile(
    seconds: Sequence[float], boundaries: Boundaries, *, batch: int = 0, num_micro_batches: int = 8
) -> PipelineProfile:
    """One batch with these layer times."""
    layers = tuple(LayerProfile("layer", s / 3, s * 2 / 3, 1, 4, 4, 8, 1) for s in seconds)
    return PipelineProfile(batch, boundaries, num_micro_batches, layers, ())


@cache
def batch_s(seconds: tuple[float, ...], boundaries: Boundaries, num_micro_batches: int) -> float:
    """Seconds of a batch with these layer times."""
    batch = profile(seconds, boundaries, num_micro_batches=num_micro_batches)
    return predicted_batches_s([(batch, boundaries)])[0]


def controller(**section: Any) -> Balancer:
    """A controller with this section."""
    return Balancer(DynamicPipelineConfig(enabled=True, **section))


@dataclass(frozen=True)
class Noise:
    """Relative noise: of each layer, of all layers of a rank together, and threefold spikes."""

    layer: float = 0.0
    rank: float = 0.0
    spike_probability: float = 0.0

    def apply(
        self, seconds: Sequence[float], boundaries: Boundaries, rng: random.Random
    ) -> list[float]:
        """One noisy batch."""
        noisy: list[float] = []
        for low, high in pairwise(boundaries):
            rank = rng.gauss(1.0, self.rank)
            rank *= 3.0 if rng.random() < self.spike_probability else 1.0
            noisy += [s * max(0.05, rank * rng.gauss(1.0, self.layer)) for s in seconds[low:high]]
        return noisy


QUIET = Noise()
NOISES = [
    Noise(layer=0.02, rank=0.02),
    Noise(layer=0.1),
    Noise(rank=0.1),
    Noise(layer=0.05, rank=0.05, spike_probability=0.01),
]


@dataclass
class Run:
    """What a training run did."""

    boundaries: Boundaries
    moved_at: list[int] = field(default_factory=list)
    profiled: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    num_due: int = 0
    batches_s: float = 0.0
    """True seconds of all batches, as they were cut, without noise and moves."""


def train(
    model: Model,
    start: Boundaries,
    *,
    num_batches: int,
    noise: Noise = QUIET,
    seed: int = 0,
    move_s: float = 0.05,
    num_micro_batches: int = 8,
    **section: Any,
) -> Run:
    """Play the engine: profile, ask, plan, decide, move."""
    rng = random.Random(seed)
    decider, run = controller(**section), Run(start)
    for batch in range(num_batches):
        run.batches_s += batch_s(tuple(model(batch)), run.boundaries, num_micro_batches)
        seconds = noise.apply(model(batch), run.boundaries, rng)  # whether profiled or not: runs draw the same noise
        if not decider.wants_profile(batch):
            continue
        run.profiled.append(batch)
        decider.observe(
            profile(seconds, run.boundaries, batch=batch, num_micro_batches=num_micro_batches)
        )
        if not decider.due(batch):
            continue
        run.num_due += 1
        smoothed = decider.smoothed()
        assert smoothed is not None
        plan = optimal(smoothed.costs("time"), len(start) - 1, run.boundaries)
        run.decisions.append(decider.judge(plan, smoothed))
        if run.decisions[-1].rebalance:
            run.boundaries = plan.boundaries
            run.moved_at.append(batch)
            decider.record_cost(move_s)
            decider.moved(batch)
    return run


def equal_layers(num_layers: int) -> Model:
    """Every layer takes 10 ms, always."""
    return lambda batch: [0.01] * num_layers


def half_gets_cheaper(num_layers: int, at: int) -> Model:
    """The first half of the layers becomes three times cheaper."""
    cheap = [0.01 / 3] * (num_layers // 2) + [0.01] * (num_layers - num_layers // 2)
    return lambda batch: cheap if batch >= at else [0.01] * num_layers


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
        assert 40 + LEAST_EVIDENCE - 1 <= run.moved_at[0] < 46


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
    assert run.moved_at == [21, 25]
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
        assert run.moved_at and seen + LEAST_EVIDENCE - 1 <= run.moved_at[0] < seen + 6


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


def decide(decider: Balancer, plan: Plan, seconds: Sequence[float], **kwargs: Any) -> Decision:
    """Show the same batch ten times, then ask."""
    for batch in range(10):
        decider.observe(profile(seconds, (0, 4, 8), batch=batch, **kwargs))
    smoothed = decider.smoothed()
    assert smoothed is not None
    return decider.judge(plan, smoothed)


UNEQUAL = [0.01] * 4 + [0.02] * 4  # 40 and 80 ms; 60 and 60 ms after moving a layer
BETTER = Plan((0, 5, 8), 0.06, 0.08)


def test_saved_and_cost_of_a_move() -> None:
    decision = decide(controller(), BETTER, UNEQUAL)
    assert decision.rebalance
    assert decision.saved_s == pytest.approx(20 * 7 * 0.02)
    assert decision.cost_s == pytest.approx((7 * 0.08 + 0.12) / 10)  # nothing measured: a tenth of a batch
    assert decision.noise == pytest.approx(0.0)
    assert "pays: 2.8 s saved over 20 batches, 0.068 s to move" in decision.reason


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


# -- intervals and the dynamic phase ----------------------------------------------------------


def due_batches(num_batches: int, **section: Any) -> list[int]:
    """Batches after which an unequal model is due; plans are made but refused."""
    decider, due = controller(**section), []
    for batch in range(num_batches):
        decider.observe(profile(UNEQUAL, (0, 4, 8), batch=batch))
        if decider.due(batch):
            due.append(batch)
            smoothed = decider.smoothed()
            assert smoothed is not None
            decider.judge(Plan((0, 4, 8), 0.08, 0.08), smoothed)
    return due


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"rebalance_every": "never"}, []),
        ({"rebalance_every": 5}, [4, 9, 14, 19]),
        ({"rebalance_every": 1, "profile_batches": 17}, [16, 17, 18, 19]),
        ({"rebalance_every": 5, "profile_batches": 7}, [6, 9, 14, 19]),
        ({"rebalance_every": 5, "first_batch": 8}, [12, 17]),
        ({"rebalance_every": 1, "first_batch": 8, "last_batch": 11}, [8, 9, 10, 11]),
        ({"rebalance_every": "auto", "last_batch": 5}, [2, 3, 4, 5]),
        ({"rebalance_every": "auto", "profile_batches": 18}, [17, 18, 19]),
    ],
    ids=str,
)
def test_due(section: dict[str, Any], expected: list[int]) -> None:
    assert due_batches(20, **section) == expected


def test_asking_changes_nothing() -> None:
    decider = controller(rebalance_every=1, profile_batches=1)
    assert not decider.due(0)
    assert decider.smoothed() is None
    decider.observe(profile(UNEQUAL, (0, 4, 8)))
    assert decider.due(0)
    assert decider.due(0)


def test_move_asked_for_by_the_user_begins_a_new_interval() -> None:
    decider = controller(rebalance_every=5, profile_batches=1)
    decider.observe(profile(UNEQUAL, (0, 4, 8)))
    assert decider.due(4)
    decider.moved(4)
    assert not decider.due(8)
    assert decider.due(9)


def test_interval_takes_the_partitioners_prediction() -> None:
    section = {"rebalance_every": 10, "min_gain": 0.25}
    decision = decide(controller(**section), BETTER, UNEQUAL)
    assert decision.rebalance
    assert decision.reason == "predicted gain 25.0% reaches min_gain 25.0%"
    assert decision.saved_s == pytest.approx(10 * 7 * 0.02)
    decision = decide(controller(**section), Plan((0, 5, 8), 0.07, 0.08), UNEQUAL)
    assert not decision.rebalance
    assert decision.reason == "predicted gain 12.5% is less than min_gain 25.0%"


def test_interval_without_gain_moves_nothing() -> None:
    decider = controller(rebalance_every=1, min_gain=0.0)
    assert not decide(decider, Plan((0, 3, 8), 0.1, 0.08), UNEQUAL).rebalance


def test_never() -> None:
    decision = decide(controller(rebalance_every="never"), BETTER, UNEQUAL)
    assert not decision.rebalance
    assert decision.reason == "rebalance_every is 'never'"


def test_profiles_of_another_model_are_refused() -> None:
    decider = controller()
    decider.observe(profile([1.0] * 8, (0, 4, 8)))
    with pytest.raises(ValueError, match="has 7 layers, the one before 8"):
        decider.observe(profile([1.0] * 7, (0, 4, 7), batch=1))


def test_layers_without_any_time() -> None:
    assert train(lambda batch: [0.0] * 8, (0, 4, 8), num_batches=10).moved_at == []


def test_same_inputs_same_decisions() -> None:
    model, noise = half_gets_cheaper(8, 20), Noise(layer=0.05, rank=0.05)
    first, second = (train(model, (0, 4, 8), num_batches=40, noise=noise, seed=3) for _ in range(2))
    assert first.decisions
    assert first.decisions == second.decisions


# -- a recorded run -----------------------------------------------------------------------------


def test_recorded_freezing_is_answered_and_nothing_else() -> None:
    """Real layer times on a busy machine (see tests/data): noise before, half frozen after."""
    recording = json.loads(RECORDING.read_text(encoding="utf-8"))
    batches = [[forward + backward for forward, backward in batch] for batch in
               recording["forward_backward_s"]]  # fmt: skip
    frozen_at, start = recording["freeze_at"], tuple(recording["boundaries"])
    run = train(
        lambda batch: batches[batch], start, num_batches=len(batches), move_s=0.2,
        num_micro_batches=recording["num_micro_batches"],
    )  # fmt: skip
    assert len(run.moved_at) == 1
    assert frozen_at + LEAST_EVIDENCE - 1 <= run.moved_at[0] <= frozen_at + 6
    assert run.boundaries == (0, 5, 8)


def test_after_a_failure_it_pauses_longer_each_time_until_a_move_succeeds() -> None:
    decider = controller(rebalance_every=1, profile_batches=1)

    def next_due(after: int) -> int:
        for batch in range(after, after + 1000):
            decider.observe(profile(UNEQUAL, (0, 4, 8), batch=batch))
            if decider.due(batch):
                return batch
        raise AssertionError("never due again")

    decider.failed(next_due(0))
    pauses, last = [], 0
    for _ in range(3):
        now = next_due(last + 1)
        pauses.append(now - last)
        decider.failed(now)
        last = now
    assert pauses == [8, 16, 32]
    decider.moved(next_due(last + 1))
    failed = next_due(last + 200)
    decider.failed(failed)
    assert next_due(failed + 1) == failed + 8


@pytest.mark.parametrize("section", [{}, {"rebalance_every": 4}], ids=str)
def test_while_the_users_partition_holds_nothing_is_due(section: dict[str, Any]) -> None:
    decider = controller(**section)

    def due_among(batches: range) -> list[int]:
        due = []
        for batch in batches:
            decider.observe(profile(UNEQUAL, (0, 4, 8), batch=batch))
            due += [batch] if decider.due(batch) else []
        return due

    assert due_among(range(8))
    decider.hold(8, 10)  # batches 8 to 17 run on it
    assert due_among(range(8, 30))[0] == 17, "an interval that ended meanwhile is made up for"
    decider.hold(30, "forever")
    assert not due_among(range(30, 200))
    other = controller(**section)
    other.load_state_dict(decider.state_dict())
    assert other.is_held(10**6)
    other.load_state_dict(decider.state_dict(), same_stages=False)
    assert not other.is_held(200), "boundaries of other stages are nobody's choice"
    decider.release()
    assert due_among(range(200, 204))


# -- a run that is interrupted and goes on ------------------------------------------------------


def interrupted(stop: int | None, *, num_batches: int = 60, same_stages: bool = True, **section: Any) -> list[Any]:
    """Decisions and moves of a run whose every third move fails; after batch ``stop`` another controller takes over."""
    rng, decider, boundaries = random.Random(5), controller(**section), (0, 4, 9)
    told: list[Any] = []
    attempts = 0
    for batch in range(num_batches):
        model = half_gets_cheaper(9, 20)(batch if batch < 40 else 0)
        measured = profile(Noise(0.03, 0.03).apply(model, boundaries, rng), boundaries, batch=batch)
        if decider.wants_profile(batch):
            decider.observe(measured)
        if decider.newest[-1].batch == batch and decider.due(batch):
            smoothed = decider.smoothed()
            assert smoothed is not None
            plan = optimal(smoothed.costs("time"), 2, boundaries)
            if plan.boundaries == boundaries and batch % 5 == 0:
                plan = Plan((0, 5, 9), plan.bottleneck, plan.bottleneck)  # judged by whole batches
            decision = decider.judge(plan, smoothed)
            told.append((batch, plan.boundaries, decision))
            if decision.rebalance:
                attempts += 1
                if attempts % 3 == 1:
                    decider.failed(batch)
                else:
                    boundaries = plan.boundaries
                    decider.record_cost(0.02 * attempts)
                    decider.moved(batch)
        if batch == stop:
            known, decider = decider.state_dict(), controller(**section)
            decider.load_state_dict(known, same_stages=same_stages)
            assert not same_stages or decider.state_dict() == known
    return told


@pytest.mark.parametrize(
    "section",
    [
        {"profile_every": 4}, {"rebalance_every": 7, "min_gain": 0.0}, pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"stage_speeds": [1.0, 0.9], "profile_batches": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_one_that_goes_on_decides_as_the_uninterrupted_one(section: dict[str, Any]) -> None:
    expected = interrupted(None, **section)
    assert sum(decision.rebalance for _, _, decision in expected) >= 3
    for stop in range(60):
        assert interrupted(stop, **section) == expected, stop


def test_on_another_number_of_stages_layer_times_carry_over_and_pauses_do_not() -> None:
    decider, other = controller(), controller()
    for batch in range(10):
        decider.observe(profile(UNEQUAL, (0, 4, 8), batch=batch))
    decider.record_cost(3.0)
    decider.failed(9)
    other.load_state_dict(decider.state_dict(), same_stages=False)
    assert other.smoothed() is None, "what stages measured starts anew"
    for batch in range(10, 13):
        other.observe(profile(UNEQUAL, (0, 2, 4, 8), batch=batch))
    assert other.due(12), "no pause"
    known = other.state_dict()
    assert len(known["profiles"]) == 13 and known["costs_s"] == [] and known["num_failures"] == 0


def test_state_of_older_checkpoints_is_taken_in() -> None:
    profiles = [profile(UNEQUAL, (0, 4, 8), batch=batch) for batch in range(10)]
    history = [[0.0, *accumulate(p.costs("time"))] for p in profiles]
    decider, fresh = controller(), controller()
    decider.load_state_dict({"newest": profiles[-3:], "history": history, "costs_s": [0.2], "decided_batch": 4})
    for p in profiles:
        fresh.observe(p)
    fresh.record_cost(0.2)
    smoothed = decider.smoothed()
    assert smoothed is not None and smoothed == fresh.smoothed()
    assert decider.judge(BETTER, smoothed) == fresh.judge(BETTER, smoothed)
    decider.observe(profile(UNEQUAL, (0, 4, 8), batch=10))
    assert decider.due(10)
