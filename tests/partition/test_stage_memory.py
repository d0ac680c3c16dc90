"""What a stage holds under 1F1B."""

import numpy as np
import pytest

from dynpipe_ds.partition import Placement, StageMemory


def test_early_stages_hold_more_activations():
    memory = StageMemory([100, 200, 300], [1, 2, 3], num_micro_batches=2, cap_bytes=10**6)
    assert [memory.in_flight(stage, 3) for stage in range(3)] == [2, 2, 1]
    assert memory.stage_bytes((0, 1, 2, 3)) == (100 + 2, 200 + 4, 300 + 3)
    assert memory.stage_bytes((0, 0, 3, 3)) == (0, 600 + 12, 0)
    assert memory.stage_bytes(Placement.from_boundaries((0, 1, 2, 3))) == memory.stage_bytes((0, 1, 2, 3))
    with pytest.raises(ValueError, match="each stage must hold one range of layers"):
        memory.stage_bytes(Placement((0, 1, 2, 3), (0, 1, 0)))


def test_caps_are_one_number_or_one_a_stage():
    assert StageMemory([1], [1], 1, 7).caps(3) == (7, 7, 7)
    assert StageMemory([1], [1], 1, [7, 8]).caps(2) == (7, 8)
    assert StageMemory([1], [1], 1, np.array([7, 8])).caps(2) == (7, 8)
    assert StageMemory([1], [1], 1, np.int64(7)).caps(2) == (7, 7)
    with pytest.raises(ValueError, match="cap_bytes has 2 entries; give one number or one for"):
        StageMemory([1], [1], 1, [7, 8]).caps(3)
    with pytest.raises(ValueError, match="cap_bytes is -8 on stage 1; it must be >= 0"):
        StageMemory([1], [1], 1, [7, -8]).caps(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [1], 1, 9), "state_bytes has 2 layers and activation_bytes 1"),
        (([1, -2], [1, 1], 1, 9), "state_bytes of layer 1 is -2"),
        (([1, 2], [1, -1], 1, 9), "activation_bytes of layer 1 is -1"),
        (([1], [1], 0, 9), "num_micro_batches is 0"),
    ],
)
def test_wrong_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        StageMemory(*arguments)
