"""Orders that a balancer chooses: after two trials, where they are faster by measure, within memory and time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide import Balancer
from dynpipe_ds.decide.halves import Halves
from dynpipe_ds.decide.orders import AS_GOOD, FIRST_S, SHARE_OF_TIME, Orders, least_saving
from dynpipe_ds.decide.speeds import Speeds
from dynpipe_ds.planning import assume_halves, pace, plan_order, worker_bytes_of_1f1b
from dynpipe_ds.schedule import Order, order_of, split_at_once
from dynpipe_ds.simulation import Workload, simulate
from tests.decide.pipelines import OnPaper
from tests.planning.test_together import random_profile

RATE = pace().computations_per_s

UNEQUAL = [1.0, 1.2, 0.9, 1.1, 1.4, 0.8, 1.0, 1.0]


def balancer(**section: object) -> Balancer:
    return Balancer.from_section({"enabled": True, "rebalance_every": "never", **section})


def test_auto_plans_an_order_after_one_trial() -> None:
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), balancer()
    run.train(deciding, 20)
    assert run.trials == [1], "the first batch is slow in parts, and says nothing; then orders measure halves"
    assert run.orders[0] is None
    best_s = plan_order(Workload.from_profile(run.true())).seconds
    assert run.seconds[2:] == [pytest.approx(best_s)] * 18 and best_s < 0.95 * run.seconds[0]


def test_orders_do_not_wait_for_what_a_decision_combines() -> None:
    """One is planned by the first batch that measures halves, and stays until all is decided together."""
    run = OnPaper([1.0] * 4 + [2.0] * 8, (0, 1, 2, 11, 12))
    deciding = balancer(profile_batches=9, rebalance_every="auto")
    run.train(deciding, 9)
    assert run.orders[1] != run.orders[2] and len(set(run.orders[2:9])) == 1 and run.orders[2] is not None
    assert run.boundaries != (0, 1, 2, 11, 12), "nine batches were profiled"


@pytest.mark.parametrize("schedule", ["1f1b", "auto", "planned"])
def test_splitting_that_costs_more_than_it_gains(schedule: str) -> None:
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), split_cost=2.0), balancer(schedule=schedule)
    run.train(deciding, 20)
    assert deciding.ordering.order is None, "the planner finds nothing faster than 1F1B"
    assert sum(order is not None for order in run.orders) == len(run.trials)
    assert run.trials == ([] if schedule == "1f1b" else [1, 2])


def test_an_order_that_only_looks_faster_is_given_up() -> None:
    """It is slower than predicted by more than it gains, which nobody can know before it has run."""
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), slowness=1.3), balancer()
    run.train(deciding, 40)
    planned = [batch for batch, order in enumerate(run.orders) if order is not None and batch not in run.trials]
    assert planned == [2, 3], "two batches showed it"
    faster, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), slowness=1.02), balancer()
    faster.train(deciding, 20)
    assert deciding.ordering.order is not None, "slower than predicted, and faster than 1F1B all the same"


def test_cut_and_order_are_chosen_together() -> None:
    """The best cut for a planned order is another than for 1F1B."""
    seconds = [1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    run, deciding = OnPaper(seconds, (0, 3, 6, 9, 12)), balancer(rebalance_every=3, min_gain=0.0)
    run.train(deciding, 20)
    only_cut = OnPaper(seconds, (0, 3, 6, 9, 12))
    only_cut.train(balancer(rebalance_every=3, min_gain=0.0, schedule="1f1b"), 20)
    on_that_cut = OnPaper(seconds, only_cut.boundaries)
    on_that_cut.train(balancer(), 10)
    assert run.seconds[-1] <= on_that_cut.seconds[-1] * (1 + 1e-9) < only_cut.seconds[-1]
    assert len(set(run.seconds[-5:])) == 1, "it has settled"


def test_auto_moves_for_what_an_order_gains() -> None:
    run, deciding = OnPaper([1.0] * 4 + [2.0] * 8, (0, 1, 2, 11, 12)), balancer(rebalance_every="auto")
    run.train(deciding, 40)
    assert run.boundaries != (0, 1, 2, 11, 12) and deciding.ordering.order is not None
    assert run.seconds[-1] < run.seconds[0] / 2


def test_a_large_change_is_worth_more_than_the_share_of_planning() -> None:
    """Batches are so short that an order is planned in every fiftieth; a cut that saves a third is not waited for."""
    run, deciding = OnPaper([0.0005] * 12, (0, 3, 6, 9, 12)), balancer(rebalance_every="auto")
    run.train(deciding, 30)
    assert run.boundaries == (0, 3, 6, 9, 12) and not deciding.ordering.is_due()
    run.forward_s = [0.00015] * 6 + [0.0005] * 6
    run.train(deciding, 3, first=30)
    assert run.boundaries == (0, 6, 8, 10, 12)


def test_more_memory_only_where_it_is_allowed() -> None:
    run = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), num_micro_batches=12)
    seconds, most = [], worker_bytes_of_1f1b(run.true(), run.boundaries)
    state = [sum(held) for held in run.true().placement.by_stage(run.true().state_bytes())]
    for section in ({"activation_budget": 0.5}, {}, {"activation_budget": 2.0}, {"memory_cap_bytes": 5000}):
        run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), num_micro_batches=12), balancer(schedule="planned", **section)
        run.train(deciding, 10)
        order = deciding.ordering.order
        assert order is not None
        stages = simulate(Workload.from_profile(run.true()), order).stages
        peaks = [held + stage.peak_activation_bytes for held, stage in zip(state, stages, strict=True)]
        cap = section.get("memory_cap_bytes", state[0] + section.get("activation_budget", 1.0) * (most - state[0]))
        assert max(peaks) <= cap
        seconds.append(run.seconds[-1])
    assert seconds[0] > seconds[1] > seconds[2] and seconds[3] > seconds[1]


def test_too_little_memory_is_no_reason_to_stop() -> None:
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), balancer(schedule="planned", memory_cap_bytes=1500)
    run.train(deciding, 10)
    assert deciding.ordering.order is None and run.trials == [1, 2]


def test_planning_keeps_within_its_share_of_the_time() -> None:
    """Batches of a millisecond leave no time to plan after each."""
    run, deciding = OnPaper([s / 30_000 for s in UNEQUAL], (0, 2, 4, 6, 8)), balancer()
    due = 0
    for batch in range(0, 300):
        run.train(deciding, 1, first=batch)
        due += deciding.ordering.is_due()
    assert sum(order is not None for order in run.orders) > 200, "what was planned once goes on"
    assert due < 100


def test_another_number_of_micro_batches_runs_1f1b_until_it_is_planned_for() -> None:
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), balancer()
    run.train(deciding, 8)
    assert deciding.ordering.order is not None
    other = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), num_micro_batches=6)
    deciding.ordering.next(is_profiled=True)
    deciding.observe(other.measured(8, None))  # the engine's order_for falls back
    order = deciding.ordering.choose(deciding.smoothed(), other.boundaries)
    assert order is not None and order.num_micro_batches == 6


def test_a_moved_partition_runs_1f1b_without_a_plan() -> None:
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), balancer()
    run.train(deciding, 8)
    deciding.ordering.next(is_profiled=False)
    deciding.ordering.adopt(None, (0, 1, 4, 6, 8))
    assert deciding.ordering.next(is_profiled=False) is None


@pytest.mark.parametrize("schedule", ["auto", "planned"])
def test_one_that_goes_on_chooses_as_the_uninterrupted_one(schedule: str) -> None:
    for stop in (3, 5, 7):
        whole, parts = (OnPaper(UNEQUAL, (0, 2, 4, 6, 8), split_cost=1.1) for _ in range(2))
        first, second = balancer(schedule=schedule), balancer(schedule=schedule)
        whole.train(balancer(schedule=schedule), 15)
        parts.train(first, stop)
        second.load_state_dict(first.state_dict())
        parts.train(second, 15 - stop, first=stop)
        assert parts.orders == whole.orders and parts.seconds == whole.seconds


# -- halves -------------------------------------------------------------------------------------


def test_halves_are_what_they_are() -> None:
    run = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), split_cost=1.25, weight_share=0.4, unsplit=[5])
    halves, true = Halves(), run.true()
    assert not halves.wants_trial()
    for batch in range(4):
        is_trial = halves.wants_trial()
        order = split_at_once(8, 4, 1, range(batch % 2, 8, 2)) if is_trial else None
        whole = halves.observe(run.measured(batch, order), order, is_trial=is_trial)
        for found, expected in zip(whole.layers, true.layers, strict=True):
            if expected.weight_s:
                assert found.backward_s == pytest.approx(expected.backward_s) and found.weight_s == 0
    filled = halves.fill(whole)
    for i, found in enumerate(filled.layers):
        if i != 5:
            share = found.weight_s / (found.backward_s + found.split_s)
            assert share == pytest.approx(0.4), "those of the first stage are taken to be as the others"
        else:
            assert found.weight_s == 0 == found.split_s
    assert halves.cost == pytest.approx(1.25)


def test_halves_of_a_part_of_the_micro_batches() -> None:
    run = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), split_cost=1.25, weight_share=0.4)
    halves = Halves()
    for batch, order in enumerate([None, None, split_at_once(8, 4, 1, range(3)), None]):
        halves.observe(run.measured(batch, order), order, is_trial=order is not None)
    streams = [[one for one in stream if str(one) not in ("W6", "W7")] for stream in split_at_once(8, 4, 1).stages]
    some = Order(8, tuple(map(tuple, streams)))
    whole = halves.observe(run.measured(4, some), some, is_trial=False)
    for found, expected in zip(whole.layers, run.true().layers, strict=True):
        assert found.backward_s == pytest.approx(expected.backward_s)
    for found, expected in zip(halves.fill(whole).layers, run.true().layers, strict=True):
        assert found.weight_s == pytest.approx(expected.weight_s)


def test_layers_that_do_not_wait_say_nothing_of_their_halves() -> None:
    run, halves = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), Halves()
    for batch, order in enumerate([None, None, split_at_once(8, 4, 1, range(3)), split_at_once(8, 4, 1, range(4))]):
        halves.observe(run.measured(batch, order), order, is_trial=order is not None)
    before = halves.fill(run.true())
    order = replace(split_at_once(8, 4, 1), late=(2, 2, 1, 1))
    measured = run.measured(4, order)
    prompt = [replace(layer, weight_s=0.0) if i in (5, 7) else layer for i, layer in enumerate(measured.layers)]
    for batch in range(4, 10):
        halves.observe(replace(measured, batch=batch, layers=tuple(prompt)), order, is_trial=False)
    assert halves.fill(run.true()) == before


def test_a_stage_that_sends_no_gradient_says_nothing_of_halves() -> None:
    """Its first layers were frozen under an order by which it sent one: all of its backward is in the second half."""
    run, halves = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), Halves()
    order = split_at_once(8, 4, 1)
    for batch, ran in enumerate([None, None, order]):
        halves.observe(run.measured(batch, ran), ran, is_trial=ran is not None)
    before = halves.fill(run.true())
    halves.expect_change()
    frozen = [replace(layer, backward_s=0.0, weight_s=0.0) for layer in run.measured(3, order).layers[:2]]
    odd = [replace(layer, weight_s=share * layer.backward_s) for layer, share in zip(
        run.measured(3, order).layers[2:4], (0.0, 1.0), strict=True,
    )]  # fmt: skip
    measured = run.measured(3, order)
    halves.observe(replace(measured, layers=(*frozen, *odd, *measured.layers[4:])), order, is_trial=False)
    assert halves.fill(run.true()) == before


def test_halves_are_measured_anew_when_layers_change() -> None:
    run = OnPaper(UNEQUAL, (0, 2, 4, 6, 8), split_cost=2.0)
    deciding = balancer()
    run.train(deciding, 20)
    run.forward_s = [seconds * 1.5 for seconds in UNEQUAL]
    run.train(deciding, 20, first=20)
    assert run.trials == [1, 2], "a machine that is slower as a whole"
    run.forward_s = [seconds * (3 if i < 4 else 1) for i, seconds in enumerate(UNEQUAL)]
    run.train(deciding, 20, first=40)
    assert len(run.trials) == 3 and run.trials[2] in (40, 41)
    deciding.expect_change()
    run.train(deciding, 20, first=60)
    assert len(run.trials) == 4


def test_an_order_that_splits_measures_changed_halves_itself() -> None:
    """A trial would run 1F1B for a batch, after every change."""
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), balancer()
    run.train(deciding, 10)
    assert deciding.ordering.order is not None and run.trials == [1]
    run.forward_s, run.weight_share = [seconds * (3 if i < 4 else 1) for i, seconds in enumerate(UNEQUAL)], 0.3
    deciding.expect_change()
    run.train(deciding, 6, first=10)
    assert run.trials == [1] and run.orders[10] is not None
    smoothed = deciding.smoothed()
    assert smoothed is not None
    assert [layer.weight_s / layer.backward_s for layer in smoothed.layers[2:]] == pytest.approx([0.3] * 6)


def test_trials_are_rare_where_layers_stay_as_they_are() -> None:
    """A trial runs 1F1B for a batch. The second one is for sure, further ones are for layers that have changed."""
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), balancer()
    run.train(deciding, 140)
    assert deciding.ordering.order is not None and run.trials == [1, 65]
    kept, again = replace(run, orders=[], trials=[], seconds=[]), balancer()
    again.load_state_dict(deciding.state_dict())
    kept.train(again, 5, first=140)
    assert not kept.trials
    run.forward_s = [seconds * (3 if i < 4 else 1) for i, seconds in enumerate(UNEQUAL)]
    run.train(deciding, 5, first=140)
    assert run.trials == [1, 65, 141]


def test_layers_that_stopped_training_call_for_no_trial() -> None:
    run, halves = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), Halves()
    for batch in range(3):
        order = split_at_once(8, 4, 1, range(batch % 2, 8, 2)) if batch else None
        halves.observe(run.measured(batch, order), order, is_trial=batch > 0)
    order = split_at_once(8, 4, 1)
    measured = run.measured(0, order)
    for first_trained, is_trial in ((4, False), (0, False), (-1, True)):
        layers = [
            replace(layer, backward_s=0.0, weight_s=0.0) if i < first_trained else
            replace(layer, backward_s=5 * layer.backward_s) if i == 7 and first_trained < 0 else layer
            for i, layer in enumerate(measured.layers)
        ]  # fmt: skip
        halves.observe(replace(measured, batch=100, layers=tuple(layers)), order, is_trial=False)
        assert halves.wants_trial(splits=True) is is_trial
    halves.observe(measured, order, is_trial=False)
    assert not halves.wants_trial(splits=True), "batch 0, where a script counts anew, says nothing"


def test_an_order_that_only_chance_makes_better_is_not_taken() -> None:
    """Four batches that vary: 1% less on average is more than chance only if they agree."""
    present_s = [1.0, 2.0, 3.0, 4.0]
    assert least_saving(present_s, [0.99 * seconds for seconds in present_s]) == AS_GOOD
    scattered = [share * seconds for share, seconds in zip((0.95, 1.03, 0.93, 1.05), present_s, strict=True)]
    assert least_saving(present_s, scattered) > 0.05
    assert least_saving((), ()) == least_saving(present_s, ()) == AS_GOOD


def test_the_present_order_goes_on_where_none_is_better() -> None:
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), balancer()
    run.train(deciding, 10)
    order = deciding.ordering.order
    assert order is not None
    deciding.expect_change()  # nothing has changed in truth, but all is planned anew
    run.train(deciding, 4, first=10)
    assert deciding.ordering.order is order


def test_a_trial_is_1f1b_with_each_second_half_at_once() -> None:
    order = split_at_once(4, 3, 1)
    assert order.stages[0] == order_of("1f1b", 4, 3).stages[0] and order.split(0) == frozenset()
    text = str(order).split(" | ")[2].split()
    assert all(text[text.index(f"SG{m}") + 1] == f"W{m}" for m in range(4)) and order.split(2) == {0, 1, 2, 3}
    whole = [one for one in text if not one.startswith("W")]
    assert whole == str(order_of("1f1b", 4, 3)).split(" | ")[2].split()


# -- what planning takes ----------------------------------------------------------------------


def test_nothing_is_planned_anew_while_nothing_changes() -> None:
    run, deciding = OnPaper(UNEQUAL, (0, 2, 4, 6, 8)), balancer()
    looked_at = []
    for first in range(6):
        run.train(deciding, 1, first=first)
        looked_at.append(deciding.ordering.num_looked_at)
    assert max(looked_at) > 0
    for first in range(6, 20):
        run.train(deciding, 1, first=first)
        assert deciding.ordering.num_looked_at == 0 or first in run.trials, "layers are as they were"
    run.forward_s = [2 * UNEQUAL[0], *UNEQUAL[1:]]
    looked_at = []
    for first in range(20, 24):
        run.train(deciding, 1, first=first)
        looked_at.append(deciding.ordering.num_looked_at)
    assert max(looked_at) > 0


def test_what_gains_nothing_is_planned_again_after_twice_the_time() -> None:
    """Layers that only vary are something new in each batch, and there is always time for a short search."""
    rng = np.random.default_rng(1)
    run, deciding = OnPaper([s / 10 for s in UNEQUAL], (0, 2, 4, 6, 8)), balancer()
    planned = []
    for batch in range(100):
        run.forward_s = [s / 10 * factor for s, factor in zip(UNEQUAL, rng.normal(1, 0.004, 8), strict=True)]
        run.train(deciding, 1, first=batch)
        if deciding.ordering.num_looked_at:
            planned.append(batch)
    early, late = sum(batch < 30 for batch in planned), sum(batch >= 70 for batch in planned)
    assert 1 < early and late < early / 2, planned
    run.forward_s = [2 * UNEQUAL[0] / 10, *(s / 10 for s in UNEQUAL[1:])]
    looked_at = 0
    for batch in (100, 101):  # two of the three that are combined
        run.train(deciding, 1, first=batch)
        looked_at += deciding.ordering.num_looked_at
    assert looked_at > 0, "a change is answered at once"


def test_what_gains_nothing_is_planned_again_now_and_then_for_ever() -> None:
    """What the next search must be able to look at grows, and no search looks at more than there is."""
    rng = np.random.default_rng(2)
    run, deciding, planned = OnPaper([s / 10 for s in UNEQUAL], (0, 2, 4, 6, 8)), balancer(), []
    for batch in range(400):
        run.forward_s = [s / 10 * factor for s, factor in zip(UNEQUAL, rng.normal(1, 0.015, 8), strict=True)]
        run.train(deciding, 1, first=batch)
        if deciding.ordering.num_looked_at:
            planned.append(batch)
    assert any(batch >= 300 for batch in planned), planned


def test_planning_keeps_within_its_share() -> None:
    """Layers change in every batch, and a batch takes a tenth of a second: there is not always time for a plan."""
    run, deciding = OnPaper([s / 240 for s in UNEQUAL], (0, 2, 4, 6, 8)), balancer(rebalance_every="auto")
    looked_at = 0
    for batch in range(200):
        run.forward_s = [s / 240 * (1 + 0.3 * ((7 * batch + 3 * i) % 5)) for i, s in enumerate(UNEQUAL)]
        run.train(deciding, 1, first=batch)
        looked_at += deciding.ordering.num_looked_at
    assert 0 < looked_at / RATE < 1.5 * SHARE_OF_TIME * sum(run.seconds) + FIRST_S


def test_what_deciding_took_before_a_move_says_nothing_of_planning() -> None:
    """It counts with the move, so what is left of it is too little for what was looked at."""
    run = OnPaper(UNEQUAL, (0, 2, 4, 6, 8))
    orders, earned = Orders(DynamicPipelineConfig(enabled=True), Speeds(None)), []
    for batch, second_cut in enumerate([2, 2, 3, 2, 3]):
        moved = run.boundaries[1] != second_cut
        run.boundaries = (0, second_cut, 4, 6, 8)
        orders.effort, orders.spent = 0.0, 10**6
        orders.observe(run.measured(batch, None), None, is_trial=False, cost_s=1e-9 if moved else 20 * 10**6 / RATE)
        earned.append(orders.effort / run.measured(batch, None).stages[0].batch_s)
    assert earned[1:] == pytest.approx([RATE * SHARE_OF_TIME / 20] * 4)


def test_another_cut_is_taken_at_a_glance_when_planning_is_spent() -> None:
    run, deciding = OnPaper([s / 100 for s in UNEQUAL], (0, 2, 4, 6, 8)), balancer(rebalance_every="auto")
    run.train(deciding, 8)
    deciding.ordering._orders.effort = -1e9
    run.forward_s = [UNEQUAL[0] / 1000, UNEQUAL[1] / 1000, UNEQUAL[2] / 1000, *(s / 100 for s in UNEQUAL[3:])]
    run.train(deciding, 3, first=8)
    assert run.boundaries != (0, 2, 4, 6, 8)
    assert deciding.ordering.order is None, "an order for it is planned when that is paid for"
    deciding.ordering._orders.effort = 1e4
    run.train(deciding, 1, first=11)
    assert deciding.ordering.order is not None


def until_a_plan_waits(seed: int) -> tuple[OnPaper, Balancer, np.random.Generator, int]:
    """Noise of a tenth, and layers that become a little dearer at the end: a gain that one batch can't prove."""
    random = np.random.default_rng(seed)
    run, deciding = OnPaper([1.0] * 12, (0, 3, 6, 9, 12)), balancer(rebalance_every="auto")
    for batch in range(200):
        run.forward_s = noisy(random, batch)
        run.train(deciding, 1, first=batch)
        if deciding.ordering.waiting is not None:
            return run, deciding, random, batch + 1
    raise AssertionError("no plan had to wait")


