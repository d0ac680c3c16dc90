"""What a batch's marks say."""

from __future__ import annotations

from collections.abc import Sequence

from dynpipe_ds.measure.recorder import BACKWARD, FORWARD, LOAD, STEP, TRANSFER, BatchRecorder

MARKS = [
    (TRANSFER, -1, 9.0), (FORWARD, 1, 1.0), (FORWARD, 1, 0.5), (FORWARD, 2, 2.0), (LOAD, -1, 9.0),
    (FORWARD, 1, 3.0), (BACKWARD, 2, 4.0), (BACKWARD, 1, 5.0), (TRANSFER, -1, 9.0), (BACKWARD, 1, 6.0),
    (STEP, -1, 9.0),
]  # fmt: skip


class Told:
    """A clock whose stamps are apart by what the test says."""

    def stamp(self) -> None:
        """Nothing to look at."""

    def durations_s(self, stamps: Sequence[object]) -> list[float]:
        """Seconds of the marks, in order."""
        assert len(stamps) == len(MARKS) + 1
        return [seconds for _, _, seconds in MARKS]


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
