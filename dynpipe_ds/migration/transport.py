"""Point-to-point transfers among ranks that can't deadlock and use bounded buffers, or none.

Tensors in host memory are read by the receiver where it can read the sender's memory (``ranks/cross_memory.py``).
Everything else travels in messages.

Every rank takes part in the same numbered rounds. In one round it posts all its sends and receives,
then waits for them; a rank in round ``r`` waits only for partners that are in round ``r`` or on their
way to it, so no cycle of waiting can form, however many stages send in whatever direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from dynpipe_ds.host import accelerator
from dynpipe_ds.ranks.cross_memory import CrossMemory, Piece, split

DIRECT_BYTES = 256 * 2**10
"""Tensors of at least so many bytes travel from and into their own memory.

Smaller ones share a message: below this, a message of its own costs more than copying twice.
"""

READ_BYTES = 2 * 2**20
"""So much of another rank's memory is read at a time."""

_READERS = 2  # threads: one is slowed down by new pages, and the processor of the rank that is read is free meanwhile

FIRST_BYTES = 16 * 2**10
"""Size of the message that byte strings of unknown length begin with; more follows only if it is too short."""

_LENGTH_BYTES = 8


class Posted(NamedTuple):
    """Messages on their way.

    Attributes:
        receives: what to wait for until this rank's have come.
        sends: what to wait for until those of others have left.
    """

    receives: list[dist.Work]
    sends: list[dist.Work]

    def wait_for_receives(self) -> None:
        """Wait until this rank's have come; once, since some back-ends would then wait for more."""
        for work in self.receives:
            work.wait()

    def wait_for_sends(self) -> None:
        """Wait until those of others have left; once."""
        for work in self.sends:
            work.wait()


def post(sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]) -> Posted:
    """Begin to send contiguous tensors to some ranks and to fill others from some.

    Args:
        sends: tensors by destination rank.
        receives: tensors to fill by source rank; in number, size, dtype and order the sender's.

    Returns:
        What to wait for.
    """
    operations = [dist.P2POp(dist.irecv, t, rank) for rank, tensors in sorted(receives.items()) for t in tensors]
    num_receives = len(operations)
    operations += [dist.P2POp(dist.isend, t, rank) for rank, tensors in sorted(sends.items()) for t in tensors]
    works = dist.batch_isend_irecv(operations) if operations else []
    if len(works) < len(operations):  # one for all
        return Posted(works, []) if num_receives else Posted([], works)
    return Posted(works[:num_receives], works[num_receives:])


def exchange(sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]) -> None:
    """As :func:`post`, but blocks until all have travelled.

    Args:
        sends: tensors by destination rank.
        receives: tensors to fill by source rank; in number, size, dtype and order the sender's.
    """
    posted = post(sends, receives)
    posted.wait_for_receives()
    posted.wait_for_sends()


class Letters:
    """Byte strings whose lengths the receivers don't know, on their way; one message each unless they are long.

    Args:
        sends: bytes by destination rank.
        sources: ranks that send to this one.
        device: device that the back-end communicates from.
        first_bytes: size of the message that they begin with; the same on every rank.
    """

    def __init__(
        self, sends: Mapping[int, bytes], sources: Iterable[int], device: torch.device, *,
        first_bytes: int = FIRST_BYTES,
    ) -> None:
        self._device = device
        self._first = {rank: torch.empty(first_bytes, dtype=torch.uint8, device=device) for rank in sources}
        whole = {rank: _with_length(data, first_bytes).to(device) for rank, data in sends.items()}
        self._posted = [
            post({r: [data[:first_bytes]] for r, data in whole.items()}, {r: [t] for r, t in self._first.items()}),
            post({r: [data[first_bytes:]] for r, data in whole.items() if data.numel() > first_bytes}, {}),
        ]

    def read(self) -> dict[int, bytes]:
        """Wait until all have travelled.

        Returns:
            The bytes by source rank.
        """
        self._posted[0].wait_for_receives()
        started = {rank: data.cpu().numpy().tobytes() for rank, data in self._first.items()}
        sizes = {rank: int.from_bytes(data[:_LENGTH_BYTES], "little") for rank, data in started.items()}
        missing = {rank: size + _LENGTH_BYTES - len(started[rank]) for rank, size in sizes.items()}
        rest = {r: torch.empty(n, dtype=torch.uint8, device=self._device) for r, n in missing.items() if n > 0}
        exchange({}, {rank: [data] for rank, data in rest.items()})
        for posted in self._posted:
            posted.wait_for_sends()
        return {
            rank: data[_LENGTH_BYTES : _LENGTH_BYTES + sizes[rank]]
            + (rest[rank].cpu().numpy().tobytes() if rank in rest else b"")
            for rank, data in started.items()
        }


