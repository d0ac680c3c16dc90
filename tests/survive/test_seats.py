"""Who holds the layers of stages that are lost."""

from __future__ import annotations

import pytest

from dynpipe_ds.survive.seats import CantGoOnError, staying_stages, without_stages


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


def test_stages_that_are_left() -> None:
    assert staying_stages([(0,), (1,), (2,)], {0, 2}) == [0, 2]
    assert staying_stages([(0, 1), (2, 3)], {2, 3}) == [1]
    with pytest.raises(CantGoOnError, match="of stage 0 some replicas are lost and some live"):
        staying_stages([(0, 1), (2, 3)], {1, 2, 3})
    with pytest.raises(CantGoOnError, match="no stage is left"):
        staying_stages([(0,), (1,)], set())
