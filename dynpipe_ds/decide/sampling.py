"""Which batches are profiled: each, until layer times are steady; then as few as keep profiling cheap.

A change is seen by the next profile, at most :data:`MOST_EVERY` batches later, and from then on every batch is
profiled again until times are steady anew. All of it is arithmetic on numbers that every rank has alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

SETTLED = 8
"""Profiles without a change after which times are steady: twice the evidence that a dear move needs."""

MOST_EVERY = 10
"""Most batches from one profile to the next with ``"auto"``: what a change waits at most until it is seen."""

BUDGET = 0.004
"""Share of the time that seldom profiles may take with ``"auto"``.

What is promised is 0.5%: odd batches, after which each is profiled for a while, have the rest.
"""

DEVIATIONS = 64
"""Newest deviations that say what is usual."""

_UNUSUAL = 3.0  # times the usual deviation from the mean; the usual one is the median, about 0.7 to 1.2 sigma
_LEAST = 1e-3  # of the model's time: rounding, and what no cut could follow


class Sampling:
    """Says after each profile which batch is profiled next.

    What is compared are the shares of the model's time that its first 1, 2, … L layers take: a machine that slows
    down as a whole changes none, and a cut depends on nothing else.

    Args:
        every: ``"auto"``, or how many batches from one profile to the next while times are steady.
        settled: how many profiles without a change make times steady.
    """

    def __init__(self, every: int | Literal["auto"], settled: int = SETTLED) -> None:
        self._every, self._settled = every, settled
        self._next_batch = 0
        self._mean: list[float] = []
        self._num_profiles = 0
        self._deviations: deque[float] = deque(maxlen=DEVIATIONS)
        self._costs: deque[float] = deque(maxlen=SETTLED)

    def wants(self, batch: int) -> bool:
        """Tell whether to profile a batch."""
        return batch >= self._next_batch

    def restart(self) -> None:
        """Profile every batch until times are steady anew: something has changed."""
        self._next_batch = self._num_profiles = 0
        self._mean = []
        self._deviations.clear()

    def observe(self, batch: int, seconds_until: Sequence[float], *, tolerated: float, cost: float) -> None:
        """Take in one profile.

        Args:
            batch: number of the batch.
            seconds_until: seconds of the first 0, 1, … L layers.
            tolerated: share of the model's time that may go from some layers to others unnoticed.
            cost: of this profile, as a share of the batch.
        """
        shares = [seconds / (seconds_until[-1] or 1.0) for seconds in seconds_until]
        self._costs.append(cost)
        self._next_batch = batch + 1
        if self._mean:
            deviation = max(abs(share - mean) for share, mean in zip(shares, self._mean, strict=True))
            if deviation > max(_LEAST, tolerated, self._unusual()):
                self.restart()  # and what is usual is told by the next ones: this one may be an odd one
                return
            self._deviations.append(deviation)
        self._num_profiles += 1
        weight, known = 1.0 / self._num_profiles, self._mean or shares
        self._mean = [mean + weight * (share - mean) for share, mean in zip(shares, known, strict=True)]
        if self._num_profiles >= self._settled:
            self._next_batch = batch + self._interval()

    def _unusual(self) -> float:
        """Least deviation that is a change; few are no good measure of what is usual."""
        if not self._deviations:
            return math.inf
        return _UNUSUAL * (1.0 + 4.0 / len(self._deviations)) * median(self._deviations)

    def _interval(self) -> int:
        if self._every != "auto":
            return self._every
        return min(MOST_EVERY, max(1, math.ceil(median(self._costs) / BUDGET)))

    def state_dict(self) -> dict[str, Any]:
        """All that it decides by, as plain values."""
        return {
            "next_batch": self._next_batch,
            "mean": list(self._mean),
            "num_profiles": self._num_profiles,
            "deviations": list(self._deviations),
            "costs": list(self._costs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave."""
        self._next_batch, self._num_profiles = state["next_batch"], state["num_profiles"]
        self._mean = list(state["mean"])
        self._deviations = deque(state["deviations"], maxlen=DEVIATIONS)
        self._costs = deque(state["costs"], maxlen=SETTLED)
