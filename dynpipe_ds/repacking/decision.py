"""How few stages suffice, which workers stay, and what that costs: pure functions.

:func:`fewest_stages` is this project's decision, :func:`to_stages` an order to be carried out, :func:`first_fit`
the paper's (DynMo, section 3.4, Algorithm 2). Each returns a :class:`Repacking` or a :class:`Refusal`, the same on
every rank that asks with the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dynpipe_ds.partition import InfeasiblePartitionError, optimal
from dynpipe_ds.repacking.request import Request
from dynpipe_ds.repacking.survivors import Score, choose_survivors, possible_counts


@dataclass(frozen=True)
class Repacking:
    """A shrink that keeps every rule; survivors become stages 0 to n - 1 in the order they had.

    Args:
        num_stages: n, fewer than before.
        boundaries: n + 1 layer indices.
        surviving_stages: indices of the present stages that stay, ascending.
        surviving_ranks: their global ranks, ascending; the i-th becomes rank i.
        released_ranks: global ranks that leave, ascending.
        released_nodes: nodes on which no rank is left.
        seconds_before: predicted seconds of a batch as it is.
        seconds_after: the same afterwards.
        stage_bytes: bytes that each of the n stages holds at its peak.
        reason: one sentence for a person.
    """

    num_stages: int
    boundaries: tuple[int, ...]
    surviving_stages: tuple[int, ...]
    surviving_ranks: tuple[int, ...]
    released_ranks: tuple[int, ...]
    released_nodes: tuple[str, ...]
    seconds_before: float
    seconds_after: float
    stage_bytes: tuple[int, ...]
    reason: str

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


def fewest_stages(request: Request, *, tolerance: float, min_stages: int = 1) -> Repacking | Refusal:
    """The smallest number of stages that keeps memory and, within a tolerance, throughput.

    For each number n, from the smallest on that could, the best partition is the one with the smallest bottleneck
    among those that keep the cap (:func:`dynpipe_ds.partition.optimal`), with memory in flight counted for n stages;
    the batch is predicted by the simulator with the same micro-batches. Fewer stages need not be slower: fill and
    drain shrink.

    Args:
        request: what to decide from.
        tolerance: largest share of predicted throughput that may be lost, from 0 up to 1.
        min_stages: fewest stages to shrink to.

    Returns:
        The shrink, or why the present number of stages is the fewest.
    """
    best: Repacking | None = None
    reason = ""
    for num_stages in range(max(_fewest_that_could(request, tolerance), min_stages), request.num_stages):
        found = to_stages(request, num_stages)
        if isinstance(found, Refusal):
            reason = reason or found.reason
        elif found.throughput_kept >= 1.0 - tolerance:
            return replace(found, reason=f"{found.reason}, the tolerance is {tolerance:.1%}")
        elif best is None or found.throughput_kept > best.throughput_kept:
            best = found
    if best is not None:
        return Refusal(
            f"tolerance = {tolerance}: no smaller number of stages keeps {1 - tolerance:.1%} of the throughput, "
            f"{best.num_stages} would keep {best.throughput_kept:.1%}; raise the tolerance or give a target"
        )
    return Refusal(reason or f"min_stages = {min_stages}: the pipeline has {request.num_stages}; lower min_stages")


def to_stages(request: Request, num_stages: int) -> Repacking | Refusal:
    """Shrink to exactly so many stages, whatever throughput it costs.

    Which workers stay: of those that the constraints allow, the choice that moves the fewest bytes; where workers
    differ in speed or memory, the fastest, then those with the most memory.

    Args:
        request: what to decide from.
        num_stages: n, at least 1 and fewer than now.

    Returns:
        The shrink, or why it can't be.
    """
    refusal = _refuse_count(request, num_stages)
    if refusal is not None:
        return refusal
    try:
        boundaries = _best_partition(request, num_stages)
    except InfeasiblePartitionError as error:
        return Refusal(f"num_stages = {num_stages}: {error}{_next_hint(request, num_stages)}")
    return _repacking(request, boundaries)


def first_fit(request: Request, *, target_stages: int | None = None, min_stages: int = 1) -> Repacking | Refusal:
    """First-fit consolidation by memory (DynMo, section 3.4, Algorithm 2), kept contiguous.

    The algorithm gives all layers of one worker to the first other worker where both together fit, until nothing
    fits or the target is reached. Kept contiguous, only the stage before can take a stage: from the first stage on,
    each takes over the next ones while their bytes fit. For merging whole stages that is the fewest possible.

    Bytes are those that the stages hold now. The paper adds them up, although fewer stages hold fewer micro-batches
    in flight: the sum is never too small, but may refuse what would fit (``fewest_stages`` counts anew). Throughput
    is not looked at.

    Args:
        request: what to decide from; with one cap for all stages.
        target_stages: where to stop; ``None``: when nothing fits any more.
        min_stages: fewest stages to shrink to.

    Returns:
        The shrink, or why there is none.
    """
    cap = request.memory_cap_bytes
    if not isinstance(cap, int):
        return Refusal(
            f"memory_cap_bytes = {cap}: first fit needs one cap for all stages; give one number, or use the method "
            f"'fewest_stages'"
        )
    if target_stages is not None and (refusal := _refuse_count(request, target_stages)) is not None:
        return refusal
    held = request.stage_bytes(request.current)
    fewest = len(_merge(held, cap, 1))
    wanted = max(fewest, min_stages, target_stages or 1)
    if target_stages is not None and fewest > target_stages:
        return Refusal(
            f"target_stages = {target_stages}: first fit with a cap of {cap:,} bytes reaches {fewest} stages from "
            f"stages that hold {_join(held)} bytes; raise the cap or the target, or use the method 'fewest_stages'"
        )
    counts = [n for n in possible_counts(request.workers, request.constraints) if n >= wanted]
    if not counts:
        return Refusal(
            f"memory_cap_bytes = {cap:,}: first fit finds no stages to merge down to at least {wanted} stages, "
            f"the stages hold {_join(held)} bytes{_counts_text(request)}; raise the cap, or use the method "
            f"'fewest_stages'"
        )
    bins = _merge(held, cap, counts[0])
    return _repacking(request, (*(request.current[first] for first in bins), request.current[-1]))


def _fewest_that_could(request: Request, tolerance: float) -> int:
    """The smallest number of stages that would keep the throughput in perfect balance, without fill and drain."""
    profile = request.profile
    busy_s = profile.num_micro_batches * math.fsum(profile.costs("time"))
    longest_s = request.batch_s(request.current, range(request.num_stages)) / (1.0 - tolerance)
    speeds = sorted(request.stage_speeds or [1.0] * request.num_stages, reverse=True)
    for num_stages, speed in enumerate(accumulate(speeds[:-1]), start=1):
        if busy_s / speed <= longest_s * (1 + 1e-9):  # sums round
            return num_stages
    return max(1, request.num_stages - 1)


def _merge(held: Sequence[int], cap: int, num_stages: int) -> list[int]:
    """First stage of every bin; bins are filled in order, until as few as asked for are left."""
    bins, used = [0], held[0]
    for stage, size in enumerate(held[1:], start=1):
        left_as_they_are = len(held) - stage
        if used + size <= cap and len(bins) + left_as_they_are > num_stages:
            used += size
        else:
            bins.append(stage)
            used = size
    return bins


def _refuse_count(request: Request, num_stages: int) -> Refusal | None:
    if not 1 <= num_stages < request.num_stages:
        return Refusal(
            f"num_stages = {num_stages}: re-packing makes the {request.num_stages} stages fewer; give a number from 1 "
            f"to {request.num_stages - 1}"
            if request.num_stages > 1
            else f"num_stages = {num_stages}: there is one stage, nothing can be given back"
        )
    if choose_survivors(request.workers, request.constraints, num_stages, lambda old, new: ()) is None:
        return Refusal(f"num_stages = {num_stages}: {_constraints_text(request)}{_counts_text(request)}")
    return None


def _constraints_text(request: Request) -> str:
    rules = request.constraints
    told = {
        f"ranks {_join(sorted(rules.ranks_stay))} must stay": bool(rules.ranks_stay),
        f"nodes {_join(sorted(rules.nodes_stay))} must stay": bool(rules.nodes_stay),
        f"only whole nodes may go ({_join(request.workers.nodes)} by rank)": rules.whole_nodes,
        "the lowest ranks must stay": rules.lowest_stay,
    }
    return "the release back-end can't give back the others: " + "; ".join(text for text in told if told[text])


def _counts_text(request: Request) -> str:
    counts = possible_counts(request.workers, request.constraints)
    if not counts:
        return "; with these constraints no worker can go"
    return f"; numbers of stages that can be reached: {_join(counts)}"


def _next_hint(request: Request, above: int) -> str:
    """The next number of stages that memory allows."""
    for num_stages in possible_counts(request.workers, request.constraints):
        if num_stages > above:
            try:
                _best_partition(request, num_stages)
            except InfeasiblePartitionError:
                continue
            return f"; the next number of stages for which memory suffices is {num_stages}"
    return f"; memory suffices for no number from there to the present {request.num_stages} stages"


def _best_partition(request: Request, num_stages: int) -> tuple[int, ...]:
    workers = _best_workers(request, num_stages) if request.workers_differ else range(num_stages)
    plan = optimal(
        request.profile.costs("time"), num_stages, memory=request.memory(workers), pinned=request.pinned,
        speeds=request.speeds(workers),
    )
    return plan.boundaries


def _best_workers(request: Request, num_stages: int) -> tuple[int, ...]:
    """The fastest workers that may stay, then those with the most memory."""
    cap = request.memory_cap_bytes

    def speed_and_memory(old: int, new: int) -> tuple[float, ...]:
        speed = request.stage_speeds[old] if request.stage_speeds is not None else 1.0
        return speed, cap[old] if isinstance(cap, Sequence) else 0

    return _choose(request, num_stages, speed_and_memory)


def _nearest_workers(request: Request, boundaries: Sequence[int]) -> tuple[int, ...]:
    """The workers that already hold the most bytes of what they shall hold."""
    until = list(accumulate(request.profile.moved_bytes(), initial=0))

    def bytes_in_place(old: int, new: int) -> tuple[float, ...]:
        first = max(request.current[old], boundaries[new])
        end = min(request.current[old + 1], boundaries[new + 1])
        return (until[end] - until[first] if first < end else 0,)

    return _choose(request, len(boundaries) - 1, bytes_in_place)


def _choose(request: Request, num_stages: int, score: Score) -> tuple[int, ...]:
    survivors = choose_survivors(request.workers, request.constraints, num_stages, score)
    assert survivors is not None, "the count was checked"
    return survivors


def _repacking(request: Request, boundaries: tuple[int, ...]) -> Repacking:
    workers, num_stages = request.workers, len(boundaries) - 1
    if request.workers_differ:
        survivors = _best_workers(request, num_stages)
    else:
        survivors = _nearest_workers(request, boundaries)
    ranks = workers.ranks_of(survivors)
    shrink = Repacking(
        num_stages=num_stages,
        boundaries=boundaries,
        surviving_stages=survivors,
        surviving_ranks=ranks,
        released_ranks=tuple(rank for rank in range(len(workers.nodes)) if rank not in set(ranks)),
        released_nodes=workers.free_nodes(survivors),
        seconds_before=request.batch_s(request.current, range(request.num_stages)),
        seconds_after=request.batch_s(boundaries, survivors),
        stage_bytes=request.stage_bytes(boundaries),
        reason="",
    )
    return replace(shrink, reason=(
        f"{request.num_stages} -> {num_stages} stages keep {shrink.throughput_kept:.1%} of the predicted throughput "
        f"with at most {max(shrink.stage_bytes):,} bytes a stage"
    ))


def _join(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
