"""``stay``: workers are kept for the job, and wait at its door until it takes them back."""

from __future__ import annotations

from dynpipe_ds.release.exit import ExitBackend


class StayBackend(ExitBackend):
    """Nobody gets them: a freed worker begins its script anew, as a spare.

    It holds its device meanwhile, without model or optimizer state.
    """

    workers_stay = True
