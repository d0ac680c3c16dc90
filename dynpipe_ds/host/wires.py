"""What carries activations and gradients: torch's sends and receives, on a channel of their own for each direction.

Gloo matches what one process sends to another by its tag, in order, whatever goes the other way, so a tag of its own is
a channel. NCCL knows no tags and runs the operations of a group in the order in which they were posted: a receive that
waits would hold up all sends behind it. There, and wherever nobody knows, each ordered pair of neighbours has a process
group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from dynpipe_ds.messages.channels import Waitable, Wire

TAG = 1717
"""Of activations and gradients; moves of layers and gradients of tied layers go by torch's own, 0."""

_MATCH_BY_TAG = ("gloo",)


class TorchWire(NamedTuple):
    """Both directions between this rank and another.

    Attributes:
        rank: the other one's number in the world.
        out: process group of what is sent; ``None``: the world.
        into: of what is received.
        tag: of both.
    """

    rank: int
    out: dist.ProcessGroup | None = None
    into: dist.ProcessGroup | None = None
    tag: int = 0

    def send(self, row: Tensor) -> Waitable:
        """Begin to send bytes."""
        return _under_way(dist.isend(row, self.rank, self.out, self.tag))

    def receive(self, row: Tensor) -> Waitable:
        """Begin to receive bytes."""
        return _under_way(dist.irecv(row, self.rank, self.into, self.tag))


def wires(stages: Iterable[tuple[int, ...]], rank: int) -> dict[int, Wire]:
    """Connect every rank with its neighbours; collective over all ranks.

    Args:
        stages: the ranks of each stage, replicas in one order.
        rank: this one.

    Returns:
        What connects this rank with each neighbouring stage.
    """
    by_tag, found = dist.get_backend() in _MATCH_BY_TAG, dict[int, Wire]()
    for stage, (lower, upper) in enumerate(pairwise(stages)):
        for a, b in zip(lower, upper, strict=True):
            forwards, back = (None, None) if by_tag else (dist.new_group([a, b]), dist.new_group([a, b]))
            tag = TAG if by_tag else 0
            if rank == a:
                found[stage + 1] = TorchWire(b, forwards, back, tag)
            if rank == b:
                found[stage] = TorchWire(a, back, forwards, tag)
    return found


def _under_way(work: dist.Work | None) -> Waitable:
    assert work is not None, "both ranks are members of the group"
    return work
