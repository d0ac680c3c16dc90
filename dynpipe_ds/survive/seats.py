"""Who runs which stage without the ranks that were lost, and who holds their layers; pure.

The number of replicas stays, because then the bits stay: a stage is left as it is if all its ranks live. Ranks that are
left of other stages form stages together, each as the replica that it was, or as another one if the data of every
replica can be read everywhere. Who is left over is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class CantGoOnError(RuntimeError):
    """The ranks that are left can't go on; the message says why. They end as without ``survive``."""


class Seating(NamedTuple):
    """Where ranks go on.

    Attributes:
        rows: former ranks of each stage, by their places in it: replicas, in their order.
        origins: of each stage the former one whose layers it keeps, ascending.
        leftover: ranks that live and have no place, ascending.
    """

    rows: tuple[tuple[int, ...], ...]
    origins: tuple[int, ...]
    leftover: tuple[int, ...]


def seated(stages: Sequence[Sequence[int]], living: Collection[int], *, reads_any: bool = False) -> Seating:
    """Find a place for the ranks that are left.

    Args:
        stages: ranks of each stage, by their places.
        living: ranks that are left.
        reads_any: whether every rank can read the data of any replica.

    Raises:
        CantGoOnError: if there is no place for them, with the remedy.
    """
    if not any(set(ranks) & set(living) for ranks in stages):
        raise CantGoOnError("no stage is left")
    rows = _rows(stages, living, reads_any=reads_any)
    if not rows:
        replicas, number = len(stages[0]), len(living)
        why = "those that are left of each would have to read the data of other replicas; say how by engine.data_at"
        if number < replicas:
            why = f"{number} ranks are left for {replicas} replicas; load the checkpoint on fewer replicas"
        raise CantGoOnError(f"of every stage some replica is lost, and {why}")
    used = {rank for row in rows.values() for rank in row}
    origins = tuple(sorted(rows))
    return Seating(tuple(rows[stage] for stage in origins), origins, tuple(sorted(set(living) - used)))


def _rows(
    stages: Sequence[Sequence[int]], living: Collection[int], *, reads_any: bool
) -> dict[int, tuple[int, ...]]:
    """Full stages, by the former one whose place they take."""
    rows = {stage: tuple(ranks) for stage, ranks in enumerate(stages) if set(ranks) <= set(living)}
    left = [
        (stage, place, rank) for stage, ranks in enumerate(stages) if stage not in rows
        for place, rank in enumerate(ranks) if rank in living
    ]
    size = len(stages[0])
    by_place = [[one for one in left if one[1] == place] for place in range(size)]
    for row in zip(*by_place, strict=False):  # each stays the replica that it was
        rows[min(stage for stage, _, _ in row if stage not in rows)] = tuple(rank for _, _, rank in row)
        left = [one for one in left if one not in row]
    while len(left) >= size:
        row = tuple(left[:size])
        origin = min((stage for stage, _, _ in row if stage not in rows), default=None)
        if origin is None or not (reads_any or (rows and min(rows) < origin < max(rows))):  # the ends read data
            break
        rows[origin], left = tuple(rank for _, _, rank in row), left[size:]
    return rows


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
