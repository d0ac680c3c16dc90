"""Taking the time on a device: events on its stream, or the clock where computing is synchronous."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class Spread(NamedTuple):
    """Some measured numbers in short.

    Attributes:
        median: of them.
        low: first quartile.
        high: third quartile.
        count: how many.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Of at least one number."""
        low, _, high = statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3
        return cls(statistics.median(numbers), low, high, len(numbers))

    def text(self, scale: float = 1.0, form: str = ".3f") -> str:
        """``median (low to high)``, each multiplied by the scale."""
        median, low, high = (format(scale * value, form) for value in self[:3])
        return f"{median} ({low} to {high})"


class _Moment:
    """A moment on the device's stream, or on the clock."""

    def __init__(self, device: torch.device) -> None:
        self.event: Any = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.time_s = time.perf_counter()

    def until(self, later: _Moment) -> float:
        """Seconds to a later moment; the device must have come to both."""
        if self.event is None:
            return later.time_s - self.time_s
        return float(self.event.elapsed_time(later.event)) / 1e3


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    actions: Sequence[Callable[[], Any]], device: torch.device, *, rounds: int, warm_up: int, until_s: float
) -> list[list[float]]:
    """Device seconds of several actions, in turns and in reversed order from round to round.

    Args:
        actions: what is timed; nothing waits for the device in between.
        device: whose stream they run on.
        rounds: that count, at most.
        warm_up: rounds before that don't.
        until_s: no round begins after this :func:`time.time`, but the first that counts.

    Returns:
        For each action its seconds, round by round.
    """
    spans: list[list[tuple[_Moment, _Moment]]] = [[] for _ in actions]
    for number in range(warm_up + rounds):
        if number > warm_up and time.time() > until_s:
            break
        for i in range(len(actions)) if number % 2 == 0 else reversed(range(len(actions))):
            begin = _Moment(device)
            actions[i]()
            if number >= warm_up:
                spans[i].append((begin, _Moment(device)))
        if number < warm_up or number % 8 == 0:
            settle(device)  # the host must not run ahead without bound
    settle(device)
    return [[begin.until(end) for begin, end in found] for found in spans]


def wall_s(action: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds of an action, from an idle device to an idle device."""
    settle(device)
    started = time.perf_counter()
    action()
    settle(device)
    return time.perf_counter() - started


def allocated_bytes(device: torch.device) -> int:
    """What tensors occupy on the device now; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def forget_peak(device: torch.device) -> None:
    """Let :func:`peak_bytes` begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most that tensors occupied on the device; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
