"""Who runs which stage without the ranks that were lost, and who holds their layers; pure.

If the number of replicas stays, the bits stay. A stage is left as it is if all its ranks live then. Ranks that are left
of other stages form stages together, each as the replica that it was, or as another one if the data of every replica
can be read everywhere. With fewer replicas the pipeline can stay as long as it was. Who is left over is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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

    @property
    def size(self) -> int:
        """Ranks of each stage."""
        return len(self.rows[0])


class Fewer(NamedTuple):
    """Whether there may be fewer replicas.

    Attributes:
        numbers: of replicas, the largest first.
        is_first: whether that is better than fewer stages.
        why_not: why there are no numbers, with the remedy; empty if there are.
    """

    numbers: tuple[int, ...] = ()
    is_first: bool = False
    why_not: str = ""


def seated(
    stages: Sequence[Sequence[int]], living: Collection[int], *, reads_any: bool = False, fewer: Fewer | None = None,
    fits: Callable[[Seating], bool] = lambda _: True,
) -> Seating:
    """Find a place for the ranks that are left.

    Args:
        stages: ranks of each stage, by their places.
        living: ranks that are left.
        reads_any: whether every rank can read the data of any replica.
        fewer: whether there may be fewer replicas; ``None``: there may not.
        fits: whether their layers then fit into their memory, as far as is known; if they nowhere do, it is tried.

    Raises:
        CantGoOnError: if there is no place for them, with the remedy.
    """
    if not any(set(ranks) & set(living) for ranks in stages):
        raise CantGoOnError("no stage is left")
    fewer = fewer or Fewer()
    found = list(_seatings(stages, living, reads_any=reads_any, fewer=fewer))
    if found:
        return next(filter(fits, found), found[0])
    replicas, number = len(stages[0]), len(living)
    why = "those that are left of each would have to read the data of other replicas; say how by engine.data_at"
    if number < replicas:
        what = fewer.why_not if reads_any or not fewer.numbers else "say by engine.data_at how to read other data"
        why = f"{number} ranks are left for {replicas} replicas; load the checkpoint on fewer replicas"
        why = f"{why}, or next time {what}" if what else why
    raise CantGoOnError(f"of every stage some replica is lost, and {why}")


def _seatings(
    stages: Sequence[Sequence[int]], living: Collection[int], *, reads_any: bool, fewer: Fewer
) -> Iterator[Seating]:
    """All places that are known, the best first."""
    same = _seating(_rows(stages, living, reads_any=reads_any), living)
    found = [_seating(_shorter_rows(stages, living, size), living) for size in fewer.numbers if reads_any]
    as_long = [one for one in found if fewer.is_first and one is not None and len(one.rows) == len(stages)]
    yield from (one for one in (*as_long, same, *(one for one in found if one not in as_long)) if one is not None)


def _seating(rows: dict[int, tuple[int, ...]], living: Collection[int]) -> Seating | None:
    if not rows:
        return None
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


def _shorter_rows(
    stages: Sequence[Sequence[int]], living: Collection[int], size: int
) -> dict[int, tuple[int, ...]]:
    """As many stages with fewer replicas as can be; ranks stay where they are if they can."""
    left = [[rank for rank in ranks if rank in living] for ranks in stages]
    number = min(len(stages), len(living) // size)
    fullest = sorted(range(len(stages)), key=lambda stage: (-min(len(left[stage]), size), stage))
    rows = {stage: left[stage][:size] for stage in sorted(fullest[:number])}
    used = {rank for row in rows.values() for rank in row}
    others = iter(rank for ranks in left for rank in ranks if rank not in used)
    return {stage: (*row, *(next(others) for _ in range(size - len(row)))) for stage, row in rows.items()}


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
