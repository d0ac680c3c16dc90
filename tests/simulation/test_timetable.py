"""An order that is timed again and again: the simulator's seconds and bytes."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.simulation import ScheduleName, Workload
from dynpipe_ds.simulation.streams import run_order
from dynpipe_ds.simulation.timetable import Timetable
from tests.simulation.workloads import SIZES, random_workload


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_a_timetable_says_the_same_to_the_bit(schedule: ScheduleName) -> None:
    """Made once for an order, used for other seconds, with links, varying micro-batches and frozen stages."""
    rng = np.random.default_rng(8)
    for num_stages, num_micro_batches in SIZES:
        order = order_of(schedule, num_micro_batches, num_stages)
        timetables = [Timetable(order, frozen) for frozen in range(num_stages)]
        for varying in (False, True, True):
            workload = random_workload(rng, num_stages, num_micro_batches, varying=varying)
            timetable, result = timetables[workload.frozen_boundaries], run_order(workload, order)
            assert timetable.makespan_s(workload) == result.makespan_s
            assert timetable.peak_bytes(workload) == tuple(stage.peak_activation_bytes for stage in result.stages)
            assert timetable.simulation(workload) == result


def test_a_timetable_is_for_its_order() -> None:
    workload = Workload([1.0, 1.0], [1.0, 1.0], 2)
    with pytest.raises(ValueError, match="of 2 stages, 2 micro-batches and 1 frozen boundaries for a workload of 2, 2"):
        Timetable(order_of("1f1b", 2, 2), 1).makespan_s(workload)
    with pytest.raises(ValueError, match="stage 0 waits for ever in RG0"):
        Timetable(Order.parse("F0 SA0 RG0 B0 F1 SA1 RG1 B1 | RA0 F0 RA1 F1 B0 SG0 B1 SG1"))
