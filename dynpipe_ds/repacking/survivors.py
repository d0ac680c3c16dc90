"""Which workers stay and where others join: a choice that keeps the release back-end's constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dynpipe_ds.release.base import Constraints

Score = Callable[[int, int], tuple[float, ...]]
"""``score(old stage, new stage)``: what keeping a stage is worth when it becomes that new stage; added up."""


@dataclass(frozen=True)
class Workers:
    """Where the stages run.

    Args:
        ranks: for each of the S stages its global ranks, one a data-parallel replica.
        nodes: the node of every global rank.
        positions: of every global rank, in the order in which the scheduler takes workers; empty: by rank.

    Raises:
        ValueError: the stages do not hold every rank once.
    """

    ranks: tuple[tuple[int, ...], ...]
    nodes: tuple[str, ...]
    positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(tuple(sorted(stage)) for stage in self.ranks))
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "positions", tuple(self.positions) or tuple(range(len(self.nodes))))
        held = sorted(rank for stage in self.ranks for rank in stage)
        if held != list(range(len(self.nodes))):
            raise ValueError(
                f"ranks = {self.ranks}, {len(self.nodes)} nodes: the stages must hold every rank from 0 to "
                f"{len(self.nodes) - 1} once"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return len(self.ranks)

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Global ranks of some stages, ascending."""
        return tuple(sorted(rank for stage in stages for rank in self.ranks[stage]))

    def free_nodes(self, survivors: Iterable[int]) -> tuple[str, ...]:
        """Nodes on which no rank is left when only some stages stay, in order of their first rank."""
        busy = {self.nodes[rank] for rank in self.ranks_of(survivors)}
        return tuple(dict.fromkeys(node for node in self.nodes if node not in busy))


def choose_survivors(
    workers: Workers, constraints: Constraints, num_stages: int, score: Score
) -> tuple[int, ...] | None:
    """The stages that stay: of all choices that keep the constraints, the one with the highest score.

    Stages on a common node go together when only whole nodes may go; such a group is a *unit*. Over the units in
    order, a dynamic program keeps the best choice for every number of stages kept so far, ``O(S n)``. That is exact
    as long as units do not interleave; where they do, a stage's new index is not known in the program, and the
    score is not looked at. Equal scores: the lowest stages.

    Args:
        workers: where the stages run.
        constraints: of the release back-end.
        num_stages: n, how many are to stay.
        score: what keeping a stage is worth.

    Returns:
        n stage indices, ascending; ``None`` if no choice keeps the constraints.
    """
    units = _units(workers, constraints)
    ordered = all(last[-1] < first[0] for last, first in zip(units, units[1:], strict=False))
    stay = _stages_that_stay(workers, constraints)
    if constraints.lowest_stay:
        return _lowest(workers, num_stages, units, stay)
    best: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {0: ((), ())}
    for unit in units:
        options = [] if stay & set(unit) else list(best.items())
        for kept, (loss, stages) in best.items():
            if kept + len(unit) <= num_stages:
                worth = [score(stage, kept + i) for i, stage in enumerate(unit)] if ordered else []
                losses = [tuple(-value for value in values) for values in worth]  # so that the least is the best
                options.append((kept + len(unit), (_add([loss, *losses]), (*stages, *unit))))
        best = {}
        for kept, option in options:
            best[kept] = min(option, best.get(kept, option))
    return tuple(sorted(best[num_stages][1])) if num_stages in best else None


def possible_counts(workers: Workers, constraints: Constraints) -> list[int]:
    """Numbers of stages below the present one that some choice of survivors allows.

    Returns:
        Ascending numbers, at least 1 each.
    """
    counts = range(1, workers.num_stages)
    return [n for n in counts if choose_survivors(workers, constraints, n, lambda old, new: ()) is not None]


def _units(workers: Workers, constraints: Constraints) -> list[tuple[int, ...]]:
    """Groups of stages that stay or go together, by their first stage."""
    groups: list[tuple[set[int], set[str]]] = []
    for stage, ranks in enumerate(workers.ranks):
        stages, nodes = {stage}, {workers.nodes[rank] for rank in ranks} if constraints.whole_nodes else set()
        for group in [g for g in groups if g[1] & nodes]:
            groups.remove(group)
            stages |= group[0]
            nodes |= group[1]
        groups.append((stages, nodes))
    return sorted(tuple(sorted(stages)) for stages, _ in groups)


def _stages_that_stay(workers: Workers, constraints: Constraints) -> set[int]:
    return {
        stage
        for stage, ranks in enumerate(workers.ranks)
        if any(rank in constraints.ranks_stay or workers.nodes[rank] in constraints.nodes_stay for rank in ranks)
    }


def _lowest(
    workers: Workers, num_stages: int, units: list[tuple[int, ...]], stay: set[int]
) -> tuple[int, ...] | None:
    """The stages with the lowest workers, if that is a choice at all."""
    placed = [sorted(workers.positions[rank] for rank in ranks) for ranks in workers.ranks]
    stages = sorted(range(workers.num_stages), key=lambda stage: placed[stage])
    kept, going = set(stages[:num_stages]), stages[num_stages:]
    whole = all(kept.issuperset(unit) or kept.isdisjoint(unit) for unit in units)
    has_gap = any(placed[stays][-1] >= placed[goes][0] for stays in kept for goes in going)
    if len(kept) < num_stages or not whole or not stay <= kept or has_gap:
        return None
    return tuple(sorted(kept))


def _add(losses: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    given = [loss for loss in losses if loss]
    return tuple(sum(column) for column in zip(*given, strict=True))
