"""Traces: what every layer of a dynamic model takes, batch by batch, and where the numbers are from."""

from benchmarks.traces.trace import Source, Trace, TraceBatch

__all__ = ["Source", "Trace", "TraceBatch"]
