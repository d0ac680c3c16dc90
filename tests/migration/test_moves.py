"""What has to move, as values."""

from __future__ import annotations

import random

import pytest

from dynpipe_ds.migration import Move, plan_moves
from dynpipe_ds.placement import Placement


def random_boundaries(rng: random.Random, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Boundaries that may leave stages empty."""
    return (0, *sorted(rng.choices(range(num_layers + 1), k=num_stages - 1)), num_layers)


def test_neighbours_and_far_stages() -> None:
    assert plan_moves((0, 2, 4, 6), (0, 1, 2, 6)) == (Move(1, 0, 1), Move(2, 1, 2), Move(3, 1, 2))
    assert plan_moves((0, 2, 2, 3), (0, 0, 1, 3)) == (Move(0, 0, 1), Move(1, 0, 2))


def test_equal_partitions_have_no_moves() -> None:
    assert plan_moves((0, 3, 6), (0, 3, 6)) == ()


def test_moves_turn_one_partition_into_the_other() -> None:
    rng = random.Random(3)
    for _ in range(300):
        num_layers, num_stages = rng.randint(1, 12), rng.randint(1, 5)
        before, after = (random_boundaries(rng, num_layers, num_stages) for _ in range(2))
        where = dict(enumerate(Placement.from_boundaries(before).layer_stages))
        moves = plan_moves(before, after)
        for move in moves:
            assert move.source == where[move.layer] != move.destination
            where[move.layer] = move.destination
        assert where == dict(enumerate(Placement.from_boundaries(after).layer_stages))
        assert [move.layer for move in moves] == sorted({move.layer for move in moves})


def test_text_form_parses_back() -> None:
    for move in plan_moves((0, 4, 8, 12), (0, 1, 10, 12)):
        assert Move.parse(str(move)) == move
    assert str(Move(7, 0, 1)) == "7:0>1"


@pytest.mark.parametrize("text", ["", "7", "7:0", "7:0>", "a:0>1", "7:0>1>2", "7:0:1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a move; the form is layer:source>destination"):
        Move.parse(text)
