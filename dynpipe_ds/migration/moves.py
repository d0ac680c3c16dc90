"""What has to move: the difference of two placements, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynpipe_ds.placement import Placement


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


def plan_moves(before: Placement | Sequence[int], after: Placement | Sequence[int]) -> tuple[Move, ...]:
    """List the layers whose stage differs between two placements, in layer order.

    Args:
        before: the present placement, or the ``S + 1`` boundaries of a partition.
        after: the wanted one, of as many layers; it may have another number of stages.

    Returns:
        The moves; empty when the placements agree.

    Raises:
        ValueError: when one of them is none, or they are of different models.
    """
    present = Placement.of(before)
    wanted = Placement.of(after, num_layers=present.num_layers)
    stages = zip(present.layer_stages, wanted.layer_stages, strict=True)
    return tuple(Move(layer, old, new) for layer, (old, new) in enumerate(stages) if old != new)
