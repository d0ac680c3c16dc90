"""One partitioning request, in exact arithmetic and with pinned layers merged.

Every partitioner works on a :class:`Problem` that ``prepare`` has checked and built. Layers that
pinned cuts hold together become one *group*; a partitioner cuts between groups and never sees a
forbidden cut. Costs become integers (times a power of two), so that sums are exact, do not depend
on their order, and two partitions compare the same way on every rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dynpipe_ds.partition.plan import InfeasiblePartitionError, Plan


@dataclass(frozen=True)
class Problem:
    """A checked request; ``K`` groups of layers on ``S`` stages.

    Attributes:
        costs: Cost of every layer as it was given.
        starts: ``K + 1`` layer indices; group ``k`` holds ``starts[k] <= layer < starts[k + 1]``.
        num_stages: ``S``.
        load: Prefix sums of the groups' integer costs, ``K + 1`` entries.
        scale_bits: A cost is its integer times ``2 ** -scale_bits``.
        speeds: Relative speed of every stage.
        allow_empty: Whether a stage may hold no layer.
        current: The partition now in use, in layers; None when there is none.
        bottleneck_before: The bottleneck of ``current``; None when unknown.
        layer_bytes: Prefix sums of the layers' bytes, ``L + 1`` entries; None when unknown.
        caps: Bytes that every stage may hold; empty when memory is not limited.
        in_flight: Micro-batches in flight on every stage; empty likewise.
        state: Prefix sums of the groups' state bytes; empty likewise.
        activation: Prefix sums of the groups' activation bytes; empty likewise.
    """

    costs: tuple[float, ...]
    starts: tuple[int, ...]
    num_stages: int
    load: list[int]
    scale_bits: int
    speeds: tuple[float, ...]
    allow_empty: bool
    current: tuple[int, ...] | None = None
    bottleneck_before: float | None = None
    layer_bytes: list[int] | None = None
    caps: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    state: list[int] = field(default_factory=list)
    activation: list[int] = field(default_factory=list)

    @property
    def num_groups(self) -> int:
        """Number of groups ``K``."""
        return len(self.starts) - 1

    @property
    def group_costs(self) -> list[int]:
        """Integer cost of every group."""
        return [end - first for first, end in pairwise(self.load)]

    def stage_loads(self, cuts: Sequence[int]) -> list[float]:
        """Integer costs of the stages of a partition of the groups, divided by their speeds."""
        return stage_loads(self.load, cuts, self.speeds)

    def thresholds(self, limit: float) -> list[int]:
        """Largest integer cost of every stage whose time stays within ``limit``.

        Exact for the rounded quotient ``cost / speed`` that :meth:`stage_loads` compares.
        """
        total = self.load[-1]
        per_speed = {speed: _threshold(limit, speed, total) for speed in set(self.speeds)}
        return [per_speed[speed] for speed in self.speeds]

    def stage_bytes(self, stage: int, first: int, end: int) -> int:
        """Bytes that groups ``first`` to ``end - 1`` need on a stage."""
        return (
            self.state[end]
            - self.state[first]
            + self.in_flight[stage] * (self.activation[end] - self.activation[first])
        )

    def fits(self, stage: int, first: int, end: int) -> bool:
        """Whether groups ``first`` to ``end - 1`` keep the cap of a stage."""
        return not self.caps or self.stage_bytes(stage, first, end) <= self.caps[stage]

    def furthest_end(self, stage: int, first: int, end: int) -> int:
        """Largest cut up to ``end`` such that the stage, from ``first``, keeps its cap."""
        if self.fits(stage, first, end):
            return end
        room = self.caps[stage]
        more = bisect_right(
            range(first + 1, end + 1), room, key=lambda cut: self.stage_bytes(stage, first, cut)
        )
        return first + more

    def earliest_start(self, stage: int, first: int, end: int) -> int:
        """Smallest cut from ``first`` on such that the stage, up to ``end``, keeps its cap."""
        if self.fits(stage, first, end):
            return first
        room = -self.caps[stage]
        return first + bisect_left(
            range(first, end), room, key=lambda cut: -self.stage_bytes(stage, cut, end)
        )

    def snap(self, boundaries: Sequence[int]) -> list[int]:
        """Nearest partition of the groups: every cut at the nearest allowed position."""
        cuts = []
        for boundary in boundaries:
            right = bisect_left(self.starts, boundary)
            left = right - 1
            nearer_left = (
                self.starts[right] != boundary
                and boundary - self.starts[left] <= self.starts[right] - boundary
            )
            cuts.append(left if nearer_left else right)
        return cuts

    def plan(self, cuts: Sequence[int], rounds: int = 0) -> Plan:
        """Turn a partition of the groups into a plan for the layers."""
        boundaries = tuple(self.starts[cut] for cut in cuts)
        bottleneck = math.ldexp(max(self.stage_loads(cuts)), -self.scale_bits)
        return Plan(
            boundaries=boundaries,
            bottleneck=bottleneck,
            bottleneck_before=self.bottleneck_before,
            bytes_to_move=self._bytes_to_move(boundaries),
            rounds=rounds,
        )

    def _bytes_to_move(self, boundaries: tuple[int, ...]) -> int:
        if self.current is None or self.layer_bytes is None:
            return 0
        kept = 0
        # A stage keeps its worker: stage s before is stage s after.
        for old_first, old_end, new_first, new_end in zip(
            self.current, self.current[1:], boundaries, boundaries[1:], strict=False
        ):
            first = max(old_first, new_first)
            kept += self.layer_bytes[max(first, min(old_end, new_end))] - self.layer_bytes[first]
        return self.layer_bytes[-1] - kept

    def require_fit(self, cuts: Sequence[int], name: str) -> None:
        """Refuse a partition of the groups that exceeds a cap.

        Raises:
            InfeasiblePartitionError: A stage needs more than its cap.
        """
        for stage, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            if not self.fits(stage, first, end):
                raise InfeasiblePartitionError(
                    f"{name}: stage {stage} with layers {self.starts[first]} to "
                    f"{self.starts[end] - 1} needs {self.stage_bytes(stage, first, end):,} bytes, "
                    f"its cap is {self.caps[stage]:,}; the partitioner 'optimal' cuts within the "
                    "caps where that is possible, or raise the cap"
                )


def stage_loads(load: Sequence[int], cuts: Sequence[int], speeds: Sequence[float]) -> list[float]:
    """Costs of the stages of a partition, divided by their speeds.

    Args:
        load: Prefix sums of the costs.
        cuts: ``S + 1`` indices of these.
        speeds: Of every stage.
    """
    return [(load[end] - load[first]) / speed for (first, end), speed in zip(pairwise(cuts), speeds, strict=True)]


def _threshold(limit: float, speed: float, total: int) -> int:
    if total / speed <= limit:
        return total
    load = min(int(limit * speed), total)
    while load / speed > limit:
        load -= 1
    while (load + 1) / speed <= limit:
        load += 1
    return load
