"""What has to move: the difference of two partitions, as values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """One layer goes from one stage to another.

    Attributes:
        layer: global layer index.
        source: stage that holds it now.
        destination: stage that will hold it.
    """

    layer: int
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.layer}:{self.source}>{self.destination}"

    @classmethod
    def parse(cls, text: str) -> Move:
        """Read back what ``str(move)`` wrote.

        Args:
            text: for example ``"7:0>1"``.

        Returns:
            The move.

        Raises:
            ValueError: if the text has another form.
        """
        try:
            layer, stages = text.split(":")
            source, destination = stages.split(">")
            return cls(int(layer), int(source), int(destination))
        except ValueError:
            raise ValueError(f"{text!r} is not a move; the form is layer:source>destination") from None


def stage_of(layer: int, boundaries: Sequence[int]) -> int:
    """Stage that holds a layer.

    Args:
        layer: global layer index.
        boundaries: ``S + 1`` boundaries.
    """
    return bisect_right(boundaries, layer) - 1


def plan_moves(before: Sequence[int], after: Sequence[int]) -> tuple[Move, ...]:
    """List the layers whose stage differs between two partitions, in layer order.

    Args:
        before: ``S + 1`` boundaries of the present partition.
        after: ``S + 1`` boundaries of the wanted one.

    Returns:
        The moves; empty when the partitions agree.
    """
    stages = ((layer, stage_of(layer, before), stage_of(layer, after)) for layer in range(before[-1]))
    return tuple(Move(layer, old, new) for layer, old, new in stages if old != new)
