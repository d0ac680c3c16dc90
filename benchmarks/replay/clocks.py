"""The clocks of a replay: one that sleeps as long as it is told, and one that only counts.

With :class:`VirtualClock` nobody sleeps. A rank's time passes where its layers, links and moves are told to take some,
and where the library works, by stated constants. Real messages carry the time along (``travelling.py``).
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dynpipe_ds.measure import Clock, HostClock, Span, Work, current_clock
from dynpipe_ds.planning import pace

Pass = Literal["forward", "backward", "weight"]
"""What a stage does with a micro-batch, layer by layer; ``"weight"``: what was left of a backward for later."""


class ReplayClock(Clock, Protocol):
    """What replay layers and links need besides what an engine reads.

    Attributes:
        arrivals: when messages that come here arrive.
    """

    arrivals: Arrivals

    def begin(self, kind: Pass) -> None:
        """Turn to another pass, of which the layers follow.

        Args:
            kind: of it.
        """

    def lasts(self, seconds: float) -> AbstractContextManager[None]:
        """Let what is inside, a layer's part of a pass, last as long as told.

        Args:
            seconds: from begin to end.
        """

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: how much.
        """

    def reach(self, moment_s: float) -> None:
        """Let time pass until a moment, unless that is over.

        Args:
            moment_s: as ``now_s`` counts.
        """


class Arrivals:
    """When messages of a stage arrive: those of a channel follow each other on its wire, which carries one at a time.

    Args:
        clock: of the receiver.
    """

    def __init__(self, clock: ReplayClock) -> None:
        self._clock = clock
        self._free_s: dict[Hashable, float] = {}
        self._left_s: float | None = None
        self._receives = False

    def left(self, moment_s: float) -> None:
        """Take note of when something that has come was sent.

        Args:
            moment_s: as the clock counts.
        """
        if self._receives:
            self._left_s = max(self._left_s or moment_s, moment_s)
        else:
            self._clock.reach(moment_s)

    @contextmanager
    def receiving(self, channel: Hashable, link_s: float) -> Iterator[None]:
        """Wait for the message that is received inside, if there is one: until it was sent and has travelled.

        Args:
            channel: whose wire it takes.
            link_s: seconds that it takes it.
        """
        self._receives, self._left_s = True, None
        try:
            yield
        finally:
            self._receives = False
        if self._left_s is not None:
            arrives_s = max(self._free_s.get(channel, self._left_s), self._left_s) + link_s
            self._free_s[channel] = arrives_s
            self._clock.reach(arrives_s)


def replay_clock() -> ReplayClock:
    """The clock in use, which must be one of a replay."""
    clock = current_clock()
    if not hasattr(clock, "lasts"):
        raise RuntimeError(f"{type(clock).__name__} is no replay's clock; call use_clock before the engine is made")
    return clock  # type: ignore[return-value]


class SleepingClock(HostClock):
    """The machine's own time; layers sleep.

    A layer begins when the one before it *should* have ended: a sleep that ends late, as all do on a busy machine,
    then makes a pass late once and not once a layer.

    Attributes:
        works_s: seconds of all that the library did, by kind.
        arrivals: when messages that come here arrive.
    """

    def __init__(self) -> None:
        self.arrivals = Arrivals(self)
        self.works_s: dict[str, list[float]] = {}
        self._due_s: float | None = None

    @contextmanager
    def work(self, kind: Work) -> Iterator[Span]:
        """Time what the library does inside, and keep it: constants of a virtual clock come from there.

        Args:
            kind: what it is.
        """
        with super().work(kind) as span:
            yield span
        if span.was_needed:
            self.works_s.setdefault(kind, []).append(span.seconds)

    def begin(self, kind: Pass) -> None:
        """Let the first layer of a pass begin when it does; see :class:`ReplayClock`."""
        self._due_s = None

    @contextmanager
    def lasts(self, seconds: float) -> Iterator[None]:
        """Sleep for what is left when the inside is done; see :class:`ReplayClock`."""
        self._due_s = (self.now_s() if self._due_s is None else self._due_s) + seconds
        yield
        self.advance(self._due_s - self.now_s())

    def advance(self, seconds: float) -> None:
        """Sleep.

        Args:
            seconds: how long; nothing below 0.
        """
        if seconds > 0:
            time.sleep(seconds)

    def reach(self, moment_s: float) -> None:
        """Sleep until a moment.

        Args:
            moment_s: as :meth:`now_s` counts, which is alike for all processes of a machine.
        """
        self.advance(moment_s - self.now_s())


