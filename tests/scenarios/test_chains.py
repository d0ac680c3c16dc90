"""Weights and sums in chains: who passes what on when, and that everything arrives."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from scenarios.moe.placing import Lanes
from scenarios.moe.sharded import chains
from scenarios.moe.sharded.chains import Load, Visit, pieces_of, run_chains, steps_of, summing_chain
from tests.distributed.ranks import run_ranks


def test_pieces_follow_each_other() -> None:
    """Piece p makes its k-th hop in step p + k, so that the last one arrives soon after a direct way."""
    steps = list(steps_of([3, 1, 2], 2))
    assert steps == [[(0, 0, 0), (2, 0, 0)], [(0, 0, 1), (0, 1, 0), (2, 0, 1)], [(0, 1, 1)]]


@pytest.mark.parametrize("lengths", [[], [1, 1], [4, 2, 3]])
@pytest.mark.parametrize("num_pieces", [0, 1, 5])
def test_every_piece_makes_every_hop_once_and_not_before_it_has_arrived(lengths: list[int], num_pieces: int) -> None:
    steps = list(steps_of(lengths, num_pieces))
    when = {hop: step for step, hops in enumerate(steps) for hop in hops}
    assert len(when) == sum(map(len, steps)) == num_pieces * sum(length - 1 for length in lengths)
    for (chain, place, piece), step in when.items():
        assert place == 0 or when[chains.Hop(chain, place - 1, piece)] < step
        assert piece == 0 or when[chains.Hop(chain, place, piece - 1)] < step


@pytest.mark.parametrize(
    ("text", "has_rows", "visits"),
    [
        ("3x3", [True] * 3, [Visit(1, (2, 0, 1))]),
        ("3x3 local", [True] * 3, [Visit(2, (2,)), Visit(0, (0,)), Visit(1, (1,))]),
        ("3x3 local", [True, True, False], [Visit(0, (0,)), Visit(1, (1,))]),
        ("3x3 local", [False, False, True], [Visit(2, (2,)), Visit(1, ())]),
        ("3x3 1@0:0,2", [True] * 3, [Visit(0, (2, 0)), Visit(1, (1,))]),
        ("3x3 1@2:1,2", [True] * 3, [Visit(2, (2,)), Visit(1, (0,)), Visit(2, (1,)), Visit(1, ())]),
        ("3x3 1@0:0,2", [True, False, True], [Visit(0, (2, 0)), Visit(1, ())]),
        ("3x3 local", [False] * 3, []),
    ],
)
def test_a_sum_passes_its_lanes_around_the_ring(text: str, has_rows: list[bool], visits: list[Visit]) -> None:
    """It begins after its home and ends there, and empty lanes are no reason to travel."""
    assert summing_chain(Lanes.parse(text), 1, has_rows) == tuple(visits)


def relay(rank: int) -> None:
    """Copies and sums on random chains, in small pieces."""
    num_ranks, draw = dist.get_world_size(), random.Random(1)
    for _ in range(6):
        ways = []
        for _ in range(5):
            way = [draw.randrange(num_ranks)]
            for _ in range(draw.randrange(5)):
                way.append(draw.choice([other for other in range(num_ranks) if other != way[-1]]))
            ways.append(way)
        loads: list[dict[int, Load]] = []
        for chain, way in enumerate(ways):
            places = [place for place, other in enumerate(way) if other == rank]
            values = {place: torch.arange(10.0) + 100 * chain + place for place in places}
            loads.append({
                place: Load([value[:7].clone(), value[7:].clone()], [[torch.ones(7), torch.ones(3)]], has_own=True)
                for place, value in values.items()
            })  # fmt: skip
        with patch.object(chains, "PIECE_BYTES", 8):
            for places in loads:
                for load in places.values():
                    load.pieces, load._added = pieces_of(load.tensors), [pieces_of([torch.ones(7), torch.ones(3)])]
            run_chains(ways, loads, 6, dist.group.WORLD)
        for chain, (way, places) in enumerate(zip(ways, loads, strict=True)):
            for place, load in places.items():
                passed = range(place + 1)
                expected = sum(torch.arange(10.0) + 100 * chain + k + 1 for k in passed)
                assert torch.equal(torch.cat(list(load.tensors)), expected), (chain, way, place)


def test_everything_arrives() -> None:
    run_ranks(relay, 3)
