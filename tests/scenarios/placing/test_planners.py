"""Planners: never predicted worse than what they promise, near the optimum, the same every time."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from scenarios.moe.placing import PLANNERS, Lanes, LayerModel, Link, check_planner, plan, reroute
from scenarios.moe.placing.rivals import shadowed, subsets
from scenarios.moe.placing.search import capped, thinned
from scenarios.moe.placing.state import Candidates, State
from scenarios.moe.placing.traffic import as_lanes, held
from tests.scenarios.placing.cases import Table, any_owner, constants, skewed

SIZES = [(2, 2), (2, 8), (3, 6), (4, 8), (8, 8), (4, 32)]
MODELS = {
    "overlapped": LayerModel(constants()),
    "blocking": LayerModel(constants(), overlapped=False),
    "sums": LayerModel(constants(agg="sums")),
    "lanes": LayerModel(constants(agg="lanes", lane_s=1e-5)),
    "slow links": LayerModel(constants(byte_s=1e-8)),
    "links of their own": LayerModel(constants(
        trans=Link(byte_s=2e-10, start_s=1e-4), agg_link=Link(byte_s=1e-9, message_s=2e-5, start_s=3e-4), sum_s=2e-4,
        fixed_s=1e-3,
    )),
    "small experts": LayerModel(constants(expert_bytes=2.0**16)),
}


def batches(num_ranks: int, num_experts: int) -> list[Table]:
    uneven = np.zeros((num_ranks, num_experts))
    uneven[0, 0] = 500  # one source has all tokens, all for one expert
    one_silent = skewed(num_ranks, num_experts, 9)
    one_silent[-1] = 0
    return [*(skewed(num_ranks, num_experts, seed) for seed in range(3)), uneven, one_silent,
            np.zeros((num_ranks, num_experts)), np.full((num_ranks, num_experts), 7)]  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("num_ranks", "num_experts"), SIZES)
def test_never_predicted_worse_than_static_nor_lanes_than_all_local(
    num_ranks: int, num_experts: int, kind: str
) -> None:
    model = MODELS[kind]
    for loads in batches(num_ranks, num_experts):
        static = model.seconds(Lanes.static(num_ranks, num_experts), loads)
        local = model.seconds(Lanes.local(num_ranks, num_experts), loads)
        for name in ("static", "fastermoe", "pro_prophet", "lanes"):
            assert model.seconds(plan(name, loads, model), loads) <= static
        assert model.seconds(plan("lanes", loads, model), loads) <= local * (1 + 1e-12)
        assert plan("local", loads, model) == Lanes.local(num_ranks, num_experts)


@pytest.mark.parametrize("kind", MODELS)
def test_lanes_is_at_least_as_fast_as_the_rivals(kind: str) -> None:
    model = MODELS[kind]
    for (num_ranks, num_experts), seed in product(((4, 4), (4, 8), (8, 8), (4, 32)), range(5)):
        loads = skewed(num_ranks, num_experts, seed)
        ours = model.seconds(plan("lanes", loads, model), loads)
        for rival in ("fastermoe", "pro_prophet"):
            assert ours <= model.seconds(plan(rival, loads, model), loads) * (1 + 1e-9)


def best_of_all(model: LayerModel, loads: Table) -> float:
    """Seconds of the fastest of all R ** (R E) placements."""
    num_ranks, num_experts = loads.shape
    return min(
        model.seconds(Lanes(tuple(zip(*columns, strict=True))), loads)
        for columns in product(product(range(num_ranks), repeat=num_ranks), repeat=num_experts)
    )


@pytest.mark.parametrize("kind", MODELS)
def test_within_a_twentieth_of_the_optimum_of_four_experts_on_two_ranks(kind: str) -> None:
    model, shares = MODELS[kind], []
    for seed in range(12):
        loads = skewed(2, 4, seed, rows=int(64 * 4 ** (seed % 4)))
        shares.append(model.seconds(plan("lanes", loads, model), loads) / best_of_all(model, loads))
    assert max(shares) < 1.05 and sum(shares) / len(shares) < 1.01, shares


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
def test_within_a_tenth_of_the_optimum_of_three_experts_on_three_ranks(kind: str) -> None:
    model, shares = MODELS[kind], []
    for seed in range(3):
        loads = skewed(3, 3, seed, rows=1024)
        shares.append(model.seconds(plan("lanes", loads, model), loads) / best_of_all(model, loads))
    assert max(shares) < 1.1 and sum(shares) / len(shares) < 1.04, shares


@pytest.mark.parametrize("name", PLANNERS)
def test_the_same_loads_give_the_same_placement(name: str) -> None:
    loads = skewed(4, 8, 3)
    for model in MODELS.values():
        first = plan(name, loads, model)
        assert first == plan(name, loads.copy(), model) == plan(name, loads.tolist(), model)


@pytest.mark.parametrize("name", ["fastermoe", "pro_prophet", "lanes"])
def test_ties_have_one_answer(name: str) -> None:
    """All experts and sources alike, and two alike experts: nothing but their order tells them apart."""
    even = np.full((4, 8), 100)
    assert plan(name, even, MODELS["slow links"]) == plan(name, even, MODELS["slow links"])
    twins = even.copy()
    twins[:, [1, 6]] = 5000
    first = plan(name, twins, MODELS["small experts"])
    assert first == plan(name, twins, MODELS["small experts"])
    # FasterMoE looks at the fullest expert alone: shadowing one of two alike does not help by its formula.
    assert (first == Lanes.static(4, 8)) == (name == "fastermoe")


def test_nothing_is_moved_without_a_reason() -> None:
    assert plan("lanes", np.full((4, 4), 100), MODELS["blocking"]) == Lanes.static(4, 4)
    assert plan("lanes", np.zeros((4, 4)), MODELS["overlapped"]) == Lanes.static(4, 4)


def test_all_local_is_found_where_moving_tokens_costs_more_than_it_saves() -> None:
    model = LayerModel(constants(byte_s=1e-6, expert_bytes=1.0, message_s=0.0))
    assert plan("lanes", skewed(4, 8, 0), model) == Lanes.local(4, 8)
    assert plan("lanes", skewed(2, 8, 1), model) == Lanes.local(2, 8)


@pytest.mark.parametrize("max_copies", [0, 1, 2, 5])
@pytest.mark.parametrize("name", ["static", "fastermoe", "pro_prophet", "lanes"])
def test_never_more_copies_than_allowed(name: str, max_copies: int) -> None:
    for seed, kind in product(range(3), MODELS):
        loads = skewed(4, 16, seed)
        lanes = plan(name, loads, MODELS[kind], max_copies=max_copies, present=Lanes.local(4, 16))
        assert max(len(lanes.copies(rank)) for rank in range(4)) <= max_copies


def test_more_copies_allowed_are_never_slower() -> None:
    model = MODELS["small experts"]
    loads = skewed(4, 16, 1)
    seconds = [model.seconds(plan("lanes", loads, model, max_copies=n), loads) for n in (0, 1, 2, 4, 8, 12)]
    assert seconds[0] > seconds[-1]
    assert all(later <= earlier * 1.02 for earlier, later in zip(seconds, seconds[1:], strict=False)), seconds


def test_no_copy_is_without_a_use() -> None:
    for kind, seed in product(MODELS, range(4)):
        model, loads = MODELS[kind], skewed(4, 8, seed)
        lanes = plan("lanes", loads, model)
        for rank, expert in product(range(4), range(8)):
            if expert in lanes.copies(rank):
                owner = [[lanes.home(expert) if (e, r) == (expert, rank) else r for e, r in enumerate(row)]
                         for row in lanes.owner]  # fmt: skip
                assert model.seconds(Lanes(tuple(map(tuple, owner))), loads) > model.seconds(lanes, loads)


def test_a_good_present_placement_is_not_lost() -> None:
    for seed in range(5):
        model, loads = MODELS["overlapped"], skewed(8, 8, seed)
        present = plan("lanes", skewed(8, 8, seed), MODELS["sums"])
        assert model.seconds(plan("lanes", loads, model, present=present), loads) <= model.seconds(present, loads)


def test_what_helps_the_last_batch_alone_is_not_taken() -> None:
    """Another expert was the fullest in the batch before: copies of today's would have helped nothing there."""
    model, last = MODELS["overlapped"], np.full((4, 4), 100)
    last[:, 0] += 2000
    earlier = np.full((4, 4), 100)
    earlier[:, 3] += 2000
    assert plan("lanes", last, model) != Lanes.static(4, 4)
    assert plan("lanes", last, model, earlier=last) == plan("lanes", last, model)
    assert plan("lanes", last, model, earlier=earlier) == Lanes.static(4, 4)