def exchange_bytes(sends: Mapping[int, bytes], sources: Iterable[int], device: torch.device) -> dict[int, bytes]:
    """Exchange byte strings whose lengths the receivers don't know.

    Args:
        sends: bytes by destination rank.
        sources: ranks that send to this one.
        device: device that the back-end communicates from.

    Returns:
        The bytes by source rank.
    """
    return Letters(sends, sources, device).read()


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


class _Part(NamedTuple):
    """Some of the bytes of a dense tensor.

    Attributes:
        tensor: itself.
        start: the first of them.
        num_bytes: how many.
    """

    tensor: Tensor
    start: int
    num_bytes: int

    def view(self) -> Tensor:
        """A row of bytes that shares the tensor's memory."""
        row = flat_view(self.tensor).view(torch.uint8)
        return row if row.numel() == self.num_bytes else row[self.start : self.start + self.num_bytes]


class _Round(NamedTuple):
    """What one partner gets, or gives, at a time.

    Attributes:
        small: parts of tensors that share a message.
        direct: parts of tensors that are a message each.
    """

    small: list[_Part]
    direct: list[_Part]

    @property
    def sizes(self) -> MessageSizes:
        """Of its messages."""
        return sum(part.num_bytes for part in self.small), [part.num_bytes for part in self.direct]


MessageSizes = tuple[int, list[int]]
"""Bytes of the messages of a round: of the one that small parts share, 0 if there is none, and of all others."""


