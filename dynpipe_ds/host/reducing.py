"""How gradients of data-parallel replicas are added up: the same bits wherever the pipeline is cut.

DeepSpeed copies gradients into buckets and lets the back-end add these up. With three replicas or more the order in
which a back-end adds depends on the place in the bucket, on its size and on the algorithm that the back-end picks,
and place and size follow the cut. Here every element is added up in the order of the replicas instead. Two replicas
need no order, since addition commutes; one needs no addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

PIECE_BYTES = 2**23
"""Bytes of gradients that are added up at a time; as many are needed besides."""

MIN_REPLICAS = 3
"""Replicas from which on the order of a sum matters."""

T = TypeVar("T")


def add_up(tensor: Tensor, group: Any, *, piece_bytes: int = PIECE_BYTES) -> None:
    """Replace a tensor by its sum over a group, each element added in the order of the group's ranks.

    Every rank receives its share of all tensors, adds them up and sends the sums to all: the traffic of a ring. The
    order of a sum depends on nothing but the group, so neither place nor size nor back-end change its bits.

    Args:
        tensor: contiguous, of any shape and dtype; alike on all ranks of the group.
        group: process group.
        piece_bytes: bytes to add up at a time.
    """
    flat, num_ranks = tensor.view(-1), dist.get_world_size(group)
    length = min(max(1, piece_bytes // tensor.element_size()), flat.numel())
    room = flat.new_empty(num_ranks * -(-length // num_ranks))
    for piece in torch.split(flat, length):
        _add_up_piece(piece, room, group)


def _add_up_piece(piece: Tensor, room: Tensor, group: Any) -> None:
    num_ranks, width = dist.get_world_size(group), piece.element_size()
    shares = [len(share) for share in piece.tensor_split(num_ranks)]
    share = shares[dist.get_rank(group)]
    summands = room[: num_ranks * share].view(num_ranks, share)
    # As bytes, since not every back-end exchanges every dtype.
    mine, all_of_them = [share * width] * num_ranks, [s * width for s in shares]
    dist.all_to_all_single(_bytes(summands), _bytes(piece), mine, all_of_them, group=group)
    for summand in summands[1:]:
        summands[0] += summand
    summands[1:] = summands[0]
    dist.all_to_all_single(_bytes(piece), _bytes(summands), all_of_them, mine, group=group)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def in_replica_order(replicas: Any) -> Iterator[None]:
    """Let DeepSpeed's sums over a group be those of :func:`add_up`; what it does before and after stays its own.

    Sums over other groups, and over fewer than three ranks, stay as they are.
    """
    if dist.get_world_size(replicas) < MIN_REPLICAS:
        yield
        return

    def ordered(original: Callable[..., Any], num_arguments: int) -> Callable[..., Any]:
        @wraps(original)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            is_plain_sum = len(args) == num_arguments and kwargs.keys() == {"group"} and kwargs["group"] is replicas
            return add_up(args[0], replicas) if is_plain_sum else original(*args, **kwargs)

        return reduce

    originals = {"all_reduce": comm.all_reduce, "reduce": comm.reduce}
    try:
        comm.all_reduce = ordered(comm.all_reduce, 1)  # of a tensor
        comm.reduce = ordered(comm.reduce, 2)  # and to a rank: here all get the sum
        yield
    finally:
        for name, original in originals.items():
            setattr(comm, name, original)


def install_order(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Make ZeRO-1, which reduces gradients by itself, add them up in the order of the replicas."""

    def ordered(original: Callable[..., T]) -> Callable[..., T]:
        def reduce(*args: Any, **kwargs: Any) -> T:
            with in_replica_order(optimizer.dp_process_group):
                return original(*args, **kwargs)

        return reduce

    for name in ("allreduce_bucket", "gradient_reduction_w_predivide"):
        setattr(optimizer, name, ordered(getattr(optimizer, name)))
