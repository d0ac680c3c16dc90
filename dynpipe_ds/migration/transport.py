"""Point-to-point transfers among ranks that can't deadlock and use bounded buffers, or none.

Every rank takes part in the same numbered rounds. In one round it posts all its sends and receives,
then waits for them; a rank in round ``r`` waits only for partners that are in round ``r`` or on their
way to it, so no cycle of waiting can form, however many stages send in whatever direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

DIRECT_BYTES = 256 * 2**10
"""Tensors of at least so many bytes travel from and into their own memory.

Smaller ones share a message: below this, a message of its own costs more than copying twice.
"""

FIRST_BYTES = 64 * 2**10
"""Size of the message that byte strings of unknown length begin with; more follows only if it is too short."""

_LENGTH_BYTES = 8


def post(sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]) -> list[dist.Work]:
    """Begin to send contiguous tensors to some ranks and to fill others from some.

    Args:
        sends: tensors by destination rank.
        receives: tensors to fill by source rank; in number, size, dtype and order the sender's.

    Returns:
        What to wait for.
    """
    operations = [dist.P2POp(dist.irecv, t, rank) for rank, tensors in sorted(receives.items()) for t in tensors]
    operations += [dist.P2POp(dist.isend, t, rank) for rank, tensors in sorted(sends.items()) for t in tensors]
    return dist.batch_isend_irecv(operations) if operations else []


def exchange(sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]) -> None:
    """As :func:`post`, but blocks until all have travelled.

    Args:
        sends: tensors by destination rank.
        receives: tensors to fill by source rank; in number, size, dtype and order the sender's.
    """
    for work in post(sends, receives):
        work.wait()


def exchange_bytes(
    sends: Mapping[int, bytes], sources: Sequence[int], device: torch.device, *, first_bytes: int = FIRST_BYTES
) -> dict[int, bytes]:
    """Exchange byte strings whose lengths the receivers don't know; one message each unless they are long.

    Args:
        sends: bytes by destination rank.
        sources: ranks that send to this one.
        device: device that the back-end communicates from.
        first_bytes: size of the message that they begin with; the same on every rank.

    Returns:
        The bytes by source rank.
    """
    first = {rank: torch.empty(first_bytes, dtype=torch.uint8, device=device) for rank in sources}
    whole = {rank: _with_length(data, first_bytes) for rank, data in sends.items()}
    exchange(
        {rank: [data[:first_bytes].to(device)] for rank, data in whole.items()},
        {rank: [data] for rank, data in first.items()},
    )
    started = {rank: data.cpu().numpy().tobytes() for rank, data in first.items()}
    sizes = {rank: int.from_bytes(data[:_LENGTH_BYTES], "little") for rank, data in started.items()}
    missing = {rank: size + _LENGTH_BYTES - first_bytes for rank, size in sizes.items()}
    rest = {r: torch.empty(n, dtype=torch.uint8, device=device) for r, n in missing.items() if n > 0}
    exchange(
        {rank: [data[first_bytes:].to(device)] for rank, data in whole.items() if data.numel() > first_bytes},
        {rank: [data] for rank, data in rest.items()},
    )
    return {
        rank: data[_LENGTH_BYTES : _LENGTH_BYTES + sizes[rank]]
        + (rest[rank].cpu().numpy().tobytes() if rank in rest else b"")
        for rank, data in started.items()
    }


def _with_length(data: bytes, first_bytes: int) -> Tensor:
    """The number of bytes, then the bytes, in at least as many as the first message has."""
    text = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    return torch.frombuffer(bytearray(text.ljust(first_bytes, b"\0")), dtype=torch.uint8)


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
    tensor = tensor.detach()
    return (tensor if tensor.is_contiguous() else tensor.permute(memory_order(tensor.stride()))).view(-1)


@dataclass(frozen=True)
class _Round:
    """What one partner gets, or gives, at a time.

    Attributes:
        small: parts of tensors that share a message.
        direct: parts of tensors that are a message each.
    """

    small: list[Tensor]
    direct: list[Tensor]

    @property
    def small_bytes(self) -> int:
        return sum(part.numel() for part in self.small)


class _Stream:
    """A list of tensors sent or received in rounds of bounded size.

    Sender and receiver cut alike: by sizes and kinds of device, which both know.
    """

    def __init__(
        self, tensors: Sequence[Tensor], round_bytes: int, direct_bytes: int, device: torch.device
    ) -> None:
        self.rounds: list[_Round] = []
        self.num_bytes = free_bytes = 0
        for view in (flat_view(t).view(torch.uint8) for t in tensors if t.numel()):
            start = 0
            self.num_bytes += view.numel()
            while start < view.numel():
                if free_bytes == 0:
                    self.rounds.append(_Round([], []))
                    free_bytes = round_bytes
                part = view[start : start + free_bytes]
                is_direct = part.numel() >= direct_bytes and part.device.type == device.type
                (self.rounds[-1].direct if is_direct else self.rounds[-1].small).append(part)
                start += part.numel()
                free_bytes -= part.numel()
        shared_bytes = max((r.small_bytes for r in self.rounds), default=0)
        self._buffer = torch.empty(shared_bytes, dtype=torch.uint8, device=device)

    def messages(self, number: int, *, fill: bool) -> list[Tensor]:
        """The messages of a round, in the order in which they travel; none after the last round.

        Args:
            number: of the round.
            fill: copy the small parts into their message, in order to send it.
        """
        if number >= len(self.rounds):
            return []
        current = self.rounds[number]
        shared = self._buffer[: current.small_bytes]
        if fill:
            _copy(current.small, shared, into_parts=False)
        return ([shared] if current.small else []) + current.direct

    def take(self, number: int) -> None:
        """Copy the small parts out of a round's received message."""
        if number < len(self.rounds):
            _copy(self.rounds[number].small, self._buffer, into_parts=True)


