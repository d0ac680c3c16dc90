"""What a re-packing decision says, and how it is put together from a partition: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dynpipe_ds.partition import InfeasiblePartitionError, optimal
from dynpipe_ds.placement import present_stage
from dynpipe_ds.repacking.request import Holders, Request
from dynpipe_ds.repacking.survivors import Score, choose_survivors

LEAST_SAVING = 0.02
"""Another number of micro-batches must save more than this share of a batch: predictions are off by as much."""


@dataclass(frozen=True)
class Repacking:
    """Another number of stages, with every rule kept; workers that stay keep the order they had.

    Args:
        num_stages: n, fewer or more than before.
        boundaries: n + 1 layer indices.
        holders: for each of the n stages the present stage whose workers run it; ``None``: workers that wait.
        num_micro_batches: M, of a batch.
        surviving_ranks: global ranks that stay, ascending.
        released_ranks: global ranks that leave, ascending.
        released_nodes: nodes on which no rank is left.
        seconds_before: predicted seconds of a batch as it is.
        seconds_after: the same afterwards.
        stage_bytes: bytes that each of the n stages holds at its peak.
        reason: one sentence for a person.
    """

    num_stages: int
    boundaries: tuple[int, ...]
    holders: tuple[int | None, ...]
    num_micro_batches: int
    surviving_ranks: tuple[int, ...]
    released_ranks: tuple[int, ...]
    released_nodes: tuple[str, ...]
    seconds_before: float
    seconds_after: float
    stage_bytes: tuple[int, ...]
    reason: str

    @property
    def surviving_stages(self) -> tuple[int, ...]:
        """Indices of the present stages that stay, ascending."""
        return tuple(holder for holder in self.holders if holder is not None)

    @property
    def joining_stages(self) -> tuple[int, ...]:
        """Indices of the new stages that workers run which wait now, ascending."""
        return tuple(stage for stage, holder in enumerate(self.holders) if holder is None)

    @property
    def throughput_kept(self) -> float:
        """Predicted throughput as a share of the present one; 1 when nothing takes any time."""
        return self.seconds_before / self.seconds_after if self.seconds_after else 1.0


@dataclass(frozen=True)
class Refusal:
    """Why nothing is to be done.

    Args:
        reason: value, rule and remedy.
    """

    reason: str


def best_repacking(request: Request, num_stages: int) -> Repacking:
    """The best that a number of stages can do: partition and number of micro-batches.

    The partition is the one with the smallest bottleneck among those that keep the cap
    (:func:`dynpipe_ds.partition.optimal`), with memory in flight counted for n stages. Another number of micro-batches
    must save a share of more than :data:`LEAST_SAVING`.

    Args:
        request: what to decide from.
        num_stages: n; a choice of workers allows it.

    Raises:
        InfeasiblePartitionError: no partition keeps the caps and the pinned cuts.
    """
    found: list[Repacking] = []
    refused: list[InfeasiblePartitionError] = []
    for asked in (request, *request.alternatives()):
        try:
            found.append(repacking(asked, _best_partition(asked, num_stages)))
        except InfeasiblePartitionError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    fastest = min(found, key=lambda one: one.seconds_after)
    has_usual = found[0].num_micro_batches == request.profile.num_micro_batches
    best = found[0] if has_usual and found[0].seconds_after * (1.0 - LEAST_SAVING) <= fastest.seconds_after else fastest
    best = replace(best, seconds_before=request.batch_s(request.current, range(request.num_stages)))
    return replace(best, reason=_reason(request, best))


def repacking(request: Request, boundaries: tuple[int, ...]) -> Repacking:
    """Put a partition on workers: those that stay, and those that join.

    Where workers are alike, those stay that leave the fewest bytes to be moved. Where they differ in speed or memory,
    the fastest stay, then those with the most memory. Who joins comes before the last stage, which goes on reading
    labels.

    Args:
        request: what to decide from.
        boundaries: n + 1 layer indices; a choice of workers allows n stages.
    """
    workers, num_stages = request.workers, len(boundaries) - 1
    if request.workers_differ:
        holders = _best_workers(request, num_stages)
    else:
        holders = _choose(request, num_stages, _bytes_in_place(request, boundaries))
    ranks = workers.ranks_of(holder for holder in holders if holder is not None)
    found = Repacking(
        num_stages=num_stages,
        boundaries=boundaries,
        holders=holders,
        num_micro_batches=request.profile.num_micro_batches,
        surviving_ranks=ranks,
        released_ranks=tuple(rank for rank in range(len(workers.nodes)) if rank not in set(ranks)),
        released_nodes=workers.free_nodes(holder for holder in holders if holder is not None),
        seconds_before=request.batch_s(request.current, range(request.num_stages)),
        seconds_after=request.batch_s(boundaries, holders),
        stage_bytes=request.stage_bytes(boundaries),
        reason="",
    )
    return replace(found, reason=_reason(request, found))


def _reason(request: Request, found: Repacking) -> str:
    share = found.throughput_kept
    does = f"keep {share:.1%}" if found.num_stages < request.num_stages else f"have {share:.1%}"
    sized = f" in {found.num_micro_batches} micro-batches" if request.others else ""
    return (
        f"{request.num_stages} -> {found.num_stages} stages {does} of the predicted throughput{sized} "
        f"with at most {max(found.stage_bytes):,} bytes a stage"
    )


def _best_partition(request: Request, num_stages: int) -> tuple[int, ...]:
    alike = num_stages < request.num_stages and not request.workers_differ
    holders: Holders = tuple(range(num_stages)) if alike else _best_workers(request, num_stages)
    plan = optimal(
        request.profile.costs("time"), num_stages, memory=request.memory(holders), pinned=request.pinned,
        speeds=request.speeds(holders),
    )
    return plan.boundaries


def _best_workers(request: Request, num_stages: int) -> tuple[int | None, ...]:
    """The fastest workers that may stay, then those with the most memory."""
    cap = request.memory_cap_bytes

    def speed_and_memory(old: int, new: int) -> tuple[float, ...]:
        speed = request.stage_speeds[old] if request.stage_speeds is not None else 1.0
        return speed, cap[old] if isinstance(cap, Sequence) else 0

    return _choose(request, num_stages, speed_and_memory)


def _bytes_in_place(request: Request, boundaries: Sequence[int]) -> Score:
    """How many bytes of what a stage shall hold its workers hold already."""
    until = list(accumulate(request.profile.moved_bytes(), initial=0))

    def bytes_in_place(old: int, new: int) -> tuple[float, ...]:
        first = max(request.current[old], boundaries[new])
        end = min(request.current[old + 1], boundaries[new + 1])
        return (until[end] - until[first] if first < end else 0,)

    return bytes_in_place


def _choose(request: Request, num_stages: int, score: Score) -> tuple[int | None, ...]:
    if num_stages >= request.num_stages:
        return tuple(present_stage(stage, request.num_stages, num_stages) for stage in range(num_stages))
    survivors = choose_survivors(request.workers, request.constraints, num_stages, score)
    assert survivors is not None, "the count was checked"
    return survivors
