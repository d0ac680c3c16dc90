"""What one contender's run on paper took."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.replay.case import WARM_UP


@dataclass(frozen=True)
class Outcome:
    """A run.

    Args:
        label: of the contender.
        batches_s: seconds of every batch, everything included.
        overhead_s: of these, profiling, deciding and moving.
        moves: how often layers moved.
        imbalance: of the stages' loads in the last batch (Eq. 2).
        bubble: idle share of the last batch; ``nan`` where it is not known.
        hops: messages of a micro-batch from its first layer to its last.
    """

    label: str
    batches_s: tuple[float, ...]
    overhead_s: float = 0.0
    moves: int = 0
    imbalance: float = math.nan
    bubble: float = math.nan
    hops: int = 0

    @property
    def whole_s(self) -> float:
        """Seconds of the timed batches."""
        return math.fsum(self.batches_s[WARM_UP:])

    @property
    def last_s(self) -> float:
        """Seconds of the last quarter of the run."""
        return math.fsum(self.batches_s[-(len(self.batches_s) // 4) :])
