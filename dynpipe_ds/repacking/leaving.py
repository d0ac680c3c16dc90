"""Which stages go on when some workers are about to be taken away: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from dynpipe_ds.partition import InfeasiblePartitionError
from dynpipe_ds.repacking.outcome import Refusal, Repacking, best_repacking, repacking
from dynpipe_ds.repacking.request import Request


def merged(current: Sequence[int], staying: Sequence[int]) -> tuple[int, ...]:
    """Boundaries on which each stage that stays takes over the layers of those behind it that go.

    Args:
        current: S + 1 layer indices.
        staying: n stages, ascending; those before the first are taken over by it.

    Returns:
        n + 1 layer indices.
    """
    return (current[0], *(current[stage] for stage in staying[1:]), current[-1])


def without(request: Request, going: Collection[int]) -> Repacking | Refusal:
    """Go on without some workers, whatever throughput that costs.

    A stage goes with all its replicas. Layers go where the best partition has them; where none keeps the caps, each
    stage takes over those behind it: the workers go in any case.

    Args:
        request: what to decide from; constraints are not looked at, since nothing is given back by choice.
        going: global ranks that are taken away.

    Returns:
        The shrink, or why there is none.
    """
    ranks = request.workers.ranks
    staying = [stage for stage, held in enumerate(ranks) if not set(held) & set(going)]
    text = f"ranks {', '.join(map(str, sorted(going)))} are to be taken away"
    if not any(0 in ranks[stage] for stage in staying):
        return Refusal(
            f"{text}: rank 0 can't leave a running job, since the others meet there; save a checkpoint in time"
        )
    only = replace(
        request, others=(),
        constraints=replace(
            request.constraints, lowest_stay=False, whole_nodes=False, nodes_stay=frozenset(),
            ranks_stay=frozenset(request.workers.ranks_of(staying)),
        ),
    )
    try:
        chosen = best_repacking(only, len(staying))
    except InfeasiblePartitionError:
        chosen = repacking(only, merged(request.current, staying))
    return replace(chosen, reason=f"{text}; {chosen.reason}")
