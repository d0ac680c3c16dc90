"""The paper's way to fewer stages: by memory alone (DynMo, section 3.4, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

from dynpipe_ds.repacking.decision import counts_text, joined, refuse_fewer
from dynpipe_ds.repacking.outcome import Refusal, Repacking, repacking
from dynpipe_ds.repacking.request import Request
from dynpipe_ds.repacking.survivors import possible_counts


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
    if target_stages is not None and (refusal := refuse_fewer(request, target_stages)) is not None:
        return refusal
    held = request.stage_bytes(request.current)
    fewest = len(_merge(held, cap, 1))
    wanted = max(fewest, min_stages, target_stages or 1)
    if target_stages is not None and fewest > target_stages:
        return Refusal(
            f"target_stages = {target_stages}: first fit with a cap of {cap:,} bytes reaches {fewest} stages from "
            f"stages that hold {joined(held)} bytes; raise the cap or the target, or use the method 'fewest_stages'"
        )
    counts = [n for n in possible_counts(request.workers, request.constraints) if n >= wanted]
    if not counts:
        return Refusal(
            f"memory_cap_bytes = {cap:,}: first fit finds no stages to merge down to at least {wanted} stages, "
            f"the stages hold {joined(held)} bytes{counts_text(request)}; raise the cap, or use the method "
            f"'fewest_stages'"
        )
    bins = _merge(held, cap, counts[0])
    return repacking(request, (*(request.current[first] for first in bins), request.current[-1]))


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
