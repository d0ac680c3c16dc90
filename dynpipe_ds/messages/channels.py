"""Channels between a stage and its neighbours: sends that nobody waits for, and receives posted ahead.

From one stage to another goes one channel, the messages of which arrive as they were sent. A message is one row of
bytes for each tensor; where its kinds are told, a row before them tells. Each message has a label, in the telling row
or behind the first tensor: batch, order, kind and micro-batch. Another one than planned refuses the batch.

* A send copies what it sends, so that nothing under way is changed or freed, and is over at once. There are never more
  under way than the order itself implies (``traffic.most_under_way``); with more, the oldest is waited for.
* A receive is posted as soon as it is known what will come, up to ``WINDOW`` of them on a channel. A telling row can be
  posted before anything is known; what follows it not before it was heard.
* Nothing is posted beyond the end of a batch. Before the optimizer's step all is over (:meth:`Channels.finish`).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dynpipe_ds.messages.crossing import FIRST_BYTES, Crossing, Links, Told
from dynpipe_ds.messages.layouts import Layout
from dynpipe_ds.messages.traffic import SENT, TAKEN, Kind, Message, Traffic
from dynpipe_ds.schedule import Op

WINDOW = 2
"""Most receives of a channel that are posted and not taken: so many micro-batches' tensors wait here at most."""

_LABEL = struct.Struct("<IIHHI")  # batch, order, kind, nothing, micro-batch
LABEL_BYTES = _LABEL.size
_LENGTH = struct.Struct("<q")
_NOTHING = b"null"
_BATCHES = 2**32


class UnfinishedBatchError(RuntimeError):
    """Raised where a batch is to begin although an earlier one ended in its middle: messages of that are under way."""


class Waitable(Protocol):
    """A row under way."""

    def wait(self) -> Any:
        """Block until it has been sent or received; raises where the connection breaks."""


class Wire(Protocol):
    """What carries the rows of two channels, one in either direction between this stage and another."""

    def send(self, row: Tensor) -> Waitable:
        """Begin to send bytes; they must neither change nor go before the work is done."""

    def receive(self, row: Tensor) -> Waitable:
        """Begin to receive bytes, which are not to be looked at before the work is done."""


class Stamp(NamedTuple):
    """What the labels of a batch have in common.

    Attributes:
        batch: number of the schedule since the start.
        digest: of its order.
    """

    batch: int = 0
    digest: int = 0

    def label(self, message: Message) -> bytes:
        """What travels with a message."""
        return _LABEL.pack(self.batch, self.digest, message.kind, 0, message.micro_batch)

    def difference(self, message: Message, label: bytes) -> str | None:
        """What a label says instead of what was planned; ``None`` if it is the planned one."""
        if label == self.label(message):
            return None
        batch, digest, kind, _, micro_batch = _LABEL.unpack(label)
        found = Stamp(batch, digest)
        names = dict(enumerate(kind.name.lower() for kind in Kind))
        came = f"the {names.get(kind, f'message of kind {kind}')} of micro-batch {micro_batch}"
        return (
            f"{came} came where {message} was planned"
            + f" (of schedule {batch} instead of {self.batch})" * (found.batch != self.batch)
            + " (by another order)" * (found.digest != self.digest)
        )


class Arrived(NamedTuple):
    """A message that is here.

    Attributes:
        crossing: the kinds of its tensors; ``None`` if the sender told that there is nothing.
        is_told: whether they were told with this message.
        tensors: new ones.
    """

    crossing: Crossing | None
    is_told: bool
    tensors: list[Tensor]