def _copy(parts: Sequence[Tensor], buffer: Tensor, *, into_parts: bool) -> None:
    start = 0
    for part in parts:
        place = buffer[start : start + part.numel()]
        if into_parts:
            part.copy_(place)
        else:
            place.copy_(part)
        start += part.numel()


class Transfer:
    """Lists of tensors of known shapes on their way between ranks, in rounds of bounded size.

    Large tensors on a device of the back-end's kind are sent from, and received into, their own memory;
    the others share a message a round, through a buffer. All memory that is needed is taken at once, here.

    Args:
        sends: dense tensors by destination rank.
        receives: dense tensors to fill by source rank, in the sender's order, on the same kinds of device.
        buffer_bytes: most bytes to or from one partner at a time; the same on every rank.
        device: device that the back-end communicates from.
        direct_bytes: least size of a message of its own; the same on every rank.
    """

    def __init__(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, Sequence[Tensor]],
        *,
        buffer_bytes: int,
        device: torch.device,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        self._out = {rank: _Stream(t, buffer_bytes, direct_bytes, device) for rank, t in sends.items()}
        self._into = {rank: _Stream(t, buffer_bytes, direct_bytes, device) for rank, t in receives.items()}
        streams = (*self._out.values(), *self._into.values())
        self._num_rounds = max((len(stream.rounds) for stream in streams), default=0)
        self._under_way: list[dist.Work] = []

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes that leave this rank, and bytes that come."""
        return sum(s.num_bytes for s in self._out.values()), sum(s.num_bytes for s in self._into.values())

    def start(self) -> None:
        """Let the first round travel while this rank does other things."""
        self._post(0)

    def finish(self) -> None:
        """Wait for the first round, and send and receive all others."""
        for number in range(self._num_rounds):
            if number:
                self._post(number)
            for work in self._under_way:
                work.wait()
            for stream in self._into.values():
                stream.take(number)

    def _post(self, number: int) -> None:
        self._under_way = post(
            {rank: stream.messages(number, fill=True) for rank, stream in self._out.items()},
            {rank: stream.messages(number, fill=False) for rank, stream in self._into.items()},
        )
