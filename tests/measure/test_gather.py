"""What messages take, by clocks that do not agree."""

from __future__ import annotations

import numpy as np
import pytest

from dynpipe_ds.measure.gather import _STAGE_FIELDS, _links_s

FORWARD_S, BACKWARD_S = (1.0, 1.2, 0.8), (2.0, 2.4, 1.6)
THERE_S, BACK_S = (0.3, 0.5), (0.1, 0.7)


def rows(offsets: list[tuple[float, ...]]) -> np.ndarray:
    """What ranks say whose clocks began at different times, replica by replica."""
    found = []
    for clocks in offsets:
        ended, back = [FORWARD_S[0]], [0.0] * 3
        for stage in (1, 2):
            ended.append(ended[-1] + THERE_S[stage - 1] + FORWARD_S[stage])
        back[2] = ended[2]
        for stage in (1, 0):
            back[stage] = back[stage + 1] + BACKWARD_S[stage + 1] + BACK_S[stage]
        for stage, clock in enumerate(clocks):
            row = np.zeros(_STAGE_FIELDS)
            came = ended[stage] - FORWARD_S[stage] - clock if stage else -1.0
            row[0], row[8], row[9] = stage, came, ended[stage] - clock
            row[10], row[11] = (back[stage] - clock if stage < 2 else -1.0), back[stage] + BACKWARD_S[stage] - clock
            found.append(row)
    return np.array(found)


def test_clocks_cancel_out() -> None:
    for offsets in ([(0.0, 0.0, 0.0)], [(0.0, -5.0, 0.25)], [(0.5, -3.0, -1.0), (0.0, 0.1, -4.0)]):
        assert list(_links_s(rows(offsets), 3)) == [pytest.approx(0.2), pytest.approx(0.6)]


def test_a_boundary_at_which_nobody_waited_is_not_measured() -> None:
    table = rows([(0.0, 0.0, 0.0)])
    table[1, 10] = -1.0  # the gradients were there before the second stage wanted them
    assert list(_links_s(table, 3)) == [pytest.approx(0.2), None]
    table[0, 10:12] = -1.0  # frozen
    assert list(_links_s(table, 3)) == [None, None]
    assert list(_links_s(table[:1], 1)) == []