class Outgoing:
    """The sender's end of a channel.

    Args:
        wire: carries it.
        device: that rows are sent from.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire, self._device = wire, device
        self._most, self._stamp = 1, Stamp()
        self._under_way: deque[list[tuple[Waitable, Tensor]]] = deque()

    def begin(self, stamp: Stamp, most: int) -> None:
        """Start a batch.

        Args:
            stamp: of its labels.
            most: messages that may be under way.
        """
        self._stamp, self._most = stamp, max(1, most)

    def send(self, message: Message, told: Told | None, tensors: Sequence[Tensor]) -> None:
        """Send tensors, and before them what they are if that is to be told.

        Args:
            message: which one it is.
            told: their kinds; ``None``: the receiver knows them.
            tensors: of any layout; they may change as soon as this returns.
        """
        label = self._stamp.label(message)
        rows = list(_filled(tensors, b"" if told is not None else label, self._device))
        if told is not None:
            rows[:0] = _telling(label + _telling_text(told), self._device)
        self._under_way.append([(self._wire.send(row), row) for row in rows])
        while len(self._under_way) > self._most:
            self._wait_for_oldest()

    @property
    def num_under_way(self) -> int:
        """Messages that were not waited for."""
        return len(self._under_way)

    def finish(self) -> None:
        """Wait until all has been received."""
        while self._under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._under_way[0]:
            work.wait()
        self._under_way.popleft()  # and with it what kept the rows alive


@dataclass
class _Posted:
    """A receive under way: of a telling row, or of the tensors themselves."""

    message: Message
    rows: list[tuple[Waitable, Tensor]]
    room: _Room | None = None  # of the tensors; None: of a telling row


class Incoming:
    """The receiver's end of a channel.

    Args:
        wire: carries it.
        device: that rows are received to.
        window: most receives that are posted and not taken.
    """

    def __init__(self, wire: Wire, device: torch.device, window: int = WINDOW) -> None:
        self._wire, self._device, self._window = wire, device, window
        self._stamp = Stamp()
        self._expected = Links()
        self._refuse: Callable[[str], None] = lambda _: None
        self._coming: deque[Message] = deque()
        self._is_known = False
        self._posted: deque[_Posted] = deque()
        self._held: dict[Message, Arrived] = {}
        self._unread: list[tuple[Message, Tensor]] = []

    def begin(
        self, stamp: Stamp, coming: Sequence[Message] | None, expected: Links, refuse: Callable[[str], None]
    ) -> None:
        """Start a batch, and post what can be.

        Args:
            stamp: of its labels.
            coming: its messages, as they are sent; ``None``: not known, so that nothing is posted ahead.
            expected: knows of what kinds the next one is.
            refuse: takes what another message than the planned one says.
        """
        self._stamp, self._expected, self._refuse = stamp, expected, refuse
        self._is_known, self._coming = coming is not None, deque(coming or ())
        self.post_ahead()

    @property
    def num_posted(self) -> int:
        """Messages that are posted, or here, and not taken."""
        return len(self._posted) + len(self._held)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is posted, here, or still to come."""
        return not (self._posted or self._held or self._coming)

    def post_ahead(self) -> None:
        """Post what comes next, as far as it is known and there is room."""
        while self._coming and self.num_posted < self._window and self._post_next():
            pass

    def skip(self, message: Message) -> None:
        """Go on without a message that does not travel."""
        if message in self._coming:
            self._coming.remove(message)

    def take(self, message: Message) -> Arrived:
        """Wait for a message; those that come before it are kept until they are asked for."""
        if not self._is_known:
            self._coming.append(message)
        while message not in self._held:
            while not self._posted:
                if not (self._coming and self._post_next()):
                    raise RuntimeError(f"{message} is not among what the neighbouring stage sends in this batch")
            self._arrive(self._posted.popleft())
        arrived = self._held.pop(message)
        self.post_ahead()
        return arrived

    def finish(self) -> None:
        """Read the labels that were not looked at when they came."""
        for message, label in self._unread:
            self._compare(message, label)
        self._unread.clear()

    def _post_next(self) -> bool:
        """Post the next message; false if nobody can know yet what it is."""
        if self._posted and self._posted[-1].room is None:
            return False
        message = self._coming[0]
        if not self._expected.is_known(message):
            return False
        self._coming.popleft()
        if not self._expected.travels(message):
            return True
        crossing = self._expected.crossing(message)
        if crossing is None:
            row = torch.empty(FIRST_BYTES, dtype=torch.uint8, device=self._device)
            self._posted.append(_Posted(message, [(self._wire.receive(row), row)]))
        else:
            self._posted.append(self._post(message, crossing, is_told=False))
        return True

    def _post(self, message: Message, crossing: Crossing, *, is_told: bool) -> _Posted:
        room = _Room(crossing, is_told, self._device)
        return _Posted(message, [(self._wire.receive(row), row) for row in room.rows], room)

    def _arrive(self, posted: _Posted) -> None:
        """Wait for the oldest receive, and for the tensors behind it if it tells of some."""
        if posted.room is None:
            crossing = self._hear(posted)
            self._expected.heard(posted.message, crossing)
            if crossing is None:
                self._held[posted.message] = Arrived(None, True, [])
                return
            posted = self._post(posted.message, crossing, is_told=True)
            self.post_ahead()
        for work, _ in posted.rows:
            work.wait()
        room = posted.room
        assert room is not None
        if not room.is_told:
            self._check(posted.message, room.label)
        self._held[posted.message] = Arrived(room.crossing, room.is_told, room.unpacked())

    def _hear(self, posted: _Posted) -> Crossing | None:
        [(work, row)] = posted.rows
        work.wait()
        start = row.cpu().numpy().tobytes()
        self._compare(posted.message, row[:LABEL_BYTES].cpu())
        (size,) = _LENGTH.unpack_from(start, LABEL_BYTES)
        begin = LABEL_BYTES + _LENGTH.size
        missing = begin + size - FIRST_BYTES
        text = start[begin : begin + size]
        if missing > 0:
            rest = torch.empty(missing, dtype=torch.uint8, device=self._device)
            self._wire.receive(rest).wait()
            text += rest.cpu().numpy().tobytes()
        return None if text == _NOTHING else Crossing.decode(text)

    def _check(self, message: Message, label: Tensor) -> None:
        """Look at a label, at once where that stops no device."""
        if label.device.type == "cpu":
            self._compare(message, label)
        else:
            self._unread.append((message, label.clone()))

    def _compare(self, message: Message, label: Tensor) -> None:
        if (difference := self._stamp.difference(message, label.cpu().numpy().tobytes())) is not None:
            self._refuse(difference)


