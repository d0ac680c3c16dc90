"""The order for one partition: with all weight gradients apart, or only those that have room to wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.placement import Placement
from dynpipe_ds.planning.memory import activation_caps, late_layers
from dynpipe_ds.planning.planner import EFFORT, PlannedOrder, plan_order
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.workload import Seconds


def plan_on_partition(
    profile: PipelineProfile,
    boundaries: Placement | Sequence[int],
    worker_bytes: int | Sequence[int],
    *,
    weight_bytes: Sequence[int] | None = None,
    activation_link_s: Seconds | None = None,
    gradient_link_s: Seconds | None = None,
    speeds: Sequence[float] | None = None,
    effort: int = EFFORT,
    varying: Sequence[PipelineProfile] = (),
) -> PlannedOrder:
    """Plan in which order to run a partition, within the memory of the workers.

    Args:
        profile: seconds and bytes of every layer, and M.
        boundaries: S + 1 layer indices, or a placement that is a partition.
        worker_bytes: state and activations that a worker may hold, for all or for each.
        weight_bytes: as for :meth:`~dynpipe_ds.simulation.Workload.from_profile`.
        activation_link_s: seconds of a micro-batch's activations over every boundary; None: as the profile has them.
        gradient_link_s: the same for gradients.
        speeds: S relative speeds to divide by, when layer times are at unit speed.
        effort: how many computations to look at; 400,000 a second or so, compiled 4 million.
        varying: batches that the profile is the mean of; the order is the one in which they are the shortest.

    Returns:
        The order; of equally short ones that in which all weight gradients are apart.

    Raises:
        ValueError: when a worker has no room for its layers and one micro-batch.
    """
    caps = activation_caps(profile, boundaries, worker_bytes)

    def plan(late: Sequence[int], effort: int) -> PlannedOrder:
        workload, *batches = (
            Workload.from_profile(
                each, boundaries, speeds=speeds, weight_bytes=weight_bytes, late=late,
                activation_link_s=activation_link_s, gradient_link_s=gradient_link_s,
            )
            for each in (profile, *varying)
        )  # fmt: skip
        return plan_order(workload, caps, effort=effort, late=late, varying=batches)

    late = late_layers(profile, boundaries, caps, weight_bytes)
    if not late:
        return plan((), effort)
    apart, some = plan((), effort // 2), plan(late, effort // 2)
    best = min(apart, some, key=lambda one: one.seconds)
    return replace(best, num_computations=apart.num_computations + some.num_computations)
