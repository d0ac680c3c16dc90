"""Channels between a stage and its neighbours: sends that nobody waits for, and receives posted ahead.

From one stage to another goes one channel, the messages of which arrive as they were sent. A message is a few rows of
bytes (``rows.py``), one of which has its label (``labels.py``). Another one than planned refuses the batch.

* A send copies what it sends, so that nothing under way is changed or freed, and is over at once. There are never more
  under way than the order itself implies (``traffic.most_under_way``); with more, the oldest is waited for.
* A receive is posted as soon as it is known what will come, up to ``WINDOW`` of them on a channel. A telling row can be
  posted before anything is known; what follows it not before it was heard.
* Nothing is posted beyond the end of a batch. Before the optimizer's step all is over (:meth:`Channels.finish`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dynpipe_ds.messages.crossing import FIRST_BYTES, Crossing, Links, Told
from dynpipe_ds.messages.labels import LABEL_BYTES, Stamp
from dynpipe_ds.messages.rows import Room, rows_of, told_in
from dynpipe_ds.messages.traffic import SENT, TAKEN, Message, Traffic
from dynpipe_ds.schedule import Op

WINDOW = 2
"""Most receives of a channel that are posted and not taken: so many micro-batches' tensors wait here at most."""

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
        rows = rows_of(self._stamp.label(message), told, tensors, self._device)
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
    room: Room | None = None  # of the tensors; None: of a telling row


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
        room = Room(crossing, is_told, self._device)
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
        self._compare(posted.message, row[:LABEL_BYTES])
        return told_in(row.cpu().numpy().tobytes(), self._receive_bytes)

    def _receive_bytes(self, count: int) -> bytes:
        row = torch.empty(count, dtype=torch.uint8, device=self._device)
        self._wire.receive(row).wait()
        return row.cpu().numpy().tobytes()

    def _check(self, message: Message, label: Tensor) -> None:
        """Look at a label, at once where that stops no device."""
        if label.device.type == "cpu":
            self._compare(message, label)
        else:
            self._unread.append((message, label.clone()))

    def _compare(self, message: Message, label: Tensor) -> None:
        if (difference := self._stamp.read(message, label.cpu().numpy().tobytes())) is not None:
            self._refuse(difference)


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
    _stamp: Stamp = field(default_factory=Stamp)
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
        self._turns = {op: deque(traffic.turns[op]) if op in traffic.turns else count() for op in (*SENT, *TAKEN)}
        self._stamp = stamp = Stamp((self._stamp.batch + 1) % _BATCHES, traffic.digest)
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
    def is_dropped(self) -> bool:
        """Whether the batch is given up, here or on a stage that has sent something since."""
        return self._stamp.is_dropped

    def drop(self) -> None:
        """Give the batch up: every message travels as planned, but those who take one need not compute any more."""
        self._stamp.is_dropped = True

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
