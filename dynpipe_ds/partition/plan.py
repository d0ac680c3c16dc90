"""The plan value, and the error for an unsolvable request."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynpipe_ds.placement import Placement

_TEXT = re.compile(
    r"(?P<boundaries>\d+(?:\|\d+)+) bottleneck=(?P<bottleneck>\S+)"
    r"(?: before=(?P<before>\S+))?(?: bytes=(?P<bytes>\d+))?(?: rounds=(?P<rounds>\d+))?"
)


class InfeasiblePartitionError(ValueError):
    """No partition keeps the memory caps, the pinned cuts and the rule on empty stages."""


@dataclass(frozen=True)
class Plan:
    """A partition and what it promises, the value every partitioner returns.

    ``str(plan)`` is a short text form that :meth:`parse` reads back, such as
    ``0|3|7|12 bottleneck=0.25 before=0.5 bytes=4096``; logs and errors use it.

    Attributes:
        boundaries: ``S + 1`` layer indices; stage ``s`` holds the layers
            ``boundaries[s] <= layer < boundaries[s + 1]``.
        bottleneck: The largest stage cost, in the unit of the costs, divided by the stage's speed.
        bottleneck_before: The same of the current partition; None when there was none.
        bytes_to_move: Bytes of the layers whose stage changes; 0 when unknown.
        rounds: Rounds that an iterative partitioner took; 0 for the others.
    """

    boundaries: tuple[int, ...]
    bottleneck: float
    bottleneck_before: float | None = None
    bytes_to_move: int = 0
    rounds: int = 0

    @property
    def placement(self) -> Placement:
        """Which stage is to hold each layer."""
        return Placement.from_boundaries(self.boundaries)

    @property
    def num_stages(self) -> int:
        """Number of stages ``S``."""
        return len(self.boundaries) - 1

    @property
    def predicted_gain(self) -> float:
        """Share of the old bottleneck that the plan saves; 0.0 when the old one is unknown."""
        if not self.bottleneck_before:
            return 0.0
        return 1.0 - self.bottleneck / self.bottleneck_before

    def __str__(self) -> str:
        parts = ["|".join(map(str, self.boundaries)), f"bottleneck={self.bottleneck!r}"]
        if self.bottleneck_before is not None:
            parts.append(f"before={self.bottleneck_before!r}")
        if self.bytes_to_move:
            parts.append(f"bytes={self.bytes_to_move}")
        if self.rounds:
            parts.append(f"rounds={self.rounds}")
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form back.

        Args:
            text: What ``str(plan)`` gave.

        Returns:
            The plan that was written, equal in every field.

        Raises:
            ValueError: The text is not a plan.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"not a plan: {text!r}; a plan reads '0|3|7 bottleneck=0.5', then optionally "
                "'before=0.7', 'bytes=4096' and 'rounds=2' in this order"
            )
        before = match["before"]
        return cls(
            boundaries=tuple(int(cut) for cut in match["boundaries"].split("|")),
            bottleneck=float(match["bottleneck"]),
            bottleneck_before=None if before is None else float(before),
            bytes_to_move=int(match["bytes"] or 0),
            rounds=int(match["rounds"] or 0),
        )
