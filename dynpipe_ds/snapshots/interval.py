"""How often snapshots are taken: as often as a share of the time allows."""

from __future__ import annotations

import math

SHARE = 0.03
"""Least interval: the smallest number of batches over which a snapshot costs less than this share of their time."""

LONGEST = 10_000
"""No interval is longer: what must be replayed after a loss is bounded."""


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
