"""What a profile's layers come to on stages, by the order that runs."""

from __future__ import annotations

import numpy as np

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.timetable import Timetable

SPLIT = Order.parse(
    "F0 SA0 F1 SA1 RG0 B0 W0 RG1 B1 W1 | RA0 F0 SA0 RA1 F1 SA1 RG0 B0 SG0 RG1 B1 SG1 W0 W1 | "
    "RA0 F0 B0 SG0 RA1 F1 B1 SG1"
)
"""The first two of three stages split their backwards."""


def profile(num_frozen: int) -> PipelineProfile:
    """Six layers, two on a stage, of which the first ones are frozen."""
    layers = tuple(
        LayerProfile(f"layer {i}", 1.0, 2.0 * trains, 1, 4, 4, 8, 10, weight_s=0.9 * trains, split_s=0.1 * trains)
        for i in range(6) for trains in [i >= num_frozen]
    )  # fmt: skip
    return PipelineProfile(0, (0, 2, 4, 6), 2, layers, ())


def test_an_order_made_for_the_profile() -> None:
    order = Order(SPLIT.num_micro_batches, SPLIT.stages, (2, 1, 2))
    found, plain = Workload.running(order, profile(0)), Workload.from_profile(profile(0), late=(2, 1, 2))
    assert found.frozen_boundaries == 0
    assert found.weight_s[:, 0].tolist() == plain.weight_s[:, 0].tolist() == [1.8, 0.9, 1.8]
    assert found.weight_bytes == plain.weight_bytes == (20, 10, 20)


def test_an_order_older_than_what_is_frozen() -> None:
    """The second stage is the first that trains now: nothing is to be done before ``W``, which does all, and waits."""
    order = Order(SPLIT.num_micro_batches, SPLIT.stages, (2, 1, 2))
    found = Workload.running(order, profile(2), speeds=[1.0, 0.5, 1.0])
    assert found.frozen_boundaries == 1
    seconds = found.stage_seconds(1)
    assert seconds.input_s == [0.0, 0.0]
    np.testing.assert_allclose(seconds.weight_s, [(4.0 + 0.2) / 0.5] * 2, rtol=1e-15)
    assert found.weight_bytes == (20, 20, 20)
    assert found.stage_seconds(2) == Workload.from_profile(profile(2), late=(2, 1, 2)).stage_seconds(2)


def test_work_that_is_all_late_makes_a_batch_longer() -> None:
    """Both backwards wait for ``B1``, where the planner would begin the first at once."""
    frozen = profile(2)
    plain, running = Workload.from_profile(frozen, late=SPLIT.late), Workload.running(SPLIT, frozen)
    timetable = Timetable(SPLIT, 1)
    assert timetable.makespan_s(running) > timetable.makespan_s(plain)


def test_a_stage_that_never_split_stays_as_it_is() -> None:
    frozen = profile(4)
    found, plain = Workload.running(SPLIT, frozen), Workload.from_profile(frozen)
    assert found.frozen_boundaries == 2 and not SPLIT.split(2)
    assert found.weight_s.tolist() == plain.weight_s.tolist()
