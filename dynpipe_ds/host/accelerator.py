"""The device that DeepSpeed computes on: its name, its clock, its random stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor


class Event(Protocol):
    """A moment on a device's stream."""

    def record(self) -> None:
        """Let it be now, on the current stream."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this event to a later one."""


def kind() -> str:
    """What DeepSpeed calls the device, such as ``"cpu"`` or ``"cuda"``."""
    return str(get_accelerator().device_name())


def device() -> torch.device:
    """The device of this process."""
    return torch.device(get_accelerator().current_device_name())


def num_devices() -> int:
    """Devices that this process sees."""
    return int(get_accelerator().device_count())


def memory_bytes() -> int:
    """Memory of the first device."""
    return int(get_accelerator().total_memory(0))


def peak_memory_bytes() -> int:
    """Most memory that tensors took so far on this process's device; 0 where nobody counts."""
    return int(get_accelerator().max_memory_allocated() or 0)


def is_synchronous() -> bool:
    """Whether a computation is done when its call returns, as on a CPU."""
    return bool(get_accelerator().is_synchronized_device())


def finish() -> None:
    """Wait until the device has done all that it was told."""
    get_accelerator().synchronize()


def backend() -> str:
    """Name of the communication back-end that DeepSpeed wants for the device."""
    return str(get_accelerator().communication_backend_name())


def event() -> Event:
    """An event that can be timed, not recorded yet."""
    timed: Event = get_accelerator().Event(enable_timing=True)
    return timed


def random_state() -> Tensor | None:
    """State of the device's random stream; ``None`` on a CPU, whose stream is torch's."""
    if kind() == "cpu":
        return None
    state: Tensor = get_accelerator().get_rng_state()
    return state


def set_random_state(state: Tensor) -> None:
    """Put back what :func:`random_state` gave; nothing on a CPU."""
    if kind() != "cpu":
        get_accelerator().set_rng_state(state)


def seed(value: int) -> None:
    """Seed the streams of all devices that this process sees; nothing on a CPU, whose stream is torch's.

    Args:
        value: the seed.
    """
    if kind() != "cpu":
        get_accelerator().manual_seed_all(value)


def tracked_states() -> dict[str, Tensor]:
    """States of the random streams that DeepSpeed's activation checkpointing keeps, by name."""
    return dict(checkpointing.get_cuda_rng_tracker().get_states())


def set_tracked_states(states: dict[str, Tensor]) -> None:
    """Put back what :func:`tracked_states` gave."""
    checkpointing.get_cuda_rng_tracker().set_states(states)


def copies_aside(copy: Callable[[], object]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Let the device copy something to the host while it computes, after all that it was told so far.

    Args:
        copy: tells it to, without waiting for it.

    Returns:
        What lets the device wait for the copies before it goes on computing, and what lets the caller wait for them.
    """
    side = get_accelerator().Stream()
    side.wait_stream(get_accelerator().current_stream())
    with get_accelerator().stream(side):
        copy()
        done = get_accelerator().Event()
        done.record(side)
    computing = get_accelerator().current_stream()
    return (lambda: computing.wait_event(done)), done.synchronize