@dataclass(frozen=True)
class Costs:
    """What everything but the layers takes, as constants. The default: nothing, and bytes travel in no time.

    Args:
        forward_s: a forward through a stage, beside its layers.
        backward_s: a backward, and the first part of one in two parts.
        weight_s: the second part of one.
        message_s: one message on its way, and one exchange of moving layers between two ranks that have met.
        step_s: gradient reduction and optimizer step.
        batch_s: what lies between two batches beside the library's work.
        work_s: of each kind of the library's work.
        bytes_per_s: speed at which layers move.
        planning_speed: how many times as fast planning is as it says itself, see :func:`~dynpipe_ds.planning.pace`.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0
    batch_s: float = 0.0
    work_s: dict[str, float] = field(default_factory=dict)
    bytes_per_s: float = float("inf")
    planning_speed: float = float("inf")

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name != "work_s"} | self.work_s
        for name, value in numbers.items():
            if not value >= 0 or (name in ("bytes_per_s", "planning_speed") and value == 0):
                raise ValueError(f"costs: {name} = {value} must not be negative" + " or 0" * (name == "bytes_per_s"))


class VirtualClock(HostClock):
    """Time that passes only where it is told to.

    Args:
        costs: of everything but the layers.
        byte_scale: bytes of the model told for one that this replay's layers hold.

    Attributes:
        arrivals: when messages that come here arrive.
    """

    def __init__(self, costs: Costs | None = None, byte_scale: float = 1.0) -> None:
        self.costs = costs or Costs()
        self.byte_scale = byte_scale
        self.arrivals = Arrivals(self)
        self._now_s = 0.0
        self._works = False
        self._pass_s = 0.0

    # -- what an engine reads -----------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s

    @contextmanager
    def work(self, kind: Work) -> Iterator[Span]:
        """Charge what the library does inside, its messages included; those still wait for whom they are from.

        Args:
            kind: what it is.
        """
        with super().work(kind) as span:
            works, self._works = self._works, True
            try:
                yield span
            finally:
                self._works = works
                if span.was_needed:
                    self.advance(self.costs.work_s.get(kind, 0.0))
                    self.advance(span.num_bytes * self.byte_scale / self.costs.bytes_per_s)
                    self.advance(span.num_computations / (pace().computations_per_s * self.costs.planning_speed))

    # -- how it passes ------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: how much.
        """
        self._now_s += seconds

    def reach(self, moment_s: float) -> None:
        """Let time pass until a moment, unless that is over.

        Args:
            moment_s: as :meth:`now_s` counts.
        """
        self._now_s = max(self._now_s, moment_s)

    def meet(self, moments_s: Sequence[float]) -> None:
        """Exchange messages with others, which begins when all have come to it.

        Args:
            moments_s: when they came.
        """
        self.reach(max(moments_s))
        if not self._works:
            self.advance(self.costs.message_s)

    def begin(self, kind: Pass) -> None:
        """Note what the pass takes beside its layers, if it has any."""
        costs = {"forward": self.costs.forward_s, "backward": self.costs.backward_s, "weight": self.costs.weight_s}
        self._pass_s = costs[kind]

    @contextmanager
    def lasts(self, seconds: float) -> Iterator[None]:
        """Let a layer take its time; the first of a pass also what a pass takes beside its layers."""
        self.advance(self._pass_s)
        self._pass_s = 0.0
        yield
        self.advance(seconds)
