"""A placement as a value: what it says, its short form, and what it refuses."""

from __future__ import annotations

import random

import pytest

from scenarios.moe.placing import Lanes

SIZES = [(1, 1), (1, 3), (2, 2), (2, 6), (3, 3), (4, 8), (5, 15)]


def at_random(num_ranks: int, num_experts: int, seed: int) -> Lanes:
    draw = random.Random(seed)
    return Lanes(tuple(tuple(draw.randrange(num_ranks) for _ in range(num_experts)) for _ in range(num_ranks)))


def test_homes_are_contiguous_and_even() -> None:
    lanes = Lanes.static(3, 6)
    assert [lanes.home(expert) for expert in range(6)] == [0, 0, 1, 1, 2, 2]
    assert lanes.owner == ((0, 0, 1, 1, 2, 2),) * 3
    assert (lanes.num_ranks, lanes.num_experts, lanes.num_copies) == (3, 6, 0)
    assert [lanes.holders(expert) for expert in range(6)] == [(0,), (0,), (1,), (1,), (2,), (2,)]


def test_all_local() -> None:
    lanes = Lanes.local(3, 3)
    assert lanes.owner == ((0, 0, 0), (1, 1, 1), (2, 2, 2))
    assert [lanes.copies(rank) for rank in range(3)] == [(1, 2), (0, 2), (0, 1)]
    assert [lanes.holders(expert) for expert in range(3)] == [(0, 1, 2), (1, 2, 0), (2, 0, 1)], "around the ring"
    assert lanes.num_copies == 6


def test_a_home_that_computes_nothing_of_its_expert_comes_first_and_holds_no_copy() -> None:
    lanes = Lanes(((1, 1), (1, 1)))
    assert lanes.holders(0) == (0, 1) and lanes.copies(0) == ()
    assert lanes.copies(1) == (0,)


@pytest.mark.parametrize(
    ("lanes", "text"),
    [
        (Lanes.static(4, 8), "4x8"),
        (Lanes.local(4, 8), "4x8 local"),
        (Lanes.static(1, 3), "1x3"),
        (Lanes(((0, 0, 1, 1), (1, 0, 1, 0))), "2x4 0@1:1 3@0:1"),
        (Lanes(((1, 2, 2), (1, 1, 2), (0, 1, 2), )), "3x3 0@1:0-1 1@2:0"),
        (Lanes(((3, 1, 2, 3), (3, 1, 2, 3), (0, 1, 2, 3), (3, 1, 2, 3))), "4x4 0@3:0-1,3"),
    ],
)  # fmt: skip
def test_short_form(lanes: Lanes, text: str) -> None:
    assert str(lanes) == text
    assert Lanes.parse(text) == lanes


@pytest.mark.parametrize(("num_ranks", "num_experts"), SIZES)
def test_short_form_of_any_placement_reads_back(num_ranks: int, num_experts: int) -> None:
    for seed in range(30):
        lanes = at_random(num_ranks, num_experts, seed)
        assert Lanes.parse(str(lanes)) == lanes
        assert hash(Lanes.parse(str(lanes))) == hash(lanes)


def test_copies_and_holders_say_the_same() -> None:
    for seed in range(30):
        lanes = at_random(4, 8, seed)
        held = {(rank, expert) for rank in range(4) for expert in lanes.copies(rank)}
        assert held == {(rank, expert) for expert in range(8) for rank in lanes.holders(expert)[1:]}
        assert lanes.num_copies == len(held)


def test_numbers_of_numpy_become_plain() -> None:
    numpy = pytest.importorskip("numpy")
    lanes = Lanes(tuple(numpy.zeros((2, 2), dtype=numpy.int64)))
    assert lanes == Lanes(((0, 0), (0, 0))) and type(lanes.owner[0][0]) is int


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ((), r"0 experts on 0 ranks: .* choose a number of experts"),
        (((), ()), r"0 experts on 2 ranks: .* choose a number"),
        (((0, 0, 1), (0, 0, 1)), r"3 experts on 2 ranks: every rank must be home to as many .* ranks divide"),
        (((0, 1), (0,)), r"1 experts for source 1 and 2 for source 0: .* rows of one length"),
        (((0, 2), (0, 1)), r"owner\[0\]\[1\] = 2: owners must be ranks from 0 to 1, .* name one of them"),
        (((0, 1), (-1, 1)), r"owner\[1\]\[0\] = -1: owners must be ranks"),
    ],
)
def test_placements_that_are_none(owner: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lanes(owner)


@pytest.mark.parametrize("make", [Lanes.static, Lanes.local])
def test_experts_that_do_not_divide(make) -> None:
    with pytest.raises(ValueError, match="7 experts on 2 ranks: .* choose a number of experts"):
        make(2, 7)


@pytest.mark.parametrize(
    "text", ["", "4", "4x", "x8", "4x8 remote", "4x8 0@1", "4x8 0@1:", "4x8 8@1:0", "4x8 0@1:4", "4x8 local 0@1:1"]
)
def test_texts_that_are_no_placement(text: str) -> None:
    with pytest.raises(ValueError, match="is not a placement: it must be RANKSxEXPERTS, .* what str"):
        Lanes.parse(text)


def test_a_text_that_names_a_rank_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"owner\[1\]\[0\] = 4: owners must be ranks from 0 to 3"):
        Lanes.parse("4x8 0@4:1")


def test_other_sizes_are_refused() -> None:
    Lanes.static(2, 4).check(2, 4)
    with pytest.raises(ValueError, match="placement 2x4 is for 2 ranks and 4 experts; here are 4 ranks and 4 experts"):
        Lanes.static(2, 4).check(4, 4)
