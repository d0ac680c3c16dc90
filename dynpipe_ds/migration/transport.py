"""Point-to-point transfers among ranks that can't deadlock and use bounded buffers.

Every rank takes part in the same numbered rounds. In one round it posts all its sends and receives,
then waits for them; a rank in round ``r`` waits only for partners that are in round ``r`` or on their
way to it, so no cycle of waiting can form, however many stages send in whatever direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
    """Send one contiguous tensor to each of some ranks and fill one from each of others; blocks.

    Args:
        sends: tensor by destination rank.
        receives: tensor to fill by source rank; same size and dtype as the sender's.
    """
    operations = [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in sorted(receives.items())]
    operations += [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sorted(sends.items())]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def exchange_bytes(
    sends: Mapping[int, bytes], sources: Sequence[int], device: torch.device
) -> dict[int, bytes]:
    """Exchange byte strings whose lengths the receivers don't know.

    Args:
        sends: bytes by destination rank.
        sources: ranks that send to this one.
        device: device that the back-end communicates from.

    Returns:
        The bytes by source rank.
    """
    sizes = {rank: torch.zeros(1, dtype=torch.int64, device=device) for rank in sources}
    exchange({rank: torch.tensor([len(data)], device=device) for rank, data in sends.items()}, sizes)
    received = {
        rank: torch.empty(int(size.item()), dtype=torch.uint8, device=device) for rank, size in sizes.items()
    }
    payloads = {
        rank: torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        for rank, data in sends.items()
        if data
    }
    exchange(payloads, {rank: data for rank, data in received.items() if data.numel()})
    return {rank: data.cpu().numpy().tobytes() for rank, data in received.items()}


def memory_order(stride: Sequence[int]) -> list[int]:
    """Dimensions of a tensor from the slowest to the fastest in memory.

    Args:
        stride: the tensor's strides.
    """
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


def flat_view(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in one row, as they lie in memory; shares it.

    Args:
        tensor: contiguous up to the order of its dimensions.
    """
    return tensor.detach().permute(memory_order(tensor.stride())).view(-1)


class _Stream:
    """A list of tensors read or written as one run of bytes, a bounded piece at a time."""

    def __init__(self, tensors: Sequence[Tensor], buffer_bytes: int, device: torch.device) -> None:
        self._views = [flat_view(t).view(torch.uint8) for t in tensors if t.numel()]
        self.num_bytes = sum(view.numel() for view in self._views)
        self._buffer = torch.empty(min(buffer_bytes, self.num_bytes), dtype=torch.uint8, device=device)
        self._position = (0, 0)  # view, offset in it

    def next_piece(self, start: int) -> Tensor:
        return self._buffer[: min(self._buffer.numel(), self.num_bytes - start)]

    def copy(self, piece: Tensor, *, into_tensors: bool) -> None:
        index, offset = self._position
        done = 0
        while done < piece.numel():
            view = self._views[index]
            count = min(view.numel() - offset, piece.numel() - done)
            ours, theirs = view[offset : offset + count], piece[done : done + count]
            if into_tensors:
                ours.copy_(theirs)
            else:
                theirs.copy_(ours)
            done += count
            offset += count
            if offset == view.numel():
                index, offset = index + 1, 0
        self._position = (index, offset)


def exchange_tensors(
    sends: Mapping[int, Sequence[Tensor]],
    receives: Mapping[int, Sequence[Tensor]],
    *,
    buffer_bytes: int,
    device: torch.device,
) -> None:
    """Exchange lists of tensors of known shapes through buffers of bounded size.

    Args:
        sends: dense tensors by destination rank.
        receives: dense tensors to fill by source rank, in the sender's order.
        buffer_bytes: largest buffer for one partner; the same on every rank.
        device: device that the back-end communicates from.
    """
    out = {rank: _Stream(tensors, buffer_bytes, device) for rank, tensors in sends.items()}
    into = {rank: _Stream(tensors, buffer_bytes, device) for rank, tensors in receives.items()}
    longest = max((stream.num_bytes for stream in (*out.values(), *into.values())), default=0)
    for start in range(0, longest, buffer_bytes):
        sending = {rank: s.next_piece(start) for rank, s in out.items() if start < s.num_bytes}
        receiving = {rank: s.next_piece(start) for rank, s in into.items() if start < s.num_bytes}
        for rank, piece in sending.items():
            out[rank].copy(piece, into_tensors=False)
        exchange(sending, receiving)
        for rank, piece in receiving.items():
            into[rank].copy(piece, into_tensors=True)
