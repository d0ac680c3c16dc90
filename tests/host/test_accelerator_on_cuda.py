"""What the library asks of the device: events, memory, random streams."""

from __future__ import annotations

import torch

from dynpipe_ds.host import accelerator
from tests.devices import ON_DEVICES, device_of


@ON_DEVICES
def test_device(kind: str) -> None:
    device = device_of(kind)
    assert accelerator.device().type == device.type and accelerator.num_devices() >= 1
    assert accelerator.is_synchronous() == (kind == "cpu") and accelerator.memory_bytes() > 0


@ON_DEVICES
def test_events_tell_the_time(kind: str) -> None:
    device = device_of(kind)
    if kind == "cpu":
        return  # DeepSpeed's CPU has no events; the host's clock is used there
    begin, end = accelerator.event(), accelerator.event()
    begin.record()
    a = torch.randn(1024, 1024, device=device)
    for _ in range(10):
        a = a @ a
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 0


@ON_DEVICES
def test_the_most_memory_is_remembered(kind: str) -> None:
    device = device_of(kind)
    before = accelerator.peak_memory_bytes()
    many = torch.empty(before + 2**24, dtype=torch.uint8, device=device)
    most = accelerator.peak_memory_bytes()
    del many
    assert accelerator.peak_memory_bytes() >= most >= before
    if kind == "cuda":
        assert most >= before + 2**24


@ON_DEVICES
def test_the_random_stream_is_carried(kind: str) -> None:
    device = device_of(kind)
    state, host = accelerator.random_state(), torch.get_rng_state()
    assert (state is None) == (kind == "cpu"), "a CPU's stream is torch's own"
    first = torch.rand(8, device=device)
    assert not torch.equal(first, torch.rand(8, device=device))
    torch.set_rng_state(host)
    if state is not None:
        accelerator.set_random_state(state)
    assert torch.equal(first, torch.rand(8, device=device))
