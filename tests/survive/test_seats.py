"""Who holds the layers of stages that are lost."""

from __future__ import annotations

import pytest

from dynpipe_ds.survive.seats import CantGoOnError, Fewer, seated, without_stages


@pytest.mark.parametrize(("staying", "pinned", "expected"), [
    ([1, 2, 3], (), (0, 4, 6, 8)),
    ([0, 1, 2], (), (0, 2, 4, 8)),
    ([0, 2, 3], (), (0, 3, 6, 8)),
    ([0, 2, 3], (3,), (0, 2, 6, 8)),
    ([0, 3], (), (0, 4, 8)),
    ([0, 3], (4,), (0, 3, 8)),
    ([0, 3], (2, 3, 4, 5, 6), (0, 2, 8)),
    ([2], (), (0, 8)),
])  # fmt: skip
def test_neighbours_take_half_each(staying: list[int], pinned: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert without_stages((0, 2, 4, 6, 8), staying, pinned) == expected


def test_a_stage_whose_layers_are_pinned_goes_to_one_neighbour() -> None:
    assert without_stages((0, 2, 5, 8), [0, 2], (3, 4)) == (0, 2, 8)


S2R2 = [(0, 1), (2, 3)]
S3R2 = [(0, 1), (2, 3), (4, 5)]
S2R3 = [(0, 1, 2), (3, 4, 5)]


@pytest.mark.parametrize(("stages", "lost", "rows", "origins", "leftover"), [
    ([(0,), (1,), (2,)], {1}, ((0,), (2,)), (0, 2), ()),
    (S2R2, {1}, ((2, 3),), (1,), (0,)),
    (S2R2, {0, 1}, ((2, 3),), (1,), ()),
    (S2R2, {1, 2}, ((0, 3),), (0,), ()),
    (S3R2, {0}, ((2, 3), (4, 5)), (1, 2), (1,)),
    (S3R2, {1, 2}, ((0, 3), (4, 5)), (0, 2), ()),
    (S3R2, {1, 3}, ((4, 5),), (2,), (0, 2)),
    (S2R3, {5}, ((0, 1, 2),), (0,), (3, 4)),
    (S2R3, {0, 4}, ((3, 1, 2),), (0,), (5,)),
    (S2R2, {1, 3}, None, None, None),
    ([*S3R2, (6, 7)], {3, 5}, ((0, 1), (2, 4), (6, 7)), (0, 1, 3), ()),  # in the middle nobody reads data
])  # fmt: skip
def test_the_number_of_replicas_stays(
    stages: list[tuple[int, ...]], lost: set[int], rows: tuple[tuple[int, ...], ...] | None,
    origins: tuple[int, ...] | None, leftover: tuple[int, ...] | None,
) -> None:
    living = {rank for ranks in stages for rank in ranks} - lost
    if rows is None:
        with pytest.raises(CantGoOnError, match="of every stage some replica is lost.*engine.data_at"):
            seated(stages, living)
    else:
        assert seated(stages, living) == (rows, origins, leftover)


def test_ranks_that_can_read_any_data_become_other_replicas() -> None:
    assert seated(S2R2, {0, 2}, reads_any=True) == (((0, 2),), (0,), ())
    assert seated(S3R2, {0, 2, 4, 5}, reads_any=True) == (((0, 2), (4, 5)), (0, 2), ())


def test_fewer_ranks_than_replicas_are_refused_by_name() -> None:
    with pytest.raises(CantGoOnError, match="1 ranks are left for 2 replicas; load the checkpoint on fewer replicas"):
        seated(S2R2, {2}, reads_any=True)


def test_no_stage_is_left() -> None:
    with pytest.raises(CantGoOnError, match="no stage is left"):
        seated([(0,), (1,)], set())


@pytest.mark.parametrize(("stages", "lost", "fewer", "rows", "origins", "leftover"), [
    ([(0, 1)], {0}, Fewer((1,)), ((1,),), (0,), ()),
    ([(0, 1, 2)], {1}, Fewer((2, 1)), ((0, 2),), (0,), ()),
    ([(0, 1, 2)], {1}, Fewer((1,)), ((0,),), (0,), (2,)),  # two can't share its batch out
    (S2R2, {0, 1, 2}, Fewer((1,)), ((3,),), (1,), ()),
    (S2R2, {1}, Fewer((1,)), ((2, 3),), (1,), (0,)),  # as many replicas are better
    (S2R2, {1}, Fewer((1,), is_first=True), ((0,), (2,)), (0, 1), (3,)),
    (S2R2, {0, 1}, Fewer((1,), is_first=True), ((3,), (2,)), (0, 1), ()),
    (S2R3, {5}, Fewer((2, 1), is_first=True), ((0, 1), (3, 4)), (0, 1), (2,)),
])  # fmt: skip
def test_fewer_replicas(
    stages: list[tuple[int, ...]], lost: set[int], fewer: Fewer, rows: tuple[tuple[int, ...], ...],
    origins: tuple[int, ...], leftover: tuple[int, ...],
) -> None:
    living = {rank for row in stages for rank in row} - lost
    assert seated(stages, living, reads_any=True, fewer=fewer) == (rows, origins, leftover)


def test_layers_that_do_not_fit_into_fewer_stages_stay_with_fewer_replicas() -> None:
    found = seated(S2R2, {0, 2, 3}, reads_any=True, fewer=Fewer((1,)), fits=lambda seating: len(seating.rows) == 2)
    assert found == (((0,), (2,)), (0, 1), (3,))


@pytest.mark.parametrize(("reads_any", "fewer", "remedy"), [
    (False, Fewer((1,)), "say by engine.data_at how to read other data"),
    (True, Fewer(why_not='set survive.fewer_replicas to "last"'), 'set survive.fewer_replicas to "last"'),
])  # fmt: skip
def test_why_there_are_no_fewer_replicas(reads_any: bool, fewer: Fewer, remedy: str) -> None:
    with pytest.raises(CantGoOnError, match=f"1 ranks are left for 2 replicas; .*or next time {remedy}"):
        seated(S2R2, {2}, reads_any=reads_any, fewer=fewer)