class _Messages(ABC):
    """What one other rank sends here or gets from here.

    Args:
        sizes: of the messages, round by round.
        room_bytes: of the memory that a round's messages share, if any do.
        device: device that the back-end communicates from.
    """

    def __init__(self, sizes: Sequence[MessageSizes], room_bytes: int, device: torch.device) -> None:
        self.sizes = sizes
        self._room = torch.empty(room_bytes, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(shared + sum(others) for shared, others in self.sizes)

    def shared(self, number: int) -> list[Tensor]:
        """The message that the small parts of a round share, if there are any."""
        size = self.sizes[number][0] if number < len(self.sizes) else 0
        return [self._room[:size]] if size else []

    @abstractmethod
    def direct(self, number: int) -> list[Tensor]:
        """The messages that large parts of a round are."""

    @abstractmethod
    def take(self, number: int) -> None:
        """Take in what small parts of a round share, when it has come."""


class _Drain(_Messages):
    """Messages that are received, and of which nothing is kept: they overwrite each other."""

    def __init__(self, sizes: Sequence[MessageSizes], device: torch.device) -> None:
        most_bytes = max((size for shared, others in sizes for size in (shared, *others)), default=0)
        super().__init__(sizes, most_bytes, device)

    @override
    def direct(self, number: int) -> list[Tensor]:
        return [self._room[:size] for size in self.sizes[number][1]] if number < len(self.sizes) else []

    @override
    def take(self, number: int) -> None:
        pass


class _Stream(_Messages):
    """A list of tensors sent or received in rounds of bounded size.

    Sender and receiver cut alike: by sizes and kinds of device, which both know.

    Args:
        tensors: dense ones.
        round_bytes: most bytes of a round.
        direct_bytes: least size of a message of its own.
        device: device that the back-end communicates from.
    """

    def __init__(
        self, tensors: Iterable[Tensor], round_bytes: int, direct_bytes: int, device: torch.device
    ) -> None:
        self._rounds: list[_Round] = []
        free_bytes = 0
        for tensor in (t.detach() for t in tensors):  # a parameter may get other memory meanwhile
            start, num_bytes = 0, tensor.nbytes
            is_here = num_bytes >= direct_bytes and tensor.device.type == device.type
            while start < num_bytes:
                if free_bytes == 0:
                    self._rounds.append(_Round([], []))
                    free_bytes = round_bytes
                part = _Part(tensor, start, min(num_bytes - start, free_bytes))
                is_direct = is_here and part.num_bytes >= direct_bytes
                (self._rounds[-1].direct if is_direct else self._rounds[-1].small).append(part)
                start += part.num_bytes
                free_bytes -= part.num_bytes
        sizes = [each.sizes for each in self._rounds]
        super().__init__(sizes, max((shared for shared, _ in sizes), default=0), device)

    def fill(self, number: int) -> None:
        """Copy the small parts of a round into their message, in order to send it."""
        for shared in self.shared(number):
            parts = [part.view() for part in self._rounds[number].small]
            if all(part.device == shared.device for part in parts):
                torch.cat(parts, out=shared)
            else:
                torch._foreach_copy_(self._places(number), parts)

    @override
    def direct(self, number: int) -> list[Tensor]:
        return [part.view() for part in self._rounds[number].direct] if number < len(self.sizes) else []

    @override
    def take(self, number: int) -> None:
        if self.shared(number):
            torch._foreach_copy_([part.view() for part in self._rounds[number].small], self._places(number))

    def _places(self, number: int) -> list[Tensor]:
        [shared] = self.shared(number)
        return list(torch.split(shared, [part.num_bytes for part in self._rounds[number].small]))


class Transfer:
    """Lists of tensors of known shapes on their way between ranks, in rounds of bounded size.

    Large tensors on a device of the back-end's kind are sent from, and received into, their own memory;
    the others share a message a round, through a buffer. All memory that is needed is taken before it starts.
    What a rank offers to one that can read its memory is in no message.

    Args:
        sends: dense tensors by destination rank.
        receives: as for :meth:`receive`.
        buffer_bytes: most bytes to or from one partner at a time; the same on every rank.
        device: device that the back-end communicates from.
        direct_bytes: least size of a message of its own; the same on every rank.
        memory: who can read whose; nobody by default.
    """

    def __init__(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, Sequence[Tensor]],
        *,
        buffer_bytes: int,
        device: torch.device,
        direct_bytes: int = DIRECT_BYTES,
        memory: CrossMemory | None = None,
    ) -> None:
        self._cut = buffer_bytes, direct_bytes, device
        self._memory = memory or CrossMemory()
        self._offers = {rank: self._offer(rank, tensors) for rank, tensors in sends.items()}
        self._offered = [t for rank, tensors in sends.items() for t in _chosen(tensors, self._offers[rank])]
        self._out = {
            rank: _Stream(_chosen(tensors, self._offers[rank], is_offered=False), *self._cut)
            for rank, tensors in sends.items()
        }
        self._into: dict[int, _Messages] = {}
        self._reads: list[Tensor] = []
        self._pieces: list[tuple[int, list[Piece]]] = []
        self._reading: list[Callable[[], OSError | None]] = []
        self.receive(receives)
        self._round = -1
        self._small = self._large = Posted([], [])

    def _offer(self, rank: int, tensors: Sequence[Tensor]) -> list[int]:
        if not self._memory.is_read_by(rank):
            return []
        on_host = [t.device.type == "cpu" and t.nbytes > 0 for t in tensors]
        if self._cut[-1].type != "cpu" and any(on_host):
            accelerator.finish()  # it may still be writing to host memory
            on_host = [is_so and not t.is_pinned() for t, is_so in zip(tensors, on_host, strict=True)]
        return [t.data_ptr() if is_so else 0 for t, is_so in zip(tensors, on_host, strict=True)]

    def offers(self, rank: int) -> list[int]:
        """Addresses that a rank shall read, of each tensor that is sent there: 0 if it comes in messages.

        Args:
            rank: receives them; no addresses if it can't read this rank's memory.
        """
        return self._offers.get(rank, [])

    def receive(
        self, receives: Mapping[int, Sequence[Tensor]], offers: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Expect tensors, before it starts.

        Args:
            receives: dense tensors to fill by source rank, in the sender's order, on the same kinds of device.
            offers: by source rank, its :meth:`offers`.
        """
        for rank, tensors in receives.items():
            addresses = (offers or {}).get(rank, [])
            read = _chosen(tensors, addresses)
            if read:
                self._reads += read
                pairs = zip(filter(None, addresses), read, strict=True)
                self._pieces.append((rank, [Piece(source, t.data_ptr(), t.nbytes) for source, t in pairs]))
            self._into[rank] = _Stream(_chosen(tensors, addresses, is_offered=False), *self._cut)

    def drain(self, sizes: Mapping[int, Sequence[MessageSizes]]) -> None:
        """Expect messages that are not wanted any more, before it starts.

        Args:
            sizes: by source rank, its :meth:`message_sizes`.
        """
        self._into |= {rank: _Drain(its, self._cut[-1]) for rank, its in sizes.items()}

    def message_sizes(self, rank: int) -> Sequence[MessageSizes]:
        """Those of all rounds to a rank; none if nothing is sent there."""
        return self._out[rank].sizes if rank in self._out else []

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes that leave this rank, and bytes that come."""
        leave = sum(s.num_bytes for s in self._out.values()) + sum(t.nbytes for t in self._offered)
        come = sum(s.num_bytes for s in self._into.values())
        return leave, come + sum(piece.num_bytes for _, pieces in self._pieces for piece in pieces)

    @property
    def _num_rounds(self) -> int:
        return max((len(stream.sizes) for stream in (*self._out.values(), *self._into.values())), default=0)

    def start(self) -> None:
        """Let the first round travel, and read what others offer, while this rank does other things."""
        parts = [(rank, part) for rank, pieces in self._pieces for part in split(pieces, READ_BYTES)]
        if len(parts) > 1:
            readers = ThreadPoolExecutor(_READERS, "dynpipe_ds reading")
            self._reading = [readers.submit(self._read, *part).result for part in parts]
            readers.shutdown(wait=False)
        elif parts:  # a thread would take longer to begin
            failure = self._read(*parts[0])
            self._reading = [lambda: failure]
        self._begin_round()

    def _read(self, rank: int, pieces: Sequence[Piece]) -> OSError | None:
        try:
            self._memory.read(rank, pieces)
        except OSError as error:
            return error
        return None

    def reading_failure(self) -> OSError | None:
        """Wait until all that others offer has been read, or could not be, and then why."""
        failures = [wait() for wait in self._reading]
        return next((failure for failure in failures if failure is not None), None)

    def send_rest(self) -> None:
        """Begin every round, each when the one before has come; from then on, nobody waits for this rank."""
        while self._round + 1 < self._num_rounds:
            self._end_round()
            self._begin_round()
        self._take_small()  # while large parts still travel

    def finish(self) -> None:
        """Wait until everything has come; nothing to do if it has."""
        self.send_rest()
        self._end_round()
        self.reading_failure()

    def _begin_round(self) -> None:
        self._round = number = self._round + 1
        for stream in self._out.values():
            stream.fill(number)
        self._small = post(
            {rank: stream.shared(number) for rank, stream in self._out.items()},
            {rank: stream.shared(number) for rank, stream in self._into.items()},
        )
        self._large = post(
            {rank: stream.direct(number) for rank, stream in self._out.items()},
            {rank: stream.direct(number) for rank, stream in self._into.items()},
        )

    def _take_small(self) -> None:
        small, self._small = self._small, Posted([], [])
        small.wait_for_receives()
        for stream in self._into.values() if small.receives else ():
            stream.take(self._round)
        small.wait_for_sends()

    def _end_round(self) -> None:
        large, self._large = self._large, Posted([], [])
        self._take_small()
        large.wait_for_receives()
        large.wait_for_sends()


def _chosen(tensors: Sequence[Tensor], addresses: Sequence[int], *, is_offered: bool = True) -> list[Tensor]:
    """Tensors that are offered, or those that are not; without addresses none is.

    Each in the memory that it has now: a parameter may get other memory while its weights are read.
    """
    told = addresses or [0] * len(tensors)
    return [t.detach() for t, address in zip(tensors, told, strict=True) if bool(address) is is_offered]
