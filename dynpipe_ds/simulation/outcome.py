"""What a simulated batch took: values, with units in their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from dynpipe_ds.simulation.workload import Workload

Kind = Literal["load", "forward", "backward", "weight", "send", "recv", "wait", "step", "migration", "message"]
Payload = Literal["", "activation", "gradient"]


class Interval(NamedTuple):
    """One stretch of one stage's time, or of a message's.

    Attributes:
        stage: index of the stage; of a message, of the one that sends it.
        kind: what the stage does; ``"weight"`` is the part of a backward that was left for later, ``"wait"`` is idle
            before a message, ``"send"`` and ``"recv"`` are what the stage itself spends on one. A ``"message"`` is
            under way to the next or the previous stage, while its sender does something else.
        micro_batch: of what; -1 where it is of none or of several. ``"load"`` and ``"migration"`` are in no simulated
            batch.
        start_s: seconds from the start of the batch.
        end_s: the same, at least ``start_s``.
        payload: what a message carries, or is waited for; empty for computation.
    """

    stage: int
    kind: Kind
    micro_batch: int
    start_s: float
    end_s: float
    payload: Payload = ""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class StageOutcome:
    """One stage during the batch.

    ``fill_s + busy_s + waiting_s + transfer_s + drain_s`` is the makespan.

    Args:
        busy_s: computing forwards and backwards, in one part or two.
        fill_s: before its first forward.
        waiting_s: between its first and last computation, idle until a neighbour is ready.
        transfer_s: the same, while a message travels that it sends or receives.
        drain_s: from its last computation to the last one of any stage.
        step_s: reduction and optimizer step.
        peak_micro_batches: most micro-batches between forward and the end of their backward.
        peak_activation_bytes: most bytes that these hold.
    """

    busy_s: float
    fill_s: float
    waiting_s: float
    transfer_s: float
    drain_s: float
    step_s: float
    peak_micro_batches: int
    peak_activation_bytes: int

    @property
    def idle_s(self) -> float:
        """All that is not computing, up to the makespan."""
        return self.fill_s + self.waiting_s + self.transfer_s + self.drain_s

    @property
    def bubble_ratio(self) -> float:
        """Idle share of the makespan; 0 when the stage did nothing at all."""
        total_s = self.idle_s + self.busy_s
        return self.idle_s / total_s if total_s else 0.0


@dataclass(frozen=True)
class Simulation:
    """One batch.

    Args:
        makespan_s: start of the first forward to the end of the last backward.
        batch_s: the same to the end of the last optimizer step.
        stages: S stages.
        timeline: what all stages do, intervals of positive length, stage by stage, each in order of time; then all
            messages, which may take no time. Empty unless asked for.
    """

    makespan_s: float
    batch_s: float
    stages: tuple[StageOutcome, ...]
    timeline: tuple[Interval, ...] = ()

    @property
    def bubble_ratio(self) -> float:
        """Mean of the stages' bubble ratios."""
        return fmean(stage.bubble_ratio for stage in self.stages)


class Counted(NamedTuple):
    """What an engine counts of a stage: as in :class:`StageOutcome`, and two moments.

    Attributes:
        busy_s: see there.
        fill_s: see there.
        waiting_s: see there.
        transfer_s: see there.
        compute_end_s: end of the last computation.
        clock_s: end of the last instruction.
    """

    busy_s: float
    fill_s: float
    waiting_s: float
    transfer_s: float
    compute_end_s: float
    clock_s: float


class Held(NamedTuple):
    """Most that a stage holds at a time.

    Attributes:
        micro_batches: between forward and the end of their backward.
        activation_bytes: of these.
    """

    micro_batches: int
    activation_bytes: int


def account(
    workload: Workload, counted: Sequence[Counted], held: Sequence[Held], timeline: tuple[Interval, ...] = ()
) -> Simulation:
    """Put together what was counted of every stage.

    Args:
        workload: the stages' steps and bytes.
        counted: of every stage.
        held: the most that every stage holds.
        timeline: intervals of all stages.
    """
    makespan_s = max(stage.compute_end_s for stage in counted)
    steps_s = workload.step_s.tolist()
    return Simulation(
        makespan_s=makespan_s,
        batch_s=max(stage.clock_s + step_s for stage, step_s in zip(counted, steps_s, strict=True)),
        stages=tuple(
            StageOutcome(*stage[:4], makespan_s - stage.compute_end_s, step_s, *peak)
            for stage, step_s, peak in zip(counted, steps_s, held, strict=True)
        ),
        timeline=timeline,
    )
