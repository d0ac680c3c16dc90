"""How often snapshots are taken: as often as a share of the time allows.

What one costs is not only what this process sees itself spend on it. Threads that send and receive, and memory that is
read and written, slow training down where no clock tells. So batches with a snapshot on its way are compared with those
around them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

SHARE = 0.03
"""Least interval: the smallest number of batches over which a snapshot costs less than this share of their time."""

LONGEST = 10_000
"""No interval is longer: what must be replayed after a loss is bounded."""

LEAST_COMPARED = 3
"""So many snapshots must have been compared with batches without one, before that says anything."""

_COMPARED = 5
"""The newest ones; what a snapshot costs is their median, as one batch may be slow for any reason."""

_BATCHES = 8
"""Their median is a batch's time."""


def smallest_interval(cost: float, share: float = SHARE) -> int:
    """The smallest N for which a snapshot every N batches costs less than a share of their time.

    Args:
        cost: seconds of one snapshot, as a multiple of a batch's seconds.
        share: of the time.

    Returns:
        A number of batches, at least 1.
    """
    if not cost > 0:  # also what is not a number
        return 1
    found = cost / share
    return LONGEST if found >= LONGEST else max(1, math.floor(found) + 1)


class SnapshotCost:
    """What a snapshot costs training.

    Attributes:
        spent_s: on the newest one, as far as it is seen: what training waited, and on a CPU what threads computed.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._before_s = self._under_way_s = 0.0
        self._num_under_way = 0
        self._newest: deque[tuple[float, bool]] = deque(maxlen=_BATCHES)
        self._compared_s: deque[float] = deque(maxlen=_COMPARED)

    @property
    def in_batches(self) -> float:
        """Of the next snapshot, as a multiple of a batch without one; 0 while no batch is known."""
        batches_s = self._quiet_s or [seconds for seconds, _ in self._newest]
        return max(self.spent_s, self._seen_s) / statistics.median(batches_s) if batches_s else 0.0

    @property
    def is_compared(self) -> bool:
        """Whether enough snapshots were compared with batches without one."""
        return len(self._compared_s) >= LEAST_COMPARED

    @property
    def _quiet_s(self) -> list[float]:
        return [seconds for seconds, is_under_way in self._newest if not is_under_way]

    @property
    def _seen_s(self) -> float:
        return statistics.median(self._compared_s) if self.is_compared else 0.0

    def begin(self) -> None:
        """A snapshot is about to be taken."""
        self.spent_s = self._before_s = self._under_way_s = 0.0
        self._num_under_way = 0

    def spend(self, seconds: float, *, before_batch: bool = False) -> None:
        """Take note of what the newest snapshot is seen to cost.

        Args:
            seconds: on this rank.
            before_batch: whether they are no part of what a batch took.
        """
        self.spent_s += seconds
        self._before_s += seconds if before_batch else 0.0

    def batch(self, seconds: float, *, is_under_way: bool) -> None:
        """Take note of a batch.

        Args:
            seconds: that it took.
            is_under_way: whether a snapshot was on its way when it began.
        """
        self._newest.append((seconds, is_under_way))
        if is_under_way:
            self._under_way_s += seconds
            self._num_under_way += 1

    def end(self) -> float:
        """The newest snapshot has come to its end.

        Returns:
            The seconds that it cost beyond what was seen, as far as is known.
        """
        if self._num_under_way and (quiet_s := self._quiet_s):
            usual_s = self._num_under_way * statistics.median(quiet_s)
            self._compared_s.append(self._before_s + self._under_way_s - usual_s)
        return max(0.0, self._seen_s - self.spent_s)
