"""The order for one partition: where not all weight gradients have room to wait, some do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.planning import activation_caps, assume_halves, plan_on_partition, plan_order, worker_bytes_of_1f1b
from dynpipe_ds.simulation import Workload, simulate

CUTS = (0, 6, 12)


def profile(head_bytes: int, num_micro_batches: int = 6) -> PipelineProfile:
    """Two stages of six layers; the last layer holds more or less than the others."""
    layers = [LayerProfile(f"l{i}", 1.0, 2.0, 10, 40, 40, 80, 1000) for i in range(12)]
    layers[-1] = replace(layers[-1], activation_bytes=head_bytes)
    return assume_halves(PipelineProfile(0, CUTS, num_micro_batches, tuple(layers), ()), 0.5)


def test_a_head_that_holds_more_costs_its_own_layer_only() -> None:
    found = {}
    for head_bytes in (1000, 1500, 2500, 7001):
        told = profile(head_bytes)
        worker_bytes = worker_bytes_of_1f1b(told, CUTS)
        planned = plan_on_partition(told, CUTS, worker_bytes)
        workload = Workload.from_profile(told, late=planned.order.late)
        assert simulate(workload, planned.order).makespan_s == pytest.approx(planned.seconds)
        caps = activation_caps(told, CUTS, worker_bytes)
        assert all(peak <= cap for peak, cap in zip(planned.peak_bytes, caps, strict=True))
        alone = plan_order(Workload.from_profile(told), caps).seconds
        assert planned.seconds <= alone + 1e-9
        found[head_bytes] = planned.order.late, planned.seconds, alone
    assert found[1000][0] == () and found[1500][0] == (6, 5) and found[2500][0] == (6, 4)
    assert found[1000][1] < found[1500][1] < found[2500][1] <= found[7001][1]
    assert found[1500][1] < found[1500][2], "all or nothing is slower"


def test_what_has_no_halves_has_no_late_layers() -> None:
    told = profile(1500)
    whole = replace(told, layers=tuple(replace(layer, weight_s=0.0) for layer in told.layers))
    assert plan_on_partition(whole, CUTS, worker_bytes_of_1f1b(told, CUTS)).order.late == ()
