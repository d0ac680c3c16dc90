"""Small numbers that the ranks of a group tell each other before each larger exchange, so that none waits for ever.

A rank that gives a batch up computes nothing more of it. Its partners would then wait for it in their next exchange. So
each exchange begins with a meeting, and a rank that gives up comes to exactly one more, where it says so. All others
come to that one, too: sooner or later in the batch, or when all ranks drop it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class PartnerGaveUpError(RuntimeError):
    """Raised where a rank of the group has given the batch up; this one has to, as well."""


class Meetings:
    """Meetings of one group, one after the other. Not for several threads.

    Args:
        group: of gloo, or any back-end whose collectives work on ``device``.
        width: how many numbers a meeting can take.
        device: where they are exchanged.
    """

    def __init__(self, group: dist.ProcessGroup, width: int, device: torch.device | None = None) -> None:
        self._group, self._width = group, width
        self._device = device or torch.device("cpu")
        self._closing: tuple[dist.Work, Tensor, Tensor] | None = None
        self.is_closed = False

    def meet(self, topic: int, values: Sequence[int] = ()) -> list[list[int]]:
        """Tell all and hear from all; collective over the group.

        Args:
            topic: what comes next, the same on every rank.
            values: of this rank.

        Returns:
            Everybody's values, by rank.

        Raises:
            PartnerGaveUpError: if this rank or another one has given the batch up.
            RuntimeError: if ranks have come for different topics, which is a mistake in this code.
        """
        if self.is_closed:
            raise PartnerGaveUpError("this rank, or one that it shares experts with, has given the batch up")
        _, mine, everybody = self._begin(topic, values, gives_up=False, waits=True)
        rows: list[list[int]] = everybody.tolist()
        for rank, row in enumerate(rows):
            if row[0]:
                self.is_closed = True
                raise PartnerGaveUpError(f"rank {rank} of those that share experts has given the batch up")
        if any(row[1] != topic for row in rows):
            raise RuntimeError(f"ranks that share experts came for different things: {[row[1] for row in rows]}")
        return [row[2 : 2 + len(values)] for row in rows]

    def give_up(self) -> None:
        """Come to no more meeting of this batch but the next, and say so there; nobody is waited for."""
        if not self.is_closed:
            self.is_closed = True
            self._closing = self._begin(0, (), gives_up=True, waits=False)

    def reopen(self) -> None:
        """Begin anew, when all ranks of the group drop the batch; collective over the group."""
        self.give_up()
        if self._closing is not None:
            self._closing[0].wait()
        self._closing, self.is_closed = None, False

    def _begin(
        self, topic: int, values: Sequence[int], *, gives_up: bool, waits: bool
    ) -> tuple[dist.Work, Tensor, Tensor]:
        assert len(values) <= self._width, "a meeting for fewer experts"
        row = [int(gives_up), topic, *values, *[0] * (self._width - len(values))]
        mine = torch.tensor(row, dtype=torch.int64, device=self._device)
        everybody = mine.new_empty(dist.get_world_size(self._group), len(row))
        work = dist.all_gather(list(everybody), mine, group=self._group, async_op=True)
        assert work is not None
        if waits:
            work.wait()
        return work, mine, everybody
