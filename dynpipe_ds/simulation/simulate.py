"""The entries: one batch in full, or only how long partitions would take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynpipe_ds.profile import PipelineProfile
from dynpipe_ds.simulation.outcome import Simulation
from dynpipe_ds.simulation.schedules import ScheduleName, streams_of
from dynpipe_ds.simulation.streams import run_streams
from dynpipe_ds.simulation.waves import makespans, run_waves
from dynpipe_ds.simulation.workload import Sends, Workload, frozen_boundaries, stage_seconds


def simulate(
    workload: Workload,
    schedule: ScheduleName = "1f1b",
    *,
    sends: Sends = "rendezvous",
    timeline: bool = False,
) -> Simulation:
    """Simulate one training batch.

    Args:
        workload: what every stage has to do; :meth:`Workload.from_profile` makes it from a profile.
        schedule: ``"1f1b"``, which DeepSpeed runs, or ``"gpipe"``.
        sends: ``"rendezvous"`` as gloo's blocking messages do it, or ``"buffered"``.
        timeline: whether to list every interval (runs the instructions one by one, slower; the figures
            are the same to the bit).

    Returns:
        Makespan, the stages' accounts, and the timeline if asked for.

    Raises:
        ValueError: for another schedule.
    """
    if not timeline:
        return run_waves(workload, schedule, sends=sends)
    streams = streams_of(schedule, workload.num_micro_batches, workload.num_stages)
    return run_streams(workload, streams, sends=sends, timeline=True)


def predicted_batches_s(
    profile: PipelineProfile,
    partitions: Sequence[Sequence[int]],
    *,
    speeds: Sequence[float] | None = None,
) -> list[float]:
    """Seconds that forwards and backwards of one batch would take under some partitions.

    1F1B with links that take no time; the step is left out.

    Args:
        profile: seconds of every layer, and M.
        partitions: boundaries, all with the same number of stages.
        speeds: S relative speeds to divide by, when layer times are at unit speed.

    Returns:
        One number for each partition, the same on every rank.

    Raises:
        ValueError: when boundaries don't cover the layers.
    """
    stages = [stage_seconds(profile, boundaries, speeds) for boundaries in partitions]
    forward_s, backward_s = (np.array(rows) for rows in zip(*stages, strict=True))
    frozen = [frozen_boundaries(row) for row in backward_s.tolist()]
    seconds = makespans(forward_s, backward_s, profile.num_micro_batches, frozen_boundaries=frozen)
    return [float(s) for s in seconds]