class _Room:
    """Memory for the tensors of a message, and the rows in which they come."""

    def __init__(self, crossing: Crossing, is_told: bool, device: torch.device) -> None:
        self.crossing, self.is_told = crossing, is_told
        self.tensors: list[Tensor] = []
        self.rows: list[Tensor] = []
        self._packed: list[tuple[Layout, Tensor, Tensor]] = []
        tail = 0 if is_told else LABEL_BYTES
        for layout in crossing.layouts:
            tensor, row = layout.room(device, tail if layout.message_bytes else 0)
            self.tensors.append(tensor)
            if row.numel():
                self.rows.append(row)
                self._packed.append((layout, row[: layout.message_bytes], tensor))
                tail = 0
        if tail:
            self.rows.append(torch.empty(tail, dtype=torch.uint8, device=device))

    @property
    def label(self) -> Tensor:
        """Behind the first tensor."""
        return self.rows[0][-LABEL_BYTES:]

    def unpacked(self) -> list[Tensor]:
        """The tensors, once all has come."""
        for layout, row, tensor in self._packed:
            layout.unpack(row, tensor)
        return self.tensors


def _filled(tensors: Sequence[Tensor], label: bytes, device: torch.device) -> Iterator[Tensor]:
    """A row for each tensor that has elements, the first one with the label behind; copies."""
    for tensor in tensors:
        if tensor.numel():
            message = Layout.of(tensor).message(tensor)
            row = torch.empty(message.numel() + len(label), dtype=torch.uint8, device=device)
            row[: message.numel()].copy_(message)
            if label:
                row[message.numel() :].copy_(_bytes(label))
            label = b""
            yield row
    if label:
        yield _bytes(label).to(device)


def _telling(text: bytes, device: torch.device) -> list[Tensor]:
    """One row of fixed size, and another one if the text is longer."""
    row = _bytes(text.ljust(FIRST_BYTES, b"\0")).to(device)
    return [row] if row.numel() == FIRST_BYTES else [row[:FIRST_BYTES], row[FIRST_BYTES:]]


def _telling_text(told: Told) -> bytes:
    text = _NOTHING if told.crossing is None else told.crossing.encode()
    return _LENGTH.pack(len(text)) + text


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@dataclass
class Channels:
    """All channels of one stage: to and from each of its neighbours.

    Args:
        wires: by neighbour.
        device: that the back-end communicates from.
        stage: index of this stage.
    """

    wires: dict[int, Wire]
    device: torch.device
    stage: int
    _batch: int = -1
    _turns: dict[Op, deque[int] | Iterator[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.out = {other: Outgoing(wire, self.device) for other, wire in self.wires.items()}
        self.into = {other: Incoming(wire, self.device) for other, wire in self.wires.items()}

    def check_over(self) -> None:
        """Make sure that another batch can begin.

        Raises:
            UnfinishedBatchError: if the one before ended in its middle.
        """
        if self._is_unfinished:
            raise UnfinishedBatchError(
                f"a batch ended in its middle on stage {self.stage}, because something raised there, so the other "
                "stages still wait for its messages; end this process, and go on from the last checkpoint"
            )

    def begin(self, traffic: Traffic, expected: Links, refuse: Callable[[str], None]) -> None:
        """Start a batch, or another schedule, after :meth:`check_over`.

        Args:
            traffic: its messages.
            expected: knows of what kinds they are.
            refuse: takes why the batch must be refused.
        """
        self.finish()
        self._batch = (self._batch + 1) % _BATCHES
        self._turns = {op: deque(traffic.turns[op]) if op in traffic.turns else count() for op in (*SENT, *TAKEN)}
        stamp = Stamp(self._batch, traffic.digest)
        for other, out in self.out.items():
            out.begin(stamp, traffic.most.get(other, 1))

        def refused_by(other: int) -> Callable[[str], None]:
            return lambda what: refuse(f"from stage {other} to stage {self.stage} {what}")

        for other, into in self.into.items():
            coming = None if traffic.arrivals is None else traffic.arrivals.get(other, ())
            into.begin(stamp, coming, expected, refused_by(other))

    def finish(self) -> None:
        """End the batch: wait for what is under way, and read what labels are left."""
        for out in self.out.values():
            out.finish()
        for into in self.into.values():
            into.finish()

    @property
    def _is_unfinished(self) -> bool:
        """Whether messages of a batch are still to be sent or taken."""
        are_left = any(isinstance(turns, deque) and turns for turns in self._turns.values())
        return are_left or not all(into.is_idle for into in self.into.values())

    def turn(self, op: Op) -> Message:
        """The message that the next instruction of a kind is for; to be asked for once for each.

        Args:
            op: a sending or receiving one.
        """
        turns = self._turns[op]
        return Message((SENT | TAKEN)[op], turns.popleft() if isinstance(turns, deque) else next(turns))
