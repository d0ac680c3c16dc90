"""What a batch's marks say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dynpipe_ds.measure.clock import HostClock
from dynpipe_ds.measure.recorder import BACKWARD, FORWARD, LOAD, STEP, TRANSFER, WEIGHT, BatchRecorder
from dynpipe_ds.messages import values
from dynpipe_ds.schedule import split_at_once

MARKS = [
    (TRANSFER, -1, 9.0), (FORWARD, 1, 1.0), (FORWARD, 1, 0.5), (FORWARD, 2, 2.0), (LOAD, -1, 9.0),
    (FORWARD, 1, 3.0), (BACKWARD, 2, 4.0), (BACKWARD, 1, 5.0), (TRANSFER, -1, 9.0), (BACKWARD, 1, 6.0),
    (STEP, -1, 9.0),
]  # fmt: skip


class Told:
    """A clock whose stamps are apart by what the test says."""

    def __init__(self, marks: Sequence[tuple[int, int, float]] = MARKS) -> None:
        self._marks = marks

    def now_s(self) -> float:
        """The host takes no time."""
        return 0.0

    def stamp(self) -> None:
        """Nothing to look at."""

    def durations_s(self, stamps: Sequence[object]) -> list[float]:
        """Seconds of the marks, in order."""
        assert len(stamps) == len(self._marks) + 1
        return [seconds for _, _, seconds in self._marks]


def test_seconds_by_micro_batch() -> None:
    """An instruction begins a micro-batch; a layer may have several marks in it."""
    recorder = BatchRecorder()
    assert recorder.by_micro_batch() == {}, "before the first batch"
    recorder._clock = Told()  # type: ignore[assignment]
    recorder.start()
    forwards = 0
    for (before, _, _), (kind, layer, _) in zip(MARKS, MARKS[1:], strict=False):
        if kind == before:
            recorder._mark(kind, layer)
        else:
            recorder.instruction(kind, layer)
            forwards += kind == FORWARD
    times = recorder.stop()
    assert times.num_micro_batches == forwards == 2
    assert recorder.by_micro_batch() == {1: ([1.5, 3.0], [5.0, 6.0]), 2: ([2.0, 0.0], [4.0, 0.0])}


@pytest.mark.parametrize("split", [(0, 1), (1,)], ids=str)
def test_what_is_computed_apart_for_weights_is_backward(split: tuple[int, ...]) -> None:
    """W's that follow each other are of several micro-batches; waiting lies between computations of any kind."""
    marks = [
        (TRANSFER, -1, 1.0), (FORWARD, 1, 1.0), (TRANSFER, -1, 2.0), (FORWARD, 1, 2.0), (BACKWARD, 1, 4.0),
        (TRANSFER, -1, 8.0), (BACKWARD, 1, 16.0), (TRANSFER, -1, 32.0),
        *([(WEIGHT, 1, 64.0), (WEIGHT, 2, 0.5)] if 0 in split else []),
        (WEIGHT, 1, 128.0), (STEP, -1, 256.0),
    ]  # fmt: skip
    recorder = BatchRecorder()
    recorder._clock = Told(marks)  # type: ignore[assignment]
    recorder.start()
    recorder.follow(split_at_once(2, 2, 1, split), 1)
    for kind, layer, _ in marks[1:]:
        if layer == 2:
            recorder.mark_layer(kind, layer)
            recorder.mark_layer(kind, layer)
        else:
            recorder.instruction(kind, layer)
    times = recorder.stop()
    if split == (1,):
        assert recorder.by_micro_batch() == {1: ([1.0, 2.0], [4.0, 16.0 + 128.0])}
        assert times.backward_s == {1: 148.0} and times.halves == {1: (144.0, 128.0)} and times.num_split == 1
        return
    assert recorder.by_micro_batch() == {1: ([1.0, 2.0], [4.0 + 64.0, 16.0 + 128.0]), 2: ([0.0, 0.0], [0.5, 0.0])}
    assert times.backward_s == {1: 212.0, 2: 0.5} and times.num_split == 2
    assert times.halves == {1: (212.0, 192.0)}, "layer 2 had no first half: that was a whole backward"
    assert (times.fill_s, times.waiting_s, times.step_s) == (1.0, 2.0 + 8.0 + 32.0, 256.0)
    assert times.compute_end_s == times.batch_s - 256.0


