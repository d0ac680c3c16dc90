"""Which stages there are without the ranks that were lost, and who holds their layers; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class CantGoOnError(RuntimeError):
    """The ranks that are left can't go on; the message says why. They end as without ``survive``."""


def staying_stages(stages: Sequence[Sequence[int]], living: Collection[int]) -> list[int]:
    """The stages of which every rank lives.

    Args:
        stages: ranks of each stage, one for each replica.
        living: ranks that are left.

    Raises:
        CantGoOnError: if a stage with a lost rank also has one that lives, or no stage stays.
    """
    halves = [stage for stage, ranks in enumerate(stages) if 0 < len(set(ranks) & set(living)) < len(ranks)]
    if halves:
        raise CantGoOnError(
            f"of stage {halves[0]} some replicas are lost and some live, and a pipeline whose stages have different "
            "numbers of replicas can't run; go on from a checkpoint with other replicas or stages"
        )
    staying = [stage for stage, ranks in enumerate(stages) if set(ranks) & set(living)]
    if not staying:
        raise CantGoOnError("no stage is left")
    return staying


def without_stages(boundaries: Sequence[int], staying: Sequence[int], pinned: Collection[int]) -> tuple[int, ...]:
    """Boundaries of the shorter pipeline: the layers of a stage that is lost go to its neighbours, half to each.

    Nothing else moves; where the new cut pays off less than another, the balancer moves it later.

    Args:
        boundaries: of the present stages, ``S + 1``.
        staying: stages that are left, ascending, at least one.
        pinned: cuts that must not be.

    Returns:
        ``len(staying) + 1`` boundaries.
    """
    found = [boundaries[0]]
    for before, after in zip(staying, staying[1:], strict=False):
        first, last = boundaries[before + 1], boundaries[after]
        allowed = [cut for cut in range(first, last + 1) if cut not in pinned or cut in (first, last)]
        found.append(min(allowed, key=lambda cut: (abs(2 * cut - first - last), cut)))
    return (*found, boundaries[-1])
