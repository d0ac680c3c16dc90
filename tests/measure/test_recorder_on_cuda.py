"""Layers are timed by events on the device's stream, and their activations counted there."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynpipe_ds.host import accelerator
from dynpipe_ds.measure.clock import DeviceClock, HostClock
from dynpipe_ds.measure.recorder import BACKWARD, FORWARD, ActivationMeter, BatchRecorder
from tests.devices import ON_DEVICES, device_of

UNIT_S = 0.02


@pytest.fixture(scope="module")
def cycles() -> int:
    """Of the device's clock in a unit of time."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(5 * 10**8)  # an idle device begins slowly
    begin.record()
    torch.cuda._sleep(10**8)
    end.record()
    end.synchronize()
    return int(1e8 * UNIT_S / (begin.elapsed_time(end) / 1e3))


class Busy(torch.autograd.Function):
    """Keeps the device busy for some units in the forward, and for twice as many in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: int, unit: int | None) -> Tensor:
        ctx.units, ctx.unit = units, unit
        return wait(x.clone(), units, unit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return wait(gradient.clone(), 2 * ctx.units, ctx.unit), None, None


def wait(x: Tensor, units: int, unit: int | None) -> Tensor:
    if unit is None:
        time.sleep(units * UNIT_S)
    else:
        torch.cuda._sleep(units * unit)
    return x


@ON_DEVICES
def test_seconds_are_those_of_the_device(kind: str, request: pytest.FixtureRequest) -> None:
    """Two layers, one of one unit and one of three; the host does not wait for the device between them."""
    device = device_of(kind)
    unit = request.getfixturevalue("cycles") if kind == "cuda" else None
    recorder = BatchRecorder()
    assert type(recorder._clock) is (DeviceClock if kind == "cuda" else HostClock)
    x = torch.ones(4, device=device, requires_grad=True)
    for _ in range(2):  # loading a kernel for the first time may wait for the device; the second gradient is added
        first = Busy.apply(x, 0, unit)
        first.backward(torch.ones_like(first))
    started = time.perf_counter()
    recorder.start()
    recorder.instruction(FORWARD, 0)
    y = recorder.run(0, lambda value: Busy.apply(value, 1, unit), x)
    z = recorder.run(1, lambda value: Busy.apply(value, 3, unit), y)
    recorder.instruction(BACKWARD, 1)
    z.backward(torch.ones_like(z))
    told_s = time.perf_counter() - started
    times = recorder.stop()
    found = [times.forward_s[0], times.forward_s[1], times.backward_s[1], times.backward_s[0]]
    units = (1, 3, 6, 2)
    assert all(seconds >= 0.7 * UNIT_S * count for seconds, count in zip(found, units, strict=True)), found
    assert times.batch_s >= 0.7 * UNIT_S * sum(units)
    if kind == "cuda":  # what sleeps on the host may sleep longer
        assert found == pytest.approx([UNIT_S * count for count in units], rel=0.25, abs=2e-3)
        assert told_s < 6 * UNIT_S, "the host waited"


class FakeEvent:
    """A moment of the host's clock, where there is no stream."""

    def record(self) -> None:
        self.time_s = time.perf_counter()

    def synchronize(self) -> None:
        self.is_awaited = True

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.time_s - self.time_s)


def test_an_asynchronous_device_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds between them become seconds; only the last one is waited for, at the end of the batch."""
    made: list[FakeEvent] = []

    def event() -> FakeEvent:
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(accelerator, "is_synchronous", lambda: False)
    monkeypatch.setattr(accelerator, "event", event)
    recorder = BatchRecorder()
    made.clear()
    recorder.start()
    recorder.instruction(FORWARD, 0)
    recorder.run(0, lambda x: wait(x, 2, None), torch.ones(2))
    assert not any(hasattr(one, "is_awaited") for one in made)
    times = recorder.stop()
    assert 0.95 * 2 * UNIT_S <= times.forward_s[0] <= times.batch_s
    assert [hasattr(one, "is_awaited") for one in made] == [False] * (len(made) - 1) + [True]


@ON_DEVICES
def test_activations_are_counted_on_the_device(kind: str) -> None:
    """As many bytes as the layer keeps, weights left out."""
    device = device_of(kind)
    stage = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).to(device)
    meter = ActivationMeter(stage)
    x = torch.randn(4, 8, device=device)
    with meter.hooks(0):
        y = stage[0](x)
    with meter.hooks(1):
        stage[1](torch.tanh(y))
    assert meter.num_bytes == {0: x.nbytes, 1: y.nbytes}, "tanh keeps its output, which the second layer shares"
