"""Which stage holds each layer, as a value; and the rules of boundaries, its usual form.

Pure: nothing here knows of ranks, devices or DeepSpeed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """Which stage holds each layer.

    The layers are cut into chunks, ranges that follow each other, and each chunk is on one stage. In a *partition*,
    the contiguous case, stage s holds chunk s and nothing else: then the cuts are its ``S + 1`` boundaries. Only
    partitions run today; a stage with several chunks can be described, compared and stored.

    Args:
        cuts: one layer index more than there are chunks; chunk c holds ``cuts[c] <= layer < cuts[c + 1]``.
        holders: stage of each chunk; a stage without layers holds an empty chunk.

    Raises:
        ValueError: when the cuts don't rise from 0, or the stages are not ``0 ... S - 1``.
    """

    cuts: tuple[int, ...]
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", plain_ints("cuts", self.cuts))
        object.__setattr__(self, "holders", plain_ints("holders", self.holders))
        if not _rises_from_zero(self.cuts) or len(self.holders) != len(self.cuts) - 1:
            raise ValueError(
                f"placement with cuts = {self.cuts}, holders = {self.holders}: cuts must rise from 0 to the number of "
                "layers, and there must be one holder for each range between two cuts"
            )
        if set(self.holders) != set(range(self.num_stages)):
            raise ValueError(
                f"placement with holders = {self.holders}: must name each stage from 0 to {self.num_stages - 1}; a "
                "stage without layers holds an empty chunk"
            )

    @classmethod
    def from_boundaries(cls, boundaries: Sequence[int], *, num_layers: int | None = None) -> Placement:
        """A partition.

        Args:
            boundaries: S + 1 layer indices, stage s holds ``boundaries[s] <= layer < boundaries[s + 1]``.
            num_layers: L, to be covered; ``None``: as many as the boundaries say.

        Returns:
            The placement.

        Raises:
            ValueError: when the boundaries don't rise from 0 to the number of layers.
        """
        cuts = plain_ints("boundaries", boundaries)
        if not _rises_from_zero(cuts) or num_layers not in (None, cuts[-1]):
            known = "" if num_layers is None else f", {num_layers}"
            raise ValueError(f"boundaries = {cuts}: must rise from 0 to the number of layers{known}")
        return cls(cuts, tuple(range(len(cuts) - 1)))

    @classmethod
    def of(cls, value: Placement | Sequence[int], *, num_layers: int | None = None) -> Placement:
        """What a function that takes a placement or boundaries was given.

        Args:
            value: a placement, or S + 1 boundaries.
            num_layers: L, to be covered; ``None``: any number.

        Returns:
            The placement.

        Raises:
            ValueError: when it does not cover the layers.
        """
        if not isinstance(value, Placement):
            return cls.from_boundaries(value, num_layers=num_layers)
        if num_layers not in (None, value.num_layers):
            raise ValueError(f"placement {value} is of {value.num_layers} layers; the model has {num_layers}")
        return value

    @classmethod
    def from_plain(cls, value: list[int] | dict[str, list[int]]) -> Placement:
        """Read back what :meth:`plain` gave.

        Args:
            value: boundaries, or ``{"cuts": [...], "holders": [...]}``.

        Returns:
            The placement.

        Raises:
            ValueError: when it is neither.
        """
        if isinstance(value, list):
            return cls.from_boundaries(value)
        if not isinstance(value, dict) or value.keys() != {"cuts", "holders"}:
            raise ValueError(f"{value!r} is not a placement: give a list of boundaries, or cuts and holders")
        return cls(tuple(value["cuts"]), tuple(value["holders"]))

    def plain(self) -> list[int] | dict[str, list[int]]:
        """Return plain numbers for JSON: of a partition its boundaries, otherwise cuts and holders."""
        if self.is_contiguous:
            return list(self.cuts)
        return {"cuts": list(self.cuts), "holders": list(self.holders)}

    @property
    def num_layers(self) -> int:
        """Number of layers L."""
        return self.cuts[-1]

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return max(self.holders) + 1

    @property
    def is_contiguous(self) -> bool:
        """Whether it is a partition: stage s holds chunk s alone."""
        return self.holders == tuple(range(len(self.holders)))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The S + 1 boundaries of a partition.

        Raises:
            ValueError: when it is none; what runs one range of layers a stage refuses it so.
        """
        self.check_is_partition()
        return self.cuts

    def check_is_partition(self) -> None:
        """Refuse what is none.

        Raises:
            ValueError: when a stage holds several ranges, or one out of order.
        """
        if not self.is_contiguous:
            raise ValueError(
                f"placement {self}: each stage must hold one range of layers, in the order of the stages, to be run "
                "or simulated; use a placement made by Placement.from_boundaries"
            )

    @property
    def layer_stages(self) -> tuple[int, ...]:
        """Stage of every layer, L numbers."""
        return tuple(stage for (first, end), stage in self._chunks() for _ in range(first, end))

    def _chunks(self) -> Iterator[tuple[tuple[int, int], int]]:
        """First layer, end and stage of each chunk."""
        return zip(pairwise(self.cuts), self.holders, strict=True)

    def stage_of(self, layer: int) -> int:
        """Stage that holds a layer.

        Args:
            layer: global layer index, from 0 to L - 1.

        Returns:
            Its stage.

        Raises:
            ValueError: when there is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer}: must be between 0 and {self.num_layers - 1}; the placement is {self}")
        return self.holders[bisect_right(self.cuts, layer) - 1]

    def chunks_of(self, stage: int) -> tuple[range, ...]:
        """Ranges of layers that a stage holds, in layer order; empty ones are left out.

        Args:
            stage: s.

        Returns:
            The ranges.
        """
        return tuple(range(first, end) for (first, end), holder in self._chunks() if holder == stage and first < end)

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """Layers that a stage holds, in layer order.

        Args:
            stage: s.

        Returns:
            Global layer indices.
        """
        return tuple(layer for chunk in self.chunks_of(stage) for layer in chunk)

    def by_stage(self, values: Sequence[T]) -> list[list[T]]:
        """Sort what belongs to the layers by the stages that hold them.

        Args:
            values: one for each of L layers.

        Returns:
            S lists, each in layer order.
        """
        if self.is_contiguous:
            return [list(values[first:end]) for first, end in pairwise(self.cuts)]
        sorted_out: list[list[T]] = [[] for _ in range(self.num_stages)]
        for (first, end), stage in self._chunks():
            sorted_out[stage] += values[first:end]
        return sorted_out

    def __str__(self) -> str:
        cuts = "|".join(map(str, self.cuts))
        return cuts if self.is_contiguous else f"{cuts} on stages {', '.join(map(str, self.holders))}"


def _rises_from_zero(cuts: Sequence[int]) -> bool:
    return len(cuts) >= 2 and cuts[0] == 0 and all(low <= high for low, high in pairwise(cuts))


def check_boundaries(
    boundaries: Sequence[int],
    *,
    num_layers: int,
    num_stages: int,
    pinned: Sequence[int] = (),
    allow_empty: bool = False,
) -> tuple[int, ...]:
    """Check boundaries against the rules of a partition.

    Args:
        boundaries: Any sequence of integers, NumPy's included.
        num_layers: ``L``; the last boundary.
        num_stages: ``S``; one less than the number of boundaries.
        pinned: Cut positions that are forbidden.
        allow_empty: Whether a stage may hold no layer.

    Returns:
        The boundaries as plain ints.

    Raises:
        ValueError: A rule is broken; the message has the value and the rule.
    """
    cuts = plain_ints("boundaries", boundaries)
    if len(cuts) != num_stages + 1:
        raise ValueError(
            f"boundaries {cuts} have {len(cuts)} entries; {num_stages} stages need "
            f"{num_stages + 1} (num_stages + 1)"
        )
    if cuts[0] != 0 or cuts[-1] != num_layers:
        raise ValueError(
            f"boundaries {cuts} run from {cuts[0]} to {cuts[-1]}; they must start at 0 and end "
            f"at the number of layers, {num_layers}"
        )
    _check_order(cuts, allow_empty)
    forbidden = set(cuts[1:-1]) & set(plain_ints("pinned", pinned))
    if forbidden:
        cut = min(forbidden)
        raise ValueError(
            f"boundaries {cuts} cut at {cut}, between layers {cut - 1} and {cut}; "
            "that cut is pinned, both layers must be on one stage"
        )
    return cuts


def plain_ints(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Turn integers of any kind into plain ints.

    Args:
        name: What the values are, for the message.
        values: Ints or objects that convert exactly, such as NumPy's.

    Returns:
        The same numbers as plain ints.

    Raises:
        ValueError: Not a sequence of integers.
    """
    try:
        return tuple(index(value) for value in values)
    except TypeError as error:
        raise ValueError(f"{name} {values!r} must be a sequence of integers") from error


def _check_order(cuts: tuple[int, ...], allow_empty: bool) -> None:
    for stage, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        if end < first:
            raise ValueError(
                f"boundaries {cuts} fall from {first} to {end} at stage {stage}; they must increase"
            )
        if end == first and not allow_empty:
            raise ValueError(
                f"boundaries {cuts} leave stage {stage} empty ({first} to {end}); every stage "
                "needs a layer unless allow_empty_stages is true"
            )


def present_stage(stage: int, before: int, after: int) -> int | None:
    """Which of the present stages is a stage of a longer pipeline: all but the last stay the first.

    So who reads data goes on reading it: the first stage, and of two or more the last.

    Args:
        stage: of the longer pipeline.
        before: present number of stages.
        after: the longer pipeline's.

    Returns:
        The present one; ``None`` for a new one.
    """
    if stage < max(1, before - 1):
        return stage
    return before - 1 if before > 1 and stage == after - 1 else None
