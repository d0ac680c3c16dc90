"""The clock that an engine reads: the machine's own, or one that a replay lets advance.

All seconds that are measured, decided by or reported come from here; nothing else in the engine knows which clock it
is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from dynpipe_ds.host.accelerator import Event

Work = Literal["profile", "observe", "decide", "move", "freeze", "replace", "regroup"]
"""What the library does between batches: put a batch's measurements together, take in the profile, choose a partition,
move layers, rebuild the optimizer over frozen layers, replace parameters, make the world smaller."""


class Span:
    """One piece of work.

    Attributes:
        was_needed: whether there was anything to do; whoever does the work says so.
        num_bytes: that this rank sent or received for it, whichever is more; whoever does the work says so.
        num_computations: of batches, that planning orders looked at; whoever does the work says so.
        seconds: that it took, once it is over.
    """

    was_needed: bool = True
    num_bytes: int = 0
    num_computations: int = 0
    seconds: float = 0.0


class Clock(Protocol):
    """What an engine reads."""

    def now_s(self) -> float:
        """Seconds since some moment that stays the same."""

    def stamp(self) -> Any:
        """A moment in the computation, which may be still under way on a device."""

    def durations_s(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds between successive stamps.

        Args:
            stamps: what :meth:`stamp` gave, in order.
        """

    def settle(self) -> None:
        """Wait until the device has done all that it was told."""

    def work(self, kind: Work) -> AbstractContextManager[Span]:
        """Time what the library does inside.

        Args:
            kind: what it is.

        Returns:
            A context with the piece of work, whose seconds are known when it is over.
        """


class HostClock:
    """The machine's monotonic clock, for devices that compute synchronously."""

    def now_s(self) -> float:
        """Seconds since some moment that stays the same."""
        return time.perf_counter()

    def stamp(self) -> Any:
        """Take a stamp now."""
        return self.now_s()

    def durations_s(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds between successive stamps.

        Args:
            stamps: what :meth:`stamp` gave, in order.
        """
        return [b - a for a, b in zip(stamps, stamps[1:], strict=False)]

    def settle(self) -> None:
        """Do nothing: a computation is done when its call returns."""

    @contextmanager
    def work(self, kind: Work) -> Iterator[Span]:
        """Time what the library does inside.

        Args:
            kind: what it is.

        Returns:
            A context with the piece of work, whose seconds are known when it is over.
        """
        span, started_s = Span(), self.now_s()
        try:
            yield span
        finally:
            span.seconds = self.now_s() - started_s


class DeviceClock(HostClock):
    """The same, but stamps are events on the accelerator's current stream.

    Args:
        event: makes one that is not recorded yet.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event

    def stamp(self) -> Any:
        """Record an event on the current stream; does not synchronise."""
        event = self._event()
        event.record()
        return event

    def settle(self) -> None:
        """Wait for the current stream."""
        self.stamp().synchronize()

    def durations_s(self, stamps: Sequence[Any]) -> list[float]:
        """Seconds between successive stamps; waits for the last one.

        Args:
            stamps: what :meth:`stamp` gave, in order.
        """
        if stamps:
            stamps[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(stamps, stamps[1:], strict=False)]


_given: Clock | None = None


def use_clock(clock: Clock | None) -> None:
    """Let the engines that this process makes from now on read a clock of yours.

    Args:
        clock: to be read by all of them; ``None``: the machine's own, again.
    """
    global _given
    _given = clock


def current_clock() -> Clock:
    """What an engine that is made now reads: the clock that was given, or the machine's and its device's."""
    if _given is not None:
        return _given
    from dynpipe_ds.host import accelerator  # torch and DeepSpeed, which plans and simulations do without

    return HostClock() if accelerator.is_synchronous() else DeviceClock(accelerator.event)
