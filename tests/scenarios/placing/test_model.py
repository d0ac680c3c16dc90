"""The performance model against sums by hand, and what must hold of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from scenarios.moe.placing import Constants, Lanes, LayerModel, Link
from scenarios.moe.placing.columns import AGG_IN, AGG_OUT, COMPUTE, INBOUND, OUTBOUND, TRANS_IN, TRANS_OUT, Columns
from scenarios.moe.placing.traffic import as_lanes, count_agg, count_rows, count_trans, held
from tests.scenarios.placing.cases import any_owner, constants, skewed

# Rank 0 has 5 rows for expert 0 and 1 for expert 1; rank 1 has 2 and 4.
LOADS = np.array([[5, 1], [2, 4]])
PLAIN = Constants(forward_row_s=1.0, row_bytes=10.0, byte_s=0.5, expert_bytes=100.0)


def test_static_by_hand() -> None:
    told = LayerModel(PLAIN).predict(Lanes.static(2, 2), LOADS)
    assert told.all_to_all_s == 4 * 2 * 10 * 0.5  # equation 1: rank 0 gets two rows, rank 1 one
    assert (told.forward_s, told.backward_s) == (7.0, 14.0)  # equations 2 and 3
    assert told.trans_s == told.agg_s == told.hidden_s == 0
    assert told.blocking_s == told.overlapped_s == 40 + 21


def test_all_local_by_hand() -> None:
    told = LayerModel(PLAIN).predict(Lanes.local(2, 2), LOADS)
    assert told.all_to_all_s == 0
    assert told.compute_s == 3 * 6
    # Each rank gets one expert's weights. Each sum begins at the other rank, and its home adds the last lane.
    assert told.trans_s == told.agg_s == 100 * 0.5
    assert told.blocking_s == 18 + 50 + 50  # equation 6
    assert (told.hidden_trans_s, told.hidden_agg_s) == (6, 12)
    assert told.overlapped_s == 18 + 44 + 38  # equation 8


def test_what_the_rest_of_the_block_hides() -> None:
    rest = replace(PLAIN, rest_forward_s=1000.0, rest_backward_s=30.0)
    told = LayerModel(rest).predict(Lanes.local(2, 2), LOADS)
    assert told.hidden_trans_s == told.trans_s
    assert told.hidden_agg_s == 12 + 30
    assert LayerModel(rest, overlapped=False).seconds(Lanes.local(2, 2), LOADS) == told.blocking_s
    assert LayerModel(rest).seconds(Lanes.local(2, 2), LOADS) == told.overlapped_s


def test_lanes_and_messages_cost_by_micro_batch() -> None:
    costs = replace(PLAIN, lane_s=0.3, message_s=0.25, num_micro_batches=2)
    told = LayerModel(costs).predict(Lanes.static(2, 2), LOADS)
    assert told.all_to_all_s == pytest.approx(40 + 4 * 2 * 0.25)
    assert told.compute_s == pytest.approx(21 + 2 * 2 * 0.3)
    nothing = LayerModel(costs).predict(Lanes.static(2, 2), np.zeros((2, 2)))
    assert nothing.compute_s == 0


def test_weights_and_sums_have_links_of_their_own() -> None:
    """On top of equations 4 and 5: what starting takes if anything travels, and what any placement takes."""
    costs = replace(
        PLAIN, trans=Link(byte_s=0.25, message_s=2.0, start_s=3.0), agg_link=Link(byte_s=0.75, start_s=5.0),
        sum_s=7.0, fixed_s=11.0, message_s=1.0,
    )  # fmt: skip
    told = LayerModel(costs).predict(Lanes.local(2, 2), LOADS)
    assert told.all_to_all_s == 0, "no row travels, so there are no exchanges"
    assert (told.trans_s, told.agg_s, told.fixed_s) == (3 + 2 + 25, 7 + 5 + 75, 11)
    assert told.blocking_s == 18 + 30 + 87 + 11
    static = LayerModel(costs).predict(Lanes.static(2, 2), LOADS)
    assert (static.trans_s, static.agg_s) == (0, 7) and static.blocking_s == 40 + 4 + 21 + 7 + 11
    with pytest.raises(ValueError, match="message_s=-1.0 must be 0 or more, and finite; measure them again"):
        Link(byte_s=1.0, message_s=-1.0)


def test_pieces_fill_a_chain_sooner() -> None:
    loads = np.ones((4, 4))
    lanes = Lanes.parse("4x4 0@1:1 0@2:2 0@3:3")
    whole = LayerModel(PLAIN).predict(lanes, loads)
    assert whole.trans_s == 3 * 50  # one transfer a link, but the third waits for two before it
    pieces = LayerModel(replace(PLAIN, piece_bytes=10.0)).predict(lanes, loads)
    assert pieces.trans_s == 50 + 2 * 5


def test_the_fullest_link_counts_in_either_direction() -> None:
    loads = np.array([[0, 8, 8], [0, 0, 0], [0, 0, 0]])
    rows = count_rows(np.array(Lanes.static(3, 3).owner), loads.astype(float))
    assert rows.inbound.tolist() == [0, 8, 8] and rows.outbound.tolist() == [16, 0, 0]
    assert rows.fullest_link == 16


def test_a_running_sum_goes_around_the_ring_to_its_home() -> None:
    owner = np.array(Lanes.parse("4x4 0@1:1 0@3:3").owner)
    loads = np.ones((4, 4))
    chain = count_agg(owner, loads, "chain")  # rank 1, home for source 2, rank 3, and home for source 0
    assert chain.inbound.tolist() == [2, 0, 0, 1] and chain.outbound.tolist() == [1, 1, 0, 1]
    assert chain.depth == 3
    other = count_agg(np.array(Lanes.parse("4x4 2@3:3 2@0:0-1").owner), loads, "chain")  # ranks 3, 0, and home
    assert other.inbound.tolist() == [1, 0, 1, 0] and other.outbound.tolist() == [1, 0, 0, 1]
    assert other.depth == 2
    sums = count_agg(owner, loads, "sums")  # 3, 1, home
    assert sums.inbound.tolist() == [1, 1, 0, 0] and sums.outbound.tolist() == [0, 1, 0, 1] and sums.depth == 2
    lanes = count_agg(owner, loads, "lanes")
    assert lanes.inbound.tolist() == [2, 0, 0, 0] and lanes.outbound.tolist() == [0, 1, 0, 1] and lanes.depth == 1


def test_lanes_without_rows_have_no_sum_to_add() -> None:
    owner = np.array(Lanes.parse("4x4 0@1:1 0@3:3").owner)
    loads = np.ones((4, 4))
    loads[1:3, 0] = 0
    chain = count_agg(owner, loads, "chain")  # rank 3, and home
    assert chain.inbound.tolist() == [1, 0, 0, 0] and chain.depth == 1
    assert count_agg(owner, loads, "lanes").inbound.tolist() == [1, 0, 0, 0]
    loads[:, 0] = 0
    for how in ("chain", "lanes"):
        assert count_agg(owner, loads, how).depth == 0
    assert count_trans(held(owner)).inbound.tolist() == [0, 1, 0, 1], "weights travel whatever is routed then"


@pytest.mark.parametrize("agg", ["chain", "lanes", "sums"])
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 3), (2, 4), (3, 3), (4, 8), (8, 8)])
def test_sums_by_column_are_those_of_the_whole(num_ranks: int, num_experts: int, agg: str) -> None:
    """Two ways to count that check each other: whole placements, and columns as the search adds them."""
    model = LayerModel(constants(agg=agg, lane_s=1e-6))
    for seed in range(20):
        loads = skewed(num_ranks, num_experts, seed, rows=30).astype(float)  # some lanes are empty
        owner = any_owner(num_ranks, num_experts, seed)
        sums = Columns(model, loads).sums(owner.T.copy(), np.arange(num_experts))
        totals, rows = sums.by_rank.sum(axis=1), count_rows(owner, loads)
        trans, aggregated = count_trans(held(owner)), count_agg(owner, loads, agg)
        row_s = 4 * 4096 / 3e9
        assert totals[COMPUTE].max() == pytest.approx(sum(model.compute_s(rows)))
        np.testing.assert_allclose(totals[[INBOUND, OUTBOUND]], np.array([rows.inbound, rows.outbound]) * row_s)
        np.testing.assert_array_equal(totals[[TRANS_IN, TRANS_OUT]], [trans.inbound, trans.outbound])
        np.testing.assert_array_equal(totals[[AGG_IN, AGG_OUT]], [aggregated.inbound, aggregated.outbound])
        assert sums.hops.max(axis=1).tolist() == [trans.depth, aggregated.depth]


@pytest.mark.parametrize("agg", ["chain", "lanes", "sums"])
def test_more_rows_never_take_less_time(agg: str) -> None:
    draw = np.random.default_rng(0)
    for seed in range(100):
        loads = skewed(4, 8, seed, rows=40)
        lanes = as_lanes(any_owner(4, 8, seed))
        more = loads + draw.integers(0, 3, loads.shape)
        for overlapped in (False, True):
            model = LayerModel(constants(agg=agg, lane_s=1e-6), overlapped)
            first, then = model.predict(lanes, loads), model.predict(lanes, more)
            assert then.all_to_all_s >= first.all_to_all_s and then.forward_s >= first.forward_s
            assert then.trans_s == first.trans_s
            assert then.agg_s >= first.agg_s
            assert model.whole(then) >= model.whole(first) * (1 - 1e-12)


@pytest.mark.parametrize(
    "name", ["forward_row_s", "row_bytes", "byte_s", "expert_bytes", "message_s", "lane_s", "gradient_bytes"]
)
def test_dearer_constants_never_take_less_time(name: str) -> None:
    for seed in range(20):
        loads, lanes = skewed(4, 8, seed), as_lanes(any_owner(4, 8, seed))
        costs = constants(lane_s=1e-6, gradient_bytes=2.0**24)
        dearer = [replace(costs, **{name: getattr(costs, name) * factor}) for factor in (1, 2, 8)]
        for a, b in pairwise(LayerModel(costs, overlapped=False).seconds(lanes, loads) for costs in dearer):
            assert b > a


def test_hiding_never_takes_longer_than_blocking() -> None:
    for seed in range(50):
        told = LayerModel(constants()).predict(as_lanes(any_owner(4, 8, seed)), skewed(4, 8, seed))
        assert 0 <= told.hidden_s <= told.trans_s + told.agg_s
        assert told.blocking_s - told.overlapped_s == pytest.approx(told.hidden_s)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_row_s": -1.0}, "forward_row_s=-1.0 must be 0 or more, and finite; measure them again"),
        ({"byte_s": float("nan"), "row_bytes": float("inf")}, "row_bytes=inf must .*; byte_s=nan must"),
        ({"num_micro_batches": 0}, "num_micro_batches=0 must be at least 1"),
        ({"agg": "tree"}, "agg='tree' must be one of chain, lanes, sums"),
    ],
)
def test_constants_without_a_meaning(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        constants(**changes)


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([1, 2], r"loads of shape \(2,\): must be \[ranks, experts\]; give one row a source"),
        ([[1, -2], [0, 0]], "loads from -2.0 to 1.0: rows can't be fewer than 0 or not finite; count them again"),
        ([[1, float("nan")], [0, 0]], "not finite"),
        ([[1, 1, 1], [0, 0, 1]], "placement 2x2 is for 2 ranks and 2 experts; here are 2 ranks and 3 experts"),
    ],
)
def test_loads_that_are_none(loads: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerModel(PLAIN).predict(Lanes.static(2, 2), loads)