def test_an_earlier_batch_never_makes_it_worse_than_static_for_the_last() -> None:
    for kind, seed in product(MODELS, range(4)):
        model, last, earlier = MODELS[kind], skewed(4, 8, seed), skewed(4, 8, seed + 50)
        lanes = plan("lanes", last, model, earlier=earlier, max_copies=2)
        assert model.seconds(lanes, last) <= model.seconds(Lanes.static(4, 8), last)
        assert max(len(lanes.copies(rank)) for rank in range(4)) <= 2


def test_judged_by_an_earlier_batch_the_next_is_faster_where_batches_differ_much() -> None:
    model, draw = MODELS["blocking"], np.random.default_rng(3)
    blind_s, judged_s = 0.0, 0.0
    for _ in range(30):
        usual = skewed(4, 4, int(draw.integers(1000)))
        earlier, last, following = (draw.poisson(usual * draw.lognormal(0, 0.5, 4)) for _ in range(3))
        blind_s += model.seconds(plan("lanes", last, model), following)
        judged_s += model.seconds(plan("lanes", last, model, earlier=earlier), following)
    assert judged_s < blind_s


def test_one_rank_has_no_choice() -> None:
    for name in PLANNERS:
        assert plan(name, np.array([[3, 4, 5]]), MODELS["overlapped"]) == Lanes.static(1, 3)
    assert reroute(Lanes.static(1, 3), np.array([[3, 4, 5]]), MODELS["overlapped"]) == Lanes.static(1, 3)


