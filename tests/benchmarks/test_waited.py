"""1F1B whose senders wait, by hand."""

from __future__ import annotations

import pytest

from benchmarks.schedules.waited import waited_for
from dynpipe_ds.simulation import Workload, equal_stages_s, simulate


def test_one_micro_batch_passes_stages_and_links_one_after_the_other() -> None:
    workload = Workload([1.0, 3.0], [2.0, 4.0], 1, activation_link_s=0.5, gradient_link_s=0.25)
    assert waited_for(workload).makespan_s == 1 + 0.5 + 3 + 4 + 0.25 + 2


def test_links_that_take_no_time() -> None:
    found = waited_for(Workload([1.0] * 4, [2.0] * 4, 8))
    assert found.makespan_s == equal_stages_s(4, 8, 1.0, 2.0) == 33.0
    assert found.bubble_ratio == pytest.approx(1 - 24 / 33)


def test_a_sender_stands_still_while_its_message_travels() -> None:
    """Stage 0 computes F1 when activation 0 has arrived, at 3, and gives activation 1 away from 5 to 7."""
    workload = Workload([1.0, 1.0], [1.0, 1.0], 2, activation_link_s=2.0)
    assert waited_for(workload).makespan_s == 10.0
    assert simulate(workload).makespan_s == 8.0
