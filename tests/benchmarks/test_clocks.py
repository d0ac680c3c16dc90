"""The clocks of a replay, on one process."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.replay.calibrate import late_weight_s
from benchmarks.replay.case import Case, Result
from benchmarks.replay.clocks import Costs, SleepingClock, VirtualClock, replay_clock
from benchmarks.replay.layers import ReplayLayer
from benchmarks.replay.travelling import WallClockError, virtual_time
from dynpipe_ds.measure import HostClock, current_clock, use_clock


def test_time_passes_where_it_is_told_to() -> None:
    clock = VirtualClock(Costs(forward_s=0.5, backward_s=0.25, work_s={"move": 2.0}, bytes_per_s=8.0), byte_scale=4.0)
    clock.begin("forward")
    for _ in range(2):
        with clock.lasts(1.0):
            pass
    assert clock.now_s() == 2.5, "two layers, one pass"
    clock.begin("backward")
    clock.begin("backward")
    with clock.lasts(1.0):
        pass
    assert clock.now_s() == 3.75, "a pass without layers takes no time"
    with clock.work("move") as moving:
        moving.num_bytes = 6
    assert moving.seconds == 2.0 + 6 * 4 / 8
    with clock.work("decide") as deciding:
        clock.meet([10.0, 9.0])
    assert clock.now_s() == 10.0 and deciding.seconds == 10.0 - 8.75, "it waits for others"
    with clock.work("move") as moving:
        moving.was_needed = False
    assert moving.seconds == 0.0
    assert clock.durations_s([1.0, 1.5, 4.0]) == [0.5, 2.5]


def test_messages_take_their_time_but_within_the_librarys_work() -> None:
    clock = VirtualClock(Costs(message_s=0.5))
    clock.meet([0.0, 2.0])
    assert clock.now_s() == 2.5
    with clock.work("profile"):
        clock.meet([2.0])
    assert clock.now_s() == 2.5


def test_messages_of_a_channel_follow_each_other() -> None:
    """Sent at 1 and 2 over a wire that takes 3; a third one long after; another channel has a wire of its own."""
    clock = VirtualClock()
    for channel, left_s, arrives_s in (("a", 1.0, 4.0), ("a", 2.0, 7.0), ("b", 5.0, 8.0), ("a", 20.0, 23.0)):
        with clock.arrivals.receiving(channel, 3.0):
            clock.arrivals.left(left_s - 0.5)
            clock.arrivals.left(left_s)  # of several parts the last one counts
        assert clock.now_s() == arrives_s
    with clock.arrivals.receiving("a", 3.0):
        pass
    assert clock.now_s() == 23.0, "nothing came"
    clock.advance(10.0)
    with clock.arrivals.receiving("a", 3.0):
        clock.arrivals.left(24.0)
    assert clock.now_s() == 33.0, "it was there before it was needed"
    clock.arrivals.left(40.0)
    assert clock.now_s() == 40.0


def test_a_sleeping_clock_keeps_what_the_library_took() -> None:
    clock = SleepingClock()
    with clock.work("decide"), clock.work("observe"):
        pass
    with clock.work("freeze") as freezing:
        freezing.was_needed = False
    assert {kind: len(seconds) for kind, seconds in clock.works_s.items()} == {"observe": 1, "decide": 1}


@pytest.mark.parametrize(("costs", "message"), [
    ({"step_s": -1.0}, "step_s = -1.0 must not be negative"),
    ({"work_s": {"move": float("nan")}}, "move = nan must not be negative"),
    ({"bytes_per_s": 0.0}, "bytes_per_s = 0.0 must not be negative or 0"),
])  # fmt: skip
def test_costs_that_can_not_be_are_named(costs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(**costs)


def test_the_clock_in_use() -> None:
    with virtual_time(VirtualClock()) as clock:
        assert current_clock() is replay_clock() is clock
        layer = ReplayLayer(0, 4)
        layer.set_batch([1.5], [2.0])
        layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert clock.now_s() == 3.5
    assert isinstance(current_clock(), HostClock)
    with pytest.raises(RuntimeError, match="HostClock is no replay's clock; call use_clock"):
        ReplayLayer(0, 4)(torch.ones(1, 2))
    use_clock(clock)
    try:
        assert current_clock() is clock
    finally:
        use_clock(None)


class _Dozing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.0)
        return x


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.perf_counter()
        return gradient


def test_layers_that_read_the_machines_time_are_named() -> None:
    with virtual_time(VirtualClock()):
        with pytest.raises(WallClockError, match="layer _Dozing calls time.sleep: in a replay in virtual time"):
            _Dozing()(torch.ones(1))
        with pytest.raises(WallClockError, match="autograd function .*_Timed calls time.perf_counter"):
            _Timed.apply(torch.ones(1, requires_grad=True)).backward()
        assert time.perf_counter() > 0, "whoever is no layer may"
    _Dozing()(torch.ones(1))


def test_what_a_split_takes_longer_than_told_is_found() -> None:
    """On one stage of two, in some batches; in others backwards ran whole."""
    case = Case("model:dense:4", "static uniform, planned order", 2, 4, 6, layer_ms=6.0, clock="sleeping")
    told_s = case.weight_share * np.array(case.load_trace().batches[0].backward_s)
    split = [[0.0, 0.0, told_s[i] + 0.001 if i >= 3 else 0.0] for i in range(6)]
    whole = [[0.0, 0.0, 0.0]] * 6
    layers_s = [whole, whole, whole, split, split, split]
    result = Result(case, "", 1.0, [], [], [], [], 0.0, 0.0, 0.0, 1.0, [0, 3, 6], layers_s=layers_s)
    assert late_weight_s(result) == pytest.approx(0.003)
    with pytest.raises(ValueError, match="split no backward in 6 batches: let it run longer"):
        late_weight_s(replace(result, layers_s=[whole] * 6))