def test_routes_stay_within_the_copies_and_are_never_slower() -> None:
    faster = 0
    for kind, seed in product(MODELS, range(4)):
        model, draw = MODELS[kind], np.random.default_rng(seed)
        lanes = plan("lanes", skewed(8, 8, seed), model)
        loads = draw.poisson(skewed(8, 8, seed) * draw.lognormal(0, 0.4, 8))
        routes = reroute(lanes, loads, model)
        for expert in range(8):
            assert set(routes.holders(expert)) <= set(lanes.holders(expert))
        before, after = (without_trans(model, each, loads) for each in (lanes, routes))
        assert after <= before * (1 + 1e-12)
        faster += after < 0.99 * before
        assert routes == reroute(lanes, loads, model)
    assert faster >= 5


def without_trans(model: LayerModel, lanes: Lanes, loads: Table) -> float:
    """Seconds of a batch whose weights are in place: Trans went before, for the copies that there were."""
    told = model.predict(lanes, loads)
    return told.all_to_all_s + told.compute_s + told.agg_s - (told.hidden_agg_s if model.overlapped else 0)


def test_routes_of_small_placements_are_the_best_there_are() -> None:
    model = LayerModel(constants(expert_bytes=2.0**20))
    for seed in range(2):
        lanes = plan("lanes", skewed(3, 3, seed), model)
        loads = np.random.default_rng(seed).poisson(skewed(3, 3, seed) * np.array([0.4, 1.0, 2.5]))
        columns = product(*(product(lanes.holders(expert), repeat=3) for expert in range(3)))
        best = min(without_trans(model, Lanes(tuple(zip(*each, strict=True))), loads) for each in columns)
        assert without_trans(model, reroute(lanes, loads, model), loads) <= 1.1 * best


def test_without_copies_there_is_nothing_to_route() -> None:
    lanes = Lanes.static(4, 8)
    assert reroute(lanes, skewed(4, 8, 0), MODELS["overlapped"]) is lanes


def test_fastermoe_shadows_by_its_formula() -> None:
    """3 forwards and 4 exchanges of the fullest expert left, and a transfer for each shadowed: worked out by hand."""
    model = LayerModel(constants(forward_row_s=1.0, row_bytes=1.0, byte_s=0.25, expert_bytes=320.0))
    loads = np.array([[50, 20, 5, 5], [50, 20, 5, 5], [50, 20, 5, 5], [50, 20, 5, 5]])
    # A row takes 3 + 4 / 4 = 4 s, a shadow 80 s. Rows 200, 80, 20, 20: 800; 320 + 80; 80 + 160; 80 + 240 is no better.
    assert as_lanes(shadowed(loads.astype(float), model)) == Lanes.parse("4x4 0@1:1 0@2:2 0@3:3 1@0:0 1@2:2 1@3:3")


