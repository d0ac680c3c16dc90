"""Streams are seeded as DeepSpeed seeds them."""

import random

import numpy
import pytest
import torch
from deepspeed.runtime.utils import set_random_seed

from dynpipe_ds.host.seeds import seed_streams


def draw():
    return random.random(), numpy.random.rand(3).tolist(), torch.rand(3).tolist(), torch.initial_seed()


@pytest.mark.parametrize("seed", [0, 1234 * 9 + 7, numpy.int64(5), 2**32 + 1, 2**63 + 1], ids=str)
def test_all_streams_give_what_they_give_after_deepspeeds_own_function(seed):
    set_random_seed(int(seed))
    expected = draw()
    seed_streams(seed)
    assert draw() == expected


def test_no_stack_is_written_down_for_devices_that_are_not_there(monkeypatch):
    """It takes longer than a small layer."""
    monkeypatch.setattr("traceback.format_stack", lambda *_: pytest.fail("a stack was written down"))
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device")
    seed_streams(3)