def noisy(random: np.random.Generator, batch: int) -> list[float]:
    true = np.where(np.arange(12) >= 9, 1.0 + 0.4 * (batch >= 30), 1.0)
    return list(true * (1.0 + 0.1 * random.standard_normal(12).clip(-2, 2)))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_plan_that_is_not_sure_is_judged_again_without_another_search(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, deciding, random, batch = until_a_plan_waits(seed)
    found, searched = deciding.ordering.waiting, deciding.ordering.num_looked_at
    monkeypatch.setattr(deciding.ordering, "together", lambda *_: pytest.fail("partitions were searched again"))
    run.forward_s = noisy(random, batch)
    run.train(deciding, 1, first=batch)
    assert deciding.ordering.num_looked_at < searched, "at most an order for the present partition"
    assert run.boundaries == found or deciding.ordering.waiting in (found, None)


def test_a_plan_waits_for_a_few_batches_only() -> None:
    run, deciding, random, batch = until_a_plan_waits(2)
    before = run.boundaries
    for later in range(batch, batch + 5):
        run.forward_s = noisy(random, 0)  # what it was found for is gone
        run.train(deciding, 1, first=later)
    assert run.boundaries != before or deciding.ordering.waiting is None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_plan_that_waits_outlives_a_checkpoint(seed: int) -> None:
    run, deciding, random, batch = until_a_plan_waits(seed)
    other = balancer(rebalance_every="auto")
    other.load_state_dict(deciding.state_dict())
    twin = replace(run, orders=[], trials=[], seconds=[])
    for later in range(batch, batch + 12):
        run.forward_s = twin.forward_s = noisy(random, later)
        run.train(deciding, 1, first=later)
        twin.train(other, 1, first=later)
        assert (run.boundaries, deciding.ordering.waiting) == (twin.boundaries, other.ordering.waiting)
        assert str(deciding.ordering.order) == str(other.ordering.order)


def test_a_plan_that_waits_may_hold_what_it_could_when_it_was_found() -> None:
    """That is what the fullest worker of any candidate holds under 1F1B, which may be more than on its partition."""
    num_wider, config = 0, DynamicPipelineConfig(enabled=True)
    for seed in range(20):
        profile, present = assume_halves(random_profile(seed, 24, 16), 0.5), (0, 6, 12, 18, 24)
        orders = Orders(config, Speeds(None))
        orders.observe(replace(profile, boundaries=present), None, is_trial=False)
        orders.effort = 1e5
        found = orders.together(replace(profile, boundaries=present), [present, (0, 12, 16, 20, 24)], ())
        restored = Orders(config, Speeds(None))
        restored.load_state_dict(orders.state_dict())
        waits = replace(found, planned=orders.written(found))
        num_wider += orders._caps(profile, found.boundaries) < orders._caps(profile, present, (0, 12, 16, 20, 24))
        for judge in (orders, restored):
            both = judge.again(replace(profile, boundaries=present), waits)
            assert both is not None and both[1].seconds == pytest.approx(found.seconds, rel=1e-12)
    assert num_wider


# -- back to where it was ------------------------------------------------------------------------


@pytest.mark.parametrize("then", [0.8, 0.95])
@pytest.mark.parametrize("is_restored", [False, True], ids=["", "after a checkpoint"])
def test_a_move_is_undone_with_the_order_that_ran_before(then: float, is_restored: bool) -> None:
    """Half of the layers were faster for once; in 1F1B the first batch after going back would take 6% longer."""
    run, deciding = OnPaper([1.0] * 8, (0, 4, 8)), balancer(rebalance_every="auto", min_gain=0.1)
    for batch in range(20):
        run.forward_s = [1.0 if batch < 12 else 0.5 if batch == 12 else then] * 4 + [1.0] * 4
        if is_restored and batch == 15:
            state, deciding = deciding.state_dict(), balancer(rebalance_every="auto", min_gain=0.1)
            deciding.load_state_dict(state)
        run.train(deciding, 1, first=batch)
        assert run.boundaries == ((0, 5, 8) if 12 <= batch < 16 else (0, 4, 8))
    assert str(run.orders[17]) == str(run.orders[12]) and None not in run.orders[1:]


def test_what_would_have_been_saved_is_told_where_it_is_sure() -> None:
    run, deciding = OnPaper([1.0] * 8, (0, 4, 8)), balancer(rebalance_every="auto", min_gain=0.1)
    for batch in range(16):
        run.forward_s = [1.0 if batch < 12 else 0.5 if batch == 12 else 0.8] * 4 + [1.0] * 4
        run.train(deciding, 1, first=batch)
    profile = deciding.smoothed()
    assert profile is not None and deciding.ordering.gains_back(profile, 3)
    assert not deciding.ordering.gains_back(profile, 4), "the first of these batches was another: it may be chance"
    assert not deciding.ordering.gains_back(replace(profile, num_micro_batches=4), 3), "no order for such batches"