def test_pro_prophet_sends_the_fullest_expert_to_those_with_most_of_its_inputs() -> None:
    model = LayerModel(constants(expert_bytes=1.0), overlapped=False)
    loads = np.array([[60.0, 0, 0, 0], [90, 30, 10, 10], [80, 30, 20, 10], [10, 30, 10, 10]])
    # n = 2: of expert 0 ranks 1 and 2 have most. Then H is 70, 120, 120, 30, unbalanced: expert 1 to ranks 1 and 2,
    # which moves rank 2's 30 rows there. Expert 2 has 40 rows then, of which 30 go to ranks 1 and 2 (its home).
    first = as_lanes(subsets(loads, model, left_out=2, alpha=1.0))
    assert {1, 2} <= {rank for rank in range(4) if first.owner[rank][0] == rank}
    assert first.owner[3][0] == 0 and 3 not in first.holders(0)
    # Equation 7: 400 rows, 4 experts; max H - min H = 240 - 30 at the start is below alpha I / E for alpha = 3.
    assert as_lanes(subsets(loads, model, left_out=2, alpha=3.0)) == Lanes.static(4, 4)


def test_pro_prophet_keeps_the_fastest_on_its_way() -> None:
    dear = LayerModel(constants(expert_bytes=1e12), overlapped=False)
    assert as_lanes(subsets(skewed(4, 8, 0).astype(float), dear, left_out=0)) == Lanes.static(4, 8)


def test_thinned_is_all_local_of_the_fullest_experts() -> None:
    loads = np.array([[90.0, 5, 80, 1]] * 4)
    cheap = LayerModel(constants(expert_bytes=1.0, message_s=0.0))
    assert as_lanes(thinned(cheap, loads, None)) == Lanes.local(4, 4)
    assert as_lanes(thinned(cheap, loads, 1)).num_copies == 4
    kept = held(capped(np.array(Lanes.local(4, 4).owner), loads, 1))
    assert kept.tolist() == [[False, False, True, False], *[[True, False, False, False]] * 3]


def test_a_step_of_the_search_is_predicted_as_a_whole_placement_is() -> None:
    for kind, seed in product(MODELS, range(10)):
        model, loads = MODELS[kind], skewed(4, 8, seed, rows=20).astype(float)
        owner, draw = any_owner(4, 8, seed), np.random.default_rng(seed)
        state = State(model, loads, owner)
        assert state.seconds == pytest.approx(model.whole(model.parts(owner, loads)), rel=1e-12)
        tried = Candidates(draw.integers(0, 8, 6), draw.integers(0, 4, (6, 4)))
        seconds, _, sums = state.evaluate(tried)
        for which in range(6):
            there = owner.copy()
            there[:, tried.experts[which]] = tried.columns[which]
            assert seconds[which] == pytest.approx(model.whole(model.parts(there, loads)), rel=1e-12)
        state.take(tried, sums, 3)
        assert state.seconds == pytest.approx(seconds[3], rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "best"}, "placement='best' is no planner: must be one of static, local, .*; choose one of them"),
        ({"max_copies": -1}, "max_copies=-1 must be 0 or more, or null for any number; 0 is static"),
        ({"num_experts": 7}, "7 experts on 4 ranks: .* choose a number of experts that the ranks divide"),
        ({"name": "local", "max_copies": 5}, "copies 6 of 8 experts to each of 4 ranks, more than max_copies=5: raise"),
    ],
)
def test_what_is_refused_at_start(arguments: dict[str, object], message: str) -> None:
    settings = {"name": "lanes", "num_ranks": 4, "num_experts": 8, "max_copies": None, **arguments}
    with pytest.raises(ValueError, match=message):
        check_planner(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        loads = np.ones((4, settings["num_experts"]))
        plan(settings["name"], loads, MODELS["overlapped"], max_copies=settings["max_copies"])  # type: ignore[arg-type]


def test_placements_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="placement 4x8 is for 4 ranks and 8 experts; here are 2 ranks and 8 experts"):
        plan("lanes", np.ones((4, 8)), MODELS["overlapped"], earlier=np.ones((2, 8)))
    for call in (lambda: plan("lanes", np.ones((4, 8)), MODELS["overlapped"], present=Lanes.static(2, 8)),
                 lambda: reroute(Lanes.static(2, 8), np.ones((4, 8)), MODELS["overlapped"])):  # fmt: skip
        with pytest.raises(ValueError, match="placement 2x8 is for 2 ranks and 8 experts; here are 4 ranks"):
            call()
