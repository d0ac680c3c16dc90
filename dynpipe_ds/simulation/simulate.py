"""The entries: one batch in full, or only how long partitions would take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.placement import Placement
from dynpipe_ds.schedule import Instruction, Order, ScheduleName, order_of
from dynpipe_ds.simulation.outcome import Simulation
from dynpipe_ds.simulation.streams import run_order
from dynpipe_ds.simulation.waves import makespans, run_waves
from dynpipe_ds.simulation.workload import Workload, frozen_boundaries, links_s, stage_seconds, table


def simulate(
    workload: Workload,
    schedule: ScheduleName | Order = "1f1b",
    *,
    timeline: bool = False,
) -> Simulation:
    """Simulate one training batch.

    Args:
        workload: what every stage has to do; :meth:`Workload.from_profile` makes it from a profile.
        schedule: ``"1f1b"``, which DeepSpeed runs, ``"gpipe"``, or any :class:`~dynpipe_ds.schedule.Order`.
        timeline: whether to list every interval (runs the instructions one by one, slower; the figures
            are the same to the bit).

    Returns:
        Makespan, the stages' accounts, and the timeline if asked for.

    Raises:
        ValueError: for another schedule, or an order of another size or in which a stage waits for ever.
    """
    if isinstance(schedule, Order):
        return run_order(workload, schedule, timeline=timeline)
    if not timeline:
        return run_waves(workload, schedule)
    order = order_of(schedule, workload.num_micro_batches, workload.num_stages)
    return run_order(workload, order, timeline=True)


def streams_of(schedule: ScheduleName, num_micro_batches: int, num_stages: int) -> list[list[Instruction]]:
    """The instructions of all stages, as lists; :func:`dynpipe_ds.schedule.order_of` gives them as a value.

    Args:
        schedule: ``"1f1b"``, DeepSpeed's ``TrainSchedule``, or ``"gpipe"``.
        num_micro_batches: M.
        num_stages: S.

    Returns:
        S lists of instructions.

    Raises:
        ValueError: for another schedule.
    """
    return [list(stream) for stream in order_of(schedule, num_micro_batches, num_stages).stages]


def predicted_batches_s(
    cases: Sequence[tuple[PipelineProfile, Placement | Sequence[int]]], *, speeds: Sequence[float] | None = None
) -> list[float]:
    """Seconds that forwards and backwards of a batch would take, for many profiles or partitions at once.

    1F1B, with links as the last profile has them; the step is left out.

    Args:
        cases: a profile (seconds of every layer, and M) and boundaries, or a partition, each; all have as many stages.
        speeds: S relative speeds to divide by, when layer times are at unit speed.

    Returns:
        One number for each case, the same on every rank.

    Raises:
        ValueError: when boundaries don't cover the layers.
    """
    stages = [
        stage_seconds(profile, Placement.of(boundaries, num_layers=len(profile.layers)), speeds)
        for profile, boundaries in cases
    ]
    forward_s, backward_s = (np.array(rows) for rows in zip(*stages, strict=True))
    frozen = np.array([frozen_boundaries(row) for row in backward_s.tolist()])
    num_micro_batches = np.array([profile.num_micro_batches for profile, _ in cases])
    rows = forward_s.shape[1] - 1
    link_s = table("link_s", links_s(cases[-1][0], rows + 1), rows, 1)
    seconds = np.zeros(len(cases))
    for count in np.unique(num_micro_batches).tolist():
        same = num_micro_batches == count
        seconds[same] = makespans(
            forward_s[same], backward_s[same], count, activation_link_s=link_s, gradient_link_s=link_s,
            frozen_boundaries=frozen[same],
        )
    return [float(s) for s in seconds]
