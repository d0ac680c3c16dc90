"""A rank that lives and has no place among those that go on.

Where workers may join, its process runs its script once more, as a worker that waits at the door. So it takes a place
as soon as enough of them wait for a stage. Elsewhere its process ends, as after re-packing.
"""

from __future__ import annotations

from typing import NoReturn

from dynpipe_ds.joining.address import Address
from dynpipe_ds.joining.anew import wait_again
from dynpipe_ds.release.exit import ExitBackend
from dynpipe_ds.telling import warn


def leave(door: Address | None, token: str) -> NoReturn:
    """Leave those that go on without this rank.

    Args:
        door: of one that goes on; ``None`` if nobody may join.
        token: what it takes to join.
    """
    if door is None:
        warn("survive: this rank has no place among those that are left, and ends")
        ExitBackend().leave()
    warn("survive: this rank has no place among those that are left; its script begins anew, as a spare")
    wait_again(door, token)