def test_a_whole_backward_that_waits_is_apart_too() -> None:
    recorder = BatchRecorder()
    recorder.start()
    recorder.instruction(FORWARD, 1)
    y = recorder.run(1, torch.exp, torch.ones(2, requires_grad=True))
    recorder.instruction(WEIGHT, 1)
    y.sum().backward()
    recorder.stop()
    assert [(kind, layer) for kind, layer, _ in recorder.marks] == [
        (TRANSFER, -1), (FORWARD, 1), (FORWARD, 1), (WEIGHT, 1), (WEIGHT, 1)
    ]  # fmt: skip


def first_stretches(
    *marks: tuple[int, float],
) -> tuple[tuple[float, float, bool] | None, tuple[float, float, bool] | None]:
    """What a recorder says of the first forward and the first backward, of marks that begin instructions."""
    recorder = BatchRecorder()
    recorder._clock = Told([(kind, -1, seconds) for kind, seconds in marks])  # type: ignore[assignment]
    recorder.start()
    for kind, _ in marks[1:]:
        recorder.instruction(kind)
    times = recorder.stop()
    return times.first_forward, times.first_backward


def test_when_the_first_messages_came() -> None:
    forward, backward = first_stretches(
        (TRANSFER, 1.0), (TRANSFER, 4.0), (LOAD, 0.5), (FORWARD, 2.0), (TRANSFER, 0.1), (FORWARD, 2.0),
        (TRANSFER, 8.0), (BACKWARD, 3.0), (TRANSFER, 0.1), (BACKWARD, 3.0), (STEP, 1.0),
    )  # fmt: skip
    assert forward == (5.0, 7.5, True), "samples are loaded after the activations have come"
    assert backward == (pytest.approx(17.6), pytest.approx(20.6), True)


def test_a_stage_that_did_not_wait_saw_no_message_come() -> None:
    forward, backward = first_stretches((TRANSFER, 0.0), (LOAD, 5.0), (FORWARD, 2.0), (TRANSFER, 0.2), (BACKWARD, 3.0))
    assert forward == (0.0, 7.0, False)
    assert backward == (pytest.approx(7.2), pytest.approx(10.2), False), "a message that was there takes a moment, too"
    assert first_stretches((TRANSFER, 1.0), (FORWARD, 2.0)) == ((1.0, 3.0, True), None), "frozen: no backward"


def test_what_was_timed_at_the_start_is_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, the tensor that marks are timed with would be one that can't be sent."""
    monkeypatch.setattr(values, "_device_type", lambda: "cuda")
    recorder = BatchRecorder()
    assert recorder.mark_s >= 0 and not recorder.obstacles
    recorder.start()
    recorder.instruction(FORWARD, 0)
    recorder.run(3, lambda x: x, torch.ones(2))
    assert recorder.obstacles == {3: "a tensor on the device cpu, while the stages compute on cuda"}


class Slow(HostClock):
    """A clock of a host that takes long for every stamp, and of a device that comes to each one later and later."""

    host_s = stamp_s = later_s = late_s = 0.0

    def now_s(self) -> float:
        """The host's."""
        return self.host_s

    def stamp(self) -> float:
        """The device's, once the host has told it."""
        self.host_s += self.stamp_s
        self.late_s += self.later_s
        return self.host_s + self.late_s


@pytest.mark.parametrize(("later_s", "waited"), [(0.0, 5), (1.0, 1)], ids=["host limits", "device limits"])
def test_what_the_host_spends_on_marks_counts_where_the_device_waits_for_it(later_s: float, waited: int) -> None:
    """Marks may take longer in a batch than when they were timed at the start."""
    clock = Slow()
    recorder = BatchRecorder(clock)
    clock.stamp_s, clock.later_s = 0.25, later_s
    recorder.start()
    recorder.instruction(FORWARD, 0)
    recorder.run(0, lambda x: x, torch.ones(2))
    recorder.instruction(STEP)
    recorder.stop()
    assert recorder.recording_s == waited * 0.25
