"""Which replicas' workers of a stage are slower than the others: they run the same layers, so no layer need move."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median, median_low
from typing import Any

LEAST_RATIO = 1.1
"""Workers that differ by less count as alike: such a difference changes a cut by a small layer at most."""

BATCHES = 8
"""In so many batches in a row a worker must differ by more than :data:`LEAST_RATIO` from what is believed of it.

Every batch asks, so chance must be all but excluded: 10% of noise in a worker's time makes that 1 in 70,000.
"""

_Logs = tuple[tuple[float, ...], ...]  # S x R


class Replicas:
    """How much slower workers are than the usual replica of their stage, as logarithms.

    Attributes:
        slowness: S stages x R replicas, 0 where a worker is like most of its stage; empty where none differs.
    """

    def __init__(self) -> None:
        self._seen: deque[_Logs] = deque(maxlen=BATCHES)
        self.slowness: _Logs = ()

    def observe(self, busy_s: Sequence[Sequence[float]]) -> bool:
        """Take in what the replicas of every stage computed for in a batch.

        Args:
            busy_s: S stages x R replicas, seconds; of a stage nothing where there is one replica.

        Returns:
            Whether :attr:`slowness` is another one than before.
        """
        logs = tuple(map(_relative, busy_s))
        if self._seen and list(map(len, logs)) != list(map(len, self._seen[-1])):
            self._seen.clear()
            self.slowness = ()
        self._seen.append(logs)
        if len(self._seen) < BATCHES or not any(logs):
            return False
        believed = self.slowness or tuple((0.0,) * len(stage) for stage in logs)
        found = tuple(
            tuple(
                _believed(before, [batch[stage][replica] for batch in self._seen])
                for replica, before in enumerate(befores)
            )
            for stage, befores in enumerate(believed)
        )
        before, self.slowness = self.slowness, found if any(map(any, found)) else ()
        return self.slowness != before

    def slowest(self, stage: int) -> float:
        """Logarithm of how much slower the slowest replica of a stage is than the usual one.

        Args:
            stage: its number.
        """
        return max((*self._of(stage), 0.0))

    def mean(self, stage: int) -> float:
        """The same of a mean over the replicas: what a profile's layer times have in them.

        Args:
            stage: its number.
        """
        logs = self._of(stage)
        return math.log(fmean(map(math.exp, logs))) if logs else 0.0

    def differing(self, stage: int) -> list[tuple[int, float]]:
        """The replicas of a stage that differ from the usual one, with the logarithm of how much slower they are.

        Args:
            stage: its number.
        """
        return [(replica, log) for replica, log in enumerate(self._of(stage)) if log]

    def _of(self, stage: int) -> tuple[float, ...]:
        return self.slowness[stage] if self.slowness else ()

    def state_dict(self) -> dict[str, Any]:
        """All of it, plain values."""
        return {"seen": list(self._seen), "slowness": self.slowness}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint, or from other stages.
        """
        self._seen = deque(map(_logs, state.get("seen", ())), maxlen=BATCHES)
        self.slowness = _logs(state.get("slowness", ()))


def _relative(busy_s: Sequence[float]) -> tuple[float, ...]:
    """Logarithms of seconds over those of the usual replica, of two the faster one; 0 where a stage has no layers."""
    if not busy_s or min(busy_s) <= 0:
        return (0.0,) * len(busy_s)
    usual = math.log(median_low(busy_s))
    return tuple(math.log(seconds) - usual for seconds in busy_s)


def _believed(before: float, logs: Sequence[float]) -> float:
    """What is believed of a worker after some batches."""
    least = math.log(LEAST_RATIO)
    apart = [log - before for log in logs]
    if min(apart) <= least and max(apart) >= -least:
        return before
    now = median(logs)
    return now if abs(now) > least else 0.0


def _logs(stored: Any) -> _Logs:
    return tuple(map(tuple, stored))
