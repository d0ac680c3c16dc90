"""The fast way: all stages of a diagonal of the schedule at once, in NumPy.

DeepSpeed's ``TrainSchedule`` runs in steps: in step t a stage handles a forward when ``t - s`` is even,
of micro-batch ``(t - s) / 2``, and a backward when it is odd, of micro-batch ``(t + s + 1) / 2 - S``.
Before it computes, messages arrive between the pairs (s, s + 1) with ``t - s`` odd: the gradient that s + 1 has
computed in the step before, and the activation that s has. The pairs of one step have no stage in common, so a step is
a handful of operations on every other stage. Each is the maximum or sum that the reference (``streams``) computes as
well, so the results are equal bit for bit.

GPipe's order has such diagonals too: its transfer of micro-batch m to stage s, and the forward there, come
in wave ``2 m + s``; the backwards likewise, from the other end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynpipe_ds.schedule.makers import ScheduleName, check_schedule, in_flight
from dynpipe_ds.simulation.outcome import Counted, Held, Simulation, account
from dynpipe_ds.simulation.workload import FloatArray, Workload


class Part(NamedTuple):
    """Every other stage (or boundary) of a range, each with a micro-batch.

    Attributes:
        where: the stages or boundaries.
        micro_batch: that of the first one.
        step: 1 or -1, what the micro-batch changes by from one to the next.
    """

    where: slice
    micro_batch: int
    step: int


class Wave(NamedTuple):
    """What can be done together, in this order; None where there is nothing.

    Attributes:
        gradients: boundaries that a gradient crosses.
        activations: boundaries that an activation crosses.
        forwards: stages that compute a forward.
        backwards: stages that compute a backward.
    """

    gradients: Part | None = None
    activations: Part | None = None
    forwards: Part | None = None
    backwards: Part | None = None


def makespans(
    forward_s: FloatArray,
    backward_s: FloatArray,
    num_micro_batches: int,
    *,
    activation_link_s: FloatArray | None = None,
    gradient_link_s: FloatArray | None = None,
    frozen_boundaries: int | Sequence[int] | npt.NDArray[np.int64] = 0,
    schedule: ScheduleName = "1f1b",
) -> FloatArray:
    """Makespans of many pipelines at once, for searches.

    Args:
        forward_s: forward seconds of a micro-batch, ``(K, S)``, or of each, ``(K, S, M)``.
        backward_s: backward seconds, of the same shape or of the other.
        num_micro_batches: M.
        activation_link_s: ``(S - 1, 1)`` or ``(S - 1, M)``; None: links take no time.
        gradient_link_s: the same.
        frozen_boundaries: boundaries, from the first, that no gradient crosses; one number or K.
        schedule: ``"1f1b"`` or ``"gpipe"``.

    Returns:
        K makespans, each equal to that of :func:`~dynpipe_ds.simulation.simulate`.
    """
    num_pipelines, num_stages = forward_s.shape[:2]
    forward_s, backward_s = (each.reshape(num_pipelines, num_stages, -1) for each in (forward_s, backward_s))
    no_time = np.zeros((num_stages - 1, 1))
    links = [no_time if link_s is None else link_s for link_s in (activation_link_s, gradient_link_s)]
    frozen = np.broadcast_to(np.asarray(frozen_boundaries), (num_pipelines,))
    results = np.zeros(num_pipelines)
    for count in np.unique(frozen).tolist():
        same = frozen == count
        run = _Run(forward_s[same], backward_s[same], *links)
        run.all(waves_of(schedule, num_micro_batches, num_stages), count)
        results[same] = run.compute_end_s.max(axis=-1)
    return results


def run_waves(workload: Workload, schedule: ScheduleName = "1f1b") -> Simulation:
    """Simulate a batch wave by wave."""
    num_stages, num_micro_batches = workload.num_stages, workload.num_micro_batches
    run = _AccountedRun(
        workload.forward_s, workload.backward_s, workload.activation_link_s, workload.gradient_link_s
    )
    run.last_micro_batch = num_micro_batches - 1
    run.all(waves_of(schedule, num_micro_batches, num_stages), workload.frozen_boundaries)
    figures_s = np.stack((
        run.busy_s, run.fill_s, run.waiting_until_end_s, run.transfer_until_end_s, run.compute_end_s, run.clock_s,
    ), axis=1)
    counts = (in_flight(schedule, num_micro_batches, num_stages, s) for s in range(num_stages))
    held = [Held(count, count * size) for count, size in zip(counts, workload.activation_bytes, strict=True)]
    return account(workload, [Counted(*row) for row in figures_s.tolist()], held)


def waves_of(schedule: ScheduleName, num_micro_batches: int, num_stages: int) -> Iterator[Wave]:
    """The waves of a schedule, in an order that keeps all dependencies.

    Raises:
        ValueError: for another schedule.
    """
    check_schedule(schedule)
    waves = _waves_1f1b if schedule == "1f1b" else _waves_gpipe
    return waves(num_micro_batches, num_stages)


def _waves_1f1b(num_micro_batches: int, num_stages: int) -> Iterator[Wave]:
    rows = 2 * (num_micro_batches - 1)
    for t in range(2 * (num_micro_batches + num_stages - 1)):
        yield Wave(
            gradients=_backward_part(t, num_stages, rows, num_stages - 2),
            activations=_forward_part(t - 1, rows, num_stages - 2),
            forwards=_forward_part(t, rows, num_stages - 1),
            backwards=_backward_part(t, num_stages, rows, num_stages - 1),
        )


def _waves_gpipe(num_micro_batches: int, num_stages: int) -> Iterator[Wave]:
    rows = 2 * (num_micro_batches - 1)
    for t in range(rows + num_stages):
        yield Wave(
            activations=_forward_part(t - 1, rows, num_stages - 2),
            forwards=_forward_part(t, rows, num_stages - 1),
        )
    for t in range(num_stages, rows + 2 * num_stages):  # as if it were 1F1B's steps: t + s + 1 >= 2 S
        yield Wave(
            gradients=_backward_part(t, num_stages, rows, num_stages - 2),
            backwards=_backward_part(t, num_stages, rows, num_stages - 1),
        )


def _forward_part(t: int, rows: int, last: int) -> Part | None:
    """Stages s <= last with ``t - s`` even and ``0 <= t - s <= rows``; micro-batch ``(t - s) / 2``."""
    first = max(t - rows, t & 1)
    last = min(last, t)
    return Part(slice(first, last + 1, 2), (t - first) // 2, -1) if 0 <= first <= last else None


def _backward_part(t: int, num_stages: int, rows: int, last: int) -> Part | None:
    """Stages s <= last with ``0 <= t + s + 1 - 2 S <= rows`` and even; half of it is the micro-batch."""
    shift = t + 1 - 2 * num_stages
    first = max(-shift, shift & 1)
    last = min(last, rows - shift)
    return Part(slice(first, last + 1, 2), (first + shift) // 2, 1) if first <= last else None


class _Run:
    """Clocks of all stages, the last axis; axes before it are independent pipelines.

    Args:
        forward_s: ``(..., S, 1 or M)``, as the other tables; see :class:`Workload`.
        backward_s: the same.
        activation_link_s: ``(S - 1, 1 or M)``.
        gradient_link_s: the same.
    """

    def __init__(
        self, forward_s: FloatArray, backward_s: FloatArray, activation_link_s: FloatArray,
        gradient_link_s: FloatArray,
    ) -> None:
        self.forward_s, self.backward_s = forward_s, backward_s
        self.activation_link_s, self.gradient_link_s = activation_link_s, gradient_link_s
        shape = np.broadcast_shapes(forward_s.shape[:-1], backward_s.shape[:-1])
        self.clock_s, self.compute_end_s = np.zeros(shape), np.zeros(shape)
        # Messages on one wire follow each other: when it is free again, by boundary.
        self.wire_forwards_s, self.wire_back_s = np.zeros(shape), np.zeros(shape)

    def all(self, waves: Iterator[Wave], frozen_boundaries: int) -> None:
        for gradients, activations, forwards, backwards in waves:
            if gradients is not None and frozen_boundaries:
                gradients = _from_on(gradients, frozen_boundaries)
            if gradients is not None:
                lower, upper = gradients.where, _next(gradients.where)
                self.message(upper, lower, lower, _pick(self.gradient_link_s, gradients), self.wire_back_s)
            if activations is not None:
                lower, upper = activations.where, _next(activations.where)
                seconds = _pick(self.activation_link_s, activations)
                self.message(lower, upper, lower, seconds, self.wire_forwards_s)
            if forwards is not None:
                self.compute(forwards, _pick(self.forward_s, forwards), is_forward=True)
            if backwards is not None:
                self.compute(backwards, _pick(self.backward_s, backwards), is_forward=False)

    def message(
        self, sender: slice, receiver: slice, boundary: slice, seconds: FloatArray, wire_s: FloatArray
    ) -> None:
        depart_s = np.maximum(wire_s[..., boundary], self.compute_end_s[..., sender])
        arrive_s = depart_s + seconds
        wire_s[..., boundary] = arrive_s
        ready_s = self.clock_s[..., receiver]
        self.transferred(receiver, np.maximum(ready_s, depart_s), np.maximum(ready_s, arrive_s))

    def transferred(self, stages: slice, start_s: FloatArray, end_s: FloatArray) -> None:
        self.clock_s[..., stages] = end_s

    def compute(self, part: Part, seconds: FloatArray, *, is_forward: bool) -> None:
        self.clock_s[..., part.where] += seconds
        self.compute_end_s[..., part.where] = self.clock_s[..., part.where]


class _AccountedRun(_Run):
    """Keeps each stage's accounts as well; for one pipeline.

    Attributes:
        last_micro_batch: the one whose backward is a stage's last computation.
    """

    last_micro_batch = 0

    def __init__(self, *tables: FloatArray) -> None:
        super().__init__(*tables)
        self.busy_s, self.fill_s, self.waiting_s, self.transfer_s = (np.zeros_like(self.clock_s) for _ in range(4))
        self.waiting_until_end_s, self.transfer_until_end_s = (np.zeros_like(self.clock_s) for _ in range(2))

    def transferred(self, stages: slice, start_s: FloatArray, end_s: FloatArray) -> None:
        self.waiting_s[stages] += start_s - self.clock_s[stages]
        self.transfer_s[stages] += end_s - start_s
        super().transferred(stages, start_s, end_s)

    def compute(self, part: Part, seconds: FloatArray, *, is_forward: bool) -> None:
        if is_forward and (stage := _holder_of(part, 0)) is not None:
            self.fill_s[stage] = self.clock_s[stage]
            self.waiting_s[stage] = self.transfer_s[stage] = 0.0
        self.busy_s[part.where] += seconds
        super().compute(part, seconds, is_forward=is_forward)
        if not is_forward and (stage := _holder_of(part, self.last_micro_batch)) is not None:
            self.waiting_until_end_s[stage] = self.waiting_s[stage]
            self.transfer_until_end_s[stage] = self.transfer_s[stage]


def _next(where: slice) -> slice:
    return slice(where.start + 1, where.stop + 1, 2)


def _from_on(part: Part, first: int) -> Part | None:
    """The part without what comes before ``first``."""
    dropped = max(0, (first - part.where.start + 1) // 2)
    start = part.where.start + 2 * dropped
    if start >= part.where.stop:
        return None
    return Part(slice(start, part.where.stop, 2), part.micro_batch + dropped * part.step, part.step)


def _holder_of(part: Part, micro_batch: int) -> int | None:
    """The stage of the part that handles a micro-batch."""
    position = (micro_batch - part.micro_batch) * part.step
    stage = int(part.where.start) + 2 * position
    return stage if position >= 0 and stage < part.where.stop else None


def _pick(table: FloatArray, part: Part) -> FloatArray:
    """Each stage's seconds for its micro-batch."""
    if table.shape[-1] == 1:
        return table[..., part.where, 0]
    stages: npt.NDArray[np.int64] = np.arange(part.where.start, part.where.stop, 2)
    return np.asarray(table[..., stages, part.micro_batch + part.step * np.arange(len(stages))])
