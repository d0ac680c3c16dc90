"""An order timed with other seconds than it was planned from, and plans for batches that vary."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np

from dynpipe_ds.measure.profile import PipelineProfile, smooth
from dynpipe_ds.planning import plan_batch, plan_on_partition, worker_bytes_of_1f1b
from dynpipe_ds.planning.listing import list_order, work_of
from dynpipe_ds.planning.retimed import retimed_s, usual_s
from dynpipe_ds.simulation import Workload, simulate
from tests.planning.test_planner import POLICIES, random_workload, workloads
from tests.planning.test_together import half, random_profile


def test_as_the_simulator_says_to_the_bit() -> None:
    """With the seconds that it was planned from, and with others: who comes first stays."""
    rng = np.random.default_rng(8)
    longer = 0
    for workload in workloads(seed=7):
        other = random_workload(rng, workload.num_stages, workload.num_micro_batches)
        other = replace(other, frozen_boundaries=min(workload.frozen_boundaries, other.frozen_boundaries))
        for policy in POLICIES[::4]:
            caps = [3 * size for size in workload.activation_bytes]
            listing = list_order(work_of(workload, caps), policy)
            order = listing.order(workload.num_micro_batches)
            for timed in (workload, other):
                assert retimed_s(listing, work_of(timed, caps)) == simulate(timed, order).makespan_s
            longer += retimed_s(listing, work_of(workload, caps)) < simulate(workload, "1f1b").makespan_s
    assert longer > 50, "most orders are worth something"


def test_1f1b_takes_what_the_simulator_says_to_the_bit() -> None:
    num_frozen = 0
    for workload in workloads(seed=9):
        num_frozen += workload.frozen_boundaries > 0
        assert usual_s(work_of(workload, workload.activation_bytes)) == simulate(workload, "1f1b").makespan_s
    assert num_frozen > 5


def varying(seed: int, count: int = 4) -> list[PipelineProfile]:
    """Batches in which now these layers and now those take longer; memory as in any."""
    rng, profile = np.random.default_rng(seed), random_profile(seed, 12, 6)

    def drawn() -> PipelineProfile:
        factors = rng.lognormal(0, 0.4, 12).tolist()
        layers = tuple(
            replace(layer, forward_s=layer.forward_s * by, backward_s=layer.backward_s * by)
            for layer, by in zip(profile.layers, factors, strict=True)
        )
        return replace(profile, layers=layers)

    return [half(drawn()) for _ in range(count)]


def test_a_plan_for_batches_that_vary_promises_what_they_take_in_it() -> None:
    shorter = 0
    for seed in range(6):
        batches, start = varying(seed), (0, 3, 6, 9, 12)
        mean = smooth(batches, "mean")
        for_mean = plan_batch(mean, [start])
        found = plan_batch(mean, [start], varying=batches)

        def took_s(cuts: tuple[int, ...], order: object, batches: list[PipelineProfile] = batches) -> float:
            return fmean(simulate(Workload.from_profile(batch, cuts), order).makespan_s for batch in batches)

        own_s = took_s(found.placement.boundaries, found.planned.order)
        assert np.isclose(found.seconds, own_s, rtol=1e-12) and len(found.planned.varying_s) == len(batches)
        assert found.planned.least_s <= found.seconds
        usual_s = took_s(start, "1f1b")
        assert found.seconds <= usual_s * (1 + 1e-9), "1F1B on a candidate is no shorter"
        before_s = took_s(for_mean.placement.boundaries, for_mean.planned.order)
        assert before_s > for_mean.seconds, "the mean of batches promises too much"
        shorter += own_s < before_s * (1 - 1e-9)
    assert shorter >= 3, "to plan for batches is worth something"


def test_an_order_for_a_partition_is_chosen_by_the_batches() -> None:
    gains = []
    for seed in range(6):
        batches, cuts = varying(seed), (0, 3, 6, 9, 12)
        mean = smooth(batches, "mean")
        room = worker_bytes_of_1f1b(mean, cuts)
        apart, together = (plan_on_partition(mean, cuts, room, varying=some) for some in ((), batches))
        took_s = fmean(simulate(Workload.from_profile(batch, cuts), apart.order).makespan_s for batch in batches)
        assert together.seconds <= took_s * (1 + 1e-9)
        gains.append(took_s / together.seconds)
    assert max(gains) > 1.002, gains


def test_1f1b_is_chosen_where_no_order_is_shorter() -> None:
    """Two stages, nothing to split: what 1F1B takes of each batch is told, too."""
    batches = [
        replace(batch, layers=tuple(replace(layer, weight_s=0.0) for layer in batch.layers)) for batch in varying(1)
    ]
    planned = plan_on_partition(smooth(batches, "mean"), (0, 6, 12), 10**9, varying=batches)
    usual_s = [simulate(Workload.from_profile(batch, (0, 6, 12)), "1f1b").makespan_s for batch in batches]
    assert planned.is_1f1b == (planned.varying_s == tuple(usual_s))
    assert planned.seconds <= fmean(usual_s) * (1 + 1e-9)
