"""What layers take in time and memory, and the clock that says so."""

from dynpipe_ds.measure.clock import Clock, HostClock, Span, Work, current_clock, use_clock
from dynpipe_ds.measure.loads import imbalance

__all__ = ["Clock", "HostClock", "Span", "Work", "current_clock", "imbalance", "use_clock"]
